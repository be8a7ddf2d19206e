"""The desk of a queue: its view, kept up to date, and transactions that look again.

Everything that a queue does has one shape: look at the view, decide (`plan.py`), commit by
comparing, look again on a conflict. `commit` does that once for all. When an answer is lost
it waits until the view is at least as new as the transaction could be, so that the decision
made next sees its own effect, if there was one.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

from holdfast.errors import (
    Conflict,
    LeaseLost,
    Mistake,
    Retriable,
    TimedOut,
    Unavailable,
    UnknownOutcome,
)
from holdfast.ledger import Compare, Entry, Get, Op, Runtime
from holdfast.ledger.follow import follow
from holdfast.retry import AGAIN, Policy, insist
from holdfast.timeouts import DEFAULTS, Timeouts
from holdfast.transfer.queue.member import Seat
from holdfast.transfer.queue.plan import Plan
from holdfast.transfer.queue.records import Keys
from holdfast.transfer.queue.view import View
from holdfast.transfer.store import Store

__all__ = ["Change", "Desk"]

T = TypeVar("T")

_CONFLICTS = Policy(base_s=0.003, max_s=0.75, jitter=2 / 3)
"""How long to wait before deciding again: others do the same at that moment."""


@dataclass(frozen=True, slots=True)
class Change(Generic[T]):
    """A transaction that was decided on, and what it means when it is committed."""

    compare: Sequence[Compare]
    then: Sequence[Op]
    means: T


class Desk:
    """One process's place at a queue. Use `async with`."""

    def __init__(
        self,
        runtime: Runtime,
        keys: Keys,
        store: Store,
        member: str,
        lease_s: float,
        timeouts: Timeouts = DEFAULTS,
        *,
        plan: Plan | None = None,
        view: type[View] = View,
        block_samples: int = 1000,
    ) -> None:
        """`block_samples` is how many samples a block has at most."""
        self.runtime = runtime
        self.timeouts = timeouts
        self.keys = keys
        self.store = store
        self.plan = plan or Plan()
        self.view = view(keys)
        self.block_samples = block_samples
        self._member = member
        self._lease_s = lease_s
        self._news = asyncio.Event()
        self._following: asyncio.Task[None] | None = None
        self._seat: Seat | None = None
        self._joining = asyncio.Lock()
        self._closed = False
        self.held: set[str] = set()
        """The claims that somebody in this process has, or is about to have."""

    async def __aenter__(self) -> Self:
        self._following = self.runtime.spawn(self._follow(), name="queue follows")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closed = True
        self._tell()
        try:
            if self._following is not None:
                self._following.cancel()
                await asyncio.gather(self._following, return_exceptions=True)
        finally:
            async with self._joining:
                if self._seat is not None:
                    await self._seat.leave()

    async def _follow(self) -> None:
        async with contextlib.aclosing(follow(self.runtime, self.keys.prefix)) as steps:
            async for step in steps:
                self.view.apply(step)
                self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def deadline(self, timeout_s: float | None = None) -> float:
        """When a call that begins now must end."""
        limit_s = self.timeouts.queue_call_s if timeout_s is None else timeout_s
        return self.runtime.now() + limit_s

    def nonce(self) -> str:
        """A name that nobody else has."""
        return f"{self.runtime.random.getrandbits(64):016x}"

    # Waiting

    async def news(self, deadline: float) -> bool:
        """Wait for the view to change, or for a while; False when the time is over."""
        self._check()
        wait_s = deadline - self.runtime.now()
        if wait_s <= 0:
            return False
        look_s = self.timeouts.watch_silence_s  # then the caller looks by itself
        waiting = asyncio.ensure_future(self._news.wait())
        bound = asyncio.ensure_future(self.runtime.sleep(min(wait_s, look_s)))
        try:
            await asyncio.wait((waiting, bound), return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
            bound.cancel()
        self._check()
        return True

    def _check(self) -> None:
        """Whoever waits must not wait for a view that nobody feeds any more."""
        if self._closed:
            raise Mistake(f"the queue at {self.keys.prefix} has been closed")
        task = self._following
        if task is not None and task.done() and not task.cancelled():
            raise task.exception() or Unavailable("the queue is not followed any more")

    async def at_least(self, revision: int, deadline: float) -> None:
        """Wait until the view has come to a revision."""
        while self.view.revision < revision:
            if not await self.news(deadline):
                raise TimedOut(
                    f"the view of {self.keys.prefix} stands at revision {self.view.revision}, "
                    f"behind {revision}"
                )

    # Taking part

    async def seat(self) -> Seat:
        """This process's membership; a new one when the last has ended."""
        async with self._joining:
            self._check()
            if self._seat is not None and not self._seat.believes():
                await self._seat.leave()
                self._seat = None
            if self._seat is None:
                seat = Seat(self.runtime, self.keys, self._member, self._lease_s)
                await seat.join()
                self._seat = seat
            return self._seat

    @property
    def member(self) -> str:
        """The name of this life, if there is one."""
        return self._seat.id if self._seat is not None else ""

    async def lost(self, seat: Seat) -> None:
        """The ledger says that this life is over."""
        async with self._joining:
            if self._seat is seat:
                self._seat = None
                await seat.leave()

    # Changing

    async def commit(
        self, decide: Callable[[], Change[T] | T], deadline: float, *, seat: Seat | None = None
    ) -> T:
        """Decide and commit, again on conflict, until it is done or the time is over.

        `decide` looks at the view. It returns a change, or what it wants to say when there is
        nothing to change (any more). With a seat, the change takes effect only while that
        life lasts; otherwise `LeaseLost` is raised.
        """

        async def once() -> T:
            change = decide()
            if not isinstance(change, Change):
                return change
            compare = [*change.compare, seat.alive] if seat else list(change.compare)
            looks = [Get(key) for key in dict.fromkeys(one.key for one in compare)]
            sent = False
            try:
                txn = await self.runtime.ledger.txn(compare, change.then, looks)
                if sent := txn.succeeded:
                    await self.at_least(txn.revision, deadline)
                    return change.means
                for look, entry in zip(looks, txn.results, strict=True):
                    await self._agree(look.key, entry, txn.revision, deadline)
            except AGAIN as error:
                unsure = sent or isinstance(error, UnknownOutcome)
                await self._look(change.then[0].key, deadline, error if unsure else None)
                raise  # the next decision sees it, if it took effect
            if seat is not None and txn.results[-1] is None:
                # An earlier attempt, whose answer was lost, may have come before the end.
                again = decide()
                if not isinstance(again, Change):
                    return again
                await self.lost(seat)
                raise LeaseLost(f"{seat.id} is not a member any more: its lease has ended")
            raise Conflict(f"others kept changing {self.keys.prefix}")

        return await insist(self.runtime, once, until=deadline, pace=_CONFLICTS)

    async def _look(self, key: str, deadline: float, unsure: Exception | None) -> None:
        """Catch up after a transaction that failed; `unsure` may have taken effect."""
        try:
            await self._catch_up(key, deadline)
        except Retriable as lagging:
            if unsure is None:
                raise
            raise UnknownOutcome(
                f"a change of {self.keys.prefix} may have taken effect: {lagging}"
            ) from unsure

    async def _agree(self, key: str, entry: Entry | None, revision: int, deadline: float) -> None:
        """Wait until the view is at least as new as a reading of one key."""
        while not self.view.agrees(key, entry, revision):
            if not await self.news(deadline):
                raise TimedOut(f"the view of {self.keys.prefix} lags behind {key}")

    async def _catch_up(self, key: str, deadline: float) -> None:
        """Come to a view that shows whether the last transaction took effect.

        A transaction is all or nothing, so one key that it writes is enough.
        """

        async def look() -> None:
            txn = await self.runtime.ledger.txn([], [Get(key)], [])
            await self._agree(key, txn.results[0], txn.revision, deadline)

        await insist(self.runtime, look, until=deadline)

    async def refresh(self, deadline: float) -> None:
        """Come to a view that has everything that was added before this call."""
        await self._catch_up(self.keys.head, deadline)
