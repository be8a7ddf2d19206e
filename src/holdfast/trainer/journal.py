"""The journal's way to the ledger: one writer, fenced by its seat, many writes per transaction.

- Whoever takes the seat reads everything *after* that, so what it holds in memory is the
  truth until somebody else takes the seat: every transaction compares the seat (and the job's
  epoch), so a writer that was replaced changes nothing any more (`Fenced`).
- Every transaction touches the seat, and holds only behind the one before it. So a write whose
  outcome is unknown is simply sent again: it takes effect, finds that it has had its effect, or
  that it was fenced. One that is delivered again later changes nothing.
- Writes that come while a transaction is under way go together into the next one.
- A ledger without room is waited for, as any full disk is: for the trainer's `room_s`.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from holdfast import events
from holdfast.errors import Conflict, Fenced, NoRoom, TimedOut, Unavailable, UnknownOutcome
from holdfast.jobs.policy import ROOM_S
from holdfast.ledger.records import load, put
from holdfast.ledger.runtime import Runtime
from holdfast.ledger.types import (
    MAX_TXN_BYTES,
    MAX_TXN_OPS,
    Compare,
    Delete,
    Entry,
    Get,
    Put,
    Txn,
    absent,
    unchanged,
    value_is,
)
from holdfast.trainer.book import Book, read_book
from holdfast.trainer.records import Keys, Seat

__all__ = ["Journal", "Waiting", "Write", "patient"]

T = TypeVar("T")

Write = Put | Delete

DEADLINE_S = 60.0
"""How long a ledger may be out of reach before a trainer gives up."""
_FENCED = "another process acts for this job's trainer now: this one must end"
_ATTEMPTS = 16
_PAUSE_S = 0.05
_PAUSE_MOST_S = 1.0
_WAIT_S = 0.5


class Seated(events.Event, frozen=True, tag="trainer.seated"):
    """A process acts for a job from now on."""

    job: str
    term: int
    epoch: int


class Waiting(events.Event, frozen=True, tag="trainer.waiting"):
    """Something cannot be kept at the moment; it is tried again."""

    reason: str


async def patient(
    runtime: Runtime,
    room_s: float,
    on: type[Exception] | tuple[type[Exception], ...],
    call: Callable[[], Awaitable[T]],
) -> T:
    """Try again what fails with `on`, for want of room or of whatever, for `room_s`."""
    until = runtime.now() + room_s
    while True:
        try:
            return await call()
        except on as error:
            if runtime.now() >= until:
                raise
            events.emit(Waiting(reason=str(error)))
            await runtime.sleep(_WAIT_S)


@dataclass
class _Waiting:
    writes: Sequence[Write]
    done: "asyncio.Future[None]"
    bytes: int


class Journal:
    """The one writer of a job's trainer. `take` first, then `read`, then `write`."""

    def __init__(
        self,
        runtime: Runtime,
        keys: Keys,
        guards: Sequence[Compare] = (),
        *,
        deadline_s: float = DEADLINE_S,
        room_s: float = ROOM_S,
    ) -> None:
        self._runtime = runtime
        self.keys = keys
        self._guards = tuple(guards)
        self._deadline_s = deadline_s
        self._room_s = room_s
        self._queue: deque[_Waiting] = deque()
        self._flushing: asyncio.Task[None] | None = None
        self._seated = b""  # what the seat holds while it is ours
        self._last = 0  # the revision of our last write
        self.seat: Seat | None = None
        self.failure: Exception | None = None
        """Why nothing can be written any more."""
        self._failed = asyncio.Event()

    @property
    def guards(self) -> tuple[Compare, ...]:
        """What every effect compares, those of others (the vault's) too."""
        assert self._seated, "take the seat first"
        return (value_is(self.keys.seat, self._seated), *self._guards)

    def _behind(self) -> tuple[Compare, ...]:
        """True while nothing has been written behind our last write."""
        return (Compare(self.keys.seat, "mod", "==", self._last),)

    @property
    def term(self) -> int:
        """Which holder of the seat this is."""
        assert self.seat is not None, "take the seat first"
        return self.seat.term

    # ---- taking over -----------------------------------------------------------

    async def take(self, epoch: int, *, cycle: int = 0, by: str, at: float) -> Seat:
        """Become the one who acts for the job. `Fenced` when a newer incarnation is there."""
        for attempt in range(_ATTEMPTS):
            if attempt:
                await self._pause(attempt)
            try:
                stored = await load(self._runtime.ledger, self.keys.seat, Seat)
                old = stored.record if stored else None
                if stored is not None and old is not None and old.by == by:
                    self._sit(stored.record, stored.entry.value, stored.entry.mod_revision)
                    return stored.record
                if old is not None and (old.epoch, old.cycle) > (epoch, cycle):
                    break
                seat = Seat(
                    term=old.term + 1 if old else 1, epoch=epoch, cycle=cycle, by=by, at=at
                )
                held = unchanged(stored.entry) if stored else absent(self.keys.seat)
                taken = put(self.keys.seat, seat)
                txn = await self._txn([held, *self._guards], [taken], [Get(self.keys.seat)])
            except (Unavailable, UnknownOutcome):
                continue
            if txn.succeeded:
                self._sit(seat, taken.value, txn.revision)
                return seat
            if txn.results[0] == (stored.entry if stored else None):
                break  # nobody sat down in between: a guard does not hold
        else:
            raise Conflict(f"the seat at {self.keys.seat} could not be taken")
        raise Fenced("a newer incarnation of this job's trainer has taken over: stop", epoch=epoch)

    def _sit(self, seat: Seat, value: bytes, revision: int) -> None:
        self.seat = seat
        self._seated = value
        self._last = revision
        events.emit(Seated(job=self.keys.root, term=seat.term, epoch=seat.epoch))

    async def read(self) -> Book:
        """Everything there is, as it is now that nobody else writes."""
        whole = await self._runtime.ledger.range(self.keys.root)
        return read_book(self.keys, whole.entries)

    # ---- writing ---------------------------------------------------------------

    async def write(self, *writes: Write) -> None:
        """Make all of these durable, or raise: `Fenced`, or `TimedOut` without a ledger."""
        await asyncio.shield(self.post(*writes))

    def post(self, *writes: Write) -> "asyncio.Future[None]":
        """Begin to write; in the order of the calls. The future ends when it is durable."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Whoever only posts looks at `failure`, not at this.
        done.add_done_callback(lambda one: one.cancelled() or one.exception())
        if self.failure is not None:
            done.set_exception(self.failure)
            return done
        size = sum(len(one.key) + len(getattr(one, "value", b"")) for one in writes)
        self._queue.append(_Waiting(writes, done, size))
        if self._flushing is None or self._flushing.done():
            self._flushing = self._runtime.spawn(self._flush(), name="journal")
        return done

    async def check(self) -> None:
        """Raise `Fenced` if somebody else acts for the job by now: what we know may be old."""
        entry = await self._runtime.ledger.get(self.keys.seat)
        if not self._sits(entry):
            self.fail(Fenced(_FENCED))
            raise Fenced(_FENCED)

    def _sits(self, entry: Entry | None) -> bool:
        return entry is not None and entry.value == self._seated

    def fail(self, error: Exception) -> None:
        """Nothing can be written any more: the process must end."""
        self.failure = self.failure or error
        self._failed.set()

    async def failed(self) -> None:
        """Wait until nothing can be written any more, and raise why."""
        await self._failed.wait()
        assert self.failure is not None
        raise self.failure

    async def flushed(self) -> None:
        """Wait until everything posted so far is durable."""
        await self.write()

    async def _flush(self) -> None:
        while self._queue:
            batch = self._gather()
            writes = [one for waiting in batch for one in waiting.writes]
            try:
                if writes:
                    await self._commit(writes)
            except Exception as error:  # noqa: BLE001 -- told to everybody who waits
                self.fail(error)
                for waiting in [*batch, *self._queue]:
                    if not waiting.done.done():
                        waiting.done.set_exception(error)
                self._queue.clear()
                return
            for waiting in batch:
                if not waiting.done.done():
                    waiting.done.set_result(None)

    def _gather(self) -> list[_Waiting]:
        """As much as fits into one transaction; no key twice."""
        batch: list[_Waiting] = []
        keys: set[str] = set()
        count = size = 0
        while self._queue:
            first = self._queue[0]
            mine = {one.key for one in first.writes}
            fits = (
                count + len(first.writes) <= MAX_TXN_OPS - 8
                and size + first.bytes <= MAX_TXN_BYTES // 2
                and not mine & keys
            )
            if batch and not fits:
                break
            batch.append(self._queue.popleft())
            keys |= mine
            count += len(first.writes)
            size += first.bytes
        return batch

    async def _commit(self, writes: Sequence[Write]) -> None:
        """Write once, however often it is tried. If the seat is ours and was touched although the
        transaction did not hold, an earlier try has done it."""
        compare = [*self.guards, *self._behind()]
        touching = [*writes, Put(self.keys.seat, self._seated)]
        until, attempt = None, 0
        while True:
            attempt += 1
            try:
                txn = await self._txn(compare, touching, [Get(self.keys.seat)])
            except (Unavailable, UnknownOutcome) as error:
                until = until or self._runtime.now() + self._deadline_s
                if self._runtime.now() >= until:
                    raise TimedOut(
                        f"the ledger could not be written for {self._deadline_s:g} s: {error}"
                    ) from error
                await self._pause(attempt)
                continue
            if txn.succeeded:
                self._last = txn.revision
                return
            (found,) = txn.results
            if found is None or not self._sits(found) or found.mod_revision == self._last:
                raise Fenced(_FENCED)
            self._last = found.mod_revision
            return

    async def _txn(
        self, compare: Sequence[Compare], then: Sequence[Write], otherwise: Sequence[Get] = ()
    ) -> Txn:
        """A transaction that waits for room in the ledger."""
        ledger = self._runtime.ledger
        return await patient(
            self._runtime, self._room_s, NoRoom, lambda: ledger.txn(compare, then, otherwise)
        )

    async def _pause(self, attempt: int) -> None:
        most = min(_PAUSE_MOST_S, _PAUSE_S * 2 ** min(attempt, 10))
        await self._runtime.sleep(most * (0.5 + self._runtime.random.random() / 2))
