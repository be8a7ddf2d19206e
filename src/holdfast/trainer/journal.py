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
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from holdfast import events
from holdfast.errors import Conflict, Fenced, NoRoom, TimedOut, Unavailable, UnknownOutcome
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
    absent,
    unchanged,
    value_is,
)
from holdfast.retry import AGAIN, Policy, insist
from holdfast.timeouts import DEFAULTS, Timeouts
from holdfast.trainer.book import Book, read_book
from holdfast.trainer.records import Keys, Seat

__all__ = ["Journal", "Waiting", "Write", "patient"]

T = TypeVar("T")

Write = Put | Delete

_FENCED = "another process acts for this job's trainer now: this one must end"
_DELETED_AT_ONCE = 100
_PACE = Policy(base_s=0.05, max_s=1.0)


class Seated(events.Event, frozen=True, tag="trainer.seated"):
    """A process acts for a job from now on."""

    job: str
    term: int
    epoch: int


class Waiting(events.Event, frozen=True, tag="trainer.waiting"):
    """Something cannot be kept at the moment; it is tried again."""

    reason: str


async def patient(runtime: Runtime, room_s: float, call: Callable[[], Awaitable[T]]) -> T:
    """Wait for room, for `room_s`. Only for calls that may be made twice."""
    until = runtime.now() + room_s
    return await insist(runtime, call, on=AGAIN, until=until, pace=_PACE, failed=_tell_waiting)


def _tell_waiting(error: Exception) -> None:
    events.emit(Waiting(reason=str(error)))


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
        room_s: float,
        timeouts: Timeouts = DEFAULTS,
    ) -> None:
        self._runtime = runtime
        self.keys = keys
        self._guards = tuple(guards)
        self._ledger_s = timeouts.ledger_away_s
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
        return await self._insist(lambda: self._take(epoch, cycle, by, at))

    async def _take(self, epoch: int, cycle: int, by: str, at: float) -> Seat:
        """Try once. `Conflict` when another trainer took the seat in between."""
        ledger = self._runtime.ledger
        stored = await load(ledger, self.keys.seat, Seat)
        old = stored.record if stored else None
        if stored is not None and stored.record.by == by:
            return self._sit(stored.record, stored.entry.value, stored.entry.mod_revision)
        fenced = Fenced(
            "a newer incarnation of this job's trainer has taken over: stop", epoch=epoch
        )
        if old is not None and (old.epoch, old.cycle) > (epoch, cycle):
            raise fenced
        seat = Seat(term=old.term + 1 if old else 1, epoch=epoch, cycle=cycle, by=by, at=at)
        held = unchanged(stored.entry) if stored else absent(self.keys.seat)
        taken = put(self.keys.seat, seat)
        txn = await ledger.txn([held, *self._guards], [taken], [Get(self.keys.seat)])
        if txn.succeeded:
            return self._sit(seat, taken.value, txn.revision)
        if txn.results[0] == (stored.entry if stored else None):
            raise fenced  # the seat is as it was: a guard does not hold
        raise Conflict(f"the seat at {self.keys.seat} could not be taken")

    def _sit(self, seat: Seat, value: bytes, revision: int) -> Seat:
        self.seat = seat
        self._seated = value
        self._last = revision
        events.emit(Seated(job=self.keys.root, term=seat.term, epoch=seat.epoch))
        return seat

    async def read(self) -> Book:
        """Everything there is, as it is now that nobody else writes."""
        whole = await self._runtime.ledger.range(self.keys.root)
        return read_book(self.keys, whole.entries)

    # ---- writing ---------------------------------------------------------------

    async def write(self, *writes: Write) -> None:
        """Make all of these durable, or raise: `Fenced`, or `TimedOut` without a ledger."""
        await asyncio.shield(self.post(*writes))

    async def delete(self, keys: Iterable[str]) -> None:
        """Remove records, however many."""
        deletes = [Delete(key) for key in keys]
        for at in range(0, len(deletes), _DELETED_AT_ONCE):
            await self.write(*deletes[at : at + _DELETED_AT_ONCE])

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
        ledger, seat = self._runtime.ledger, [Get(self.keys.seat)]
        txn = await self._insist(lambda: ledger.txn(compare, touching, seat))
        if txn.succeeded:
            self._last = txn.revision
            return
        (found,) = txn.results
        if found is None or not self._sits(found) or found.mod_revision == self._last:
            raise Fenced(_FENCED)
        self._last = found.mod_revision

    async def _insist(self, call: Callable[[], Awaitable[T]]) -> T:
        """Send to the ledger until it answers: a while without room, a while out of reach."""
        first: dict[bool, float] = {}

        def failed(error: Exception) -> None:
            full, now = isinstance(error, NoRoom), self._runtime.now()
            limit_s = self._room_s if full else self._ledger_s
            if now - first.setdefault(full, now) < limit_s:
                if full:
                    _tell_waiting(error)
            elif full:
                raise error
            else:
                told = f"the ledger could not be written for {limit_s:g} s: {error}"
                raise TimedOut(told) from error

        on = (NoRoom, Conflict, Unavailable, UnknownOutcome)
        return await insist(self._runtime, call, on=on, pace=_PACE, failed=failed)
