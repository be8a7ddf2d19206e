"""Looking after a cycle: the one node that looks at all the others.

Any node may commit what `decide` says, because each change compares the record that it was
decided on. Only one does at a time, so that a thousand nodes do not all read a thousand records:
the *closer*, whose key is bound to its node's own lease. When it dies, its node's record and
this key go in one moment, and every node tries to take the key. It holds no state that its
successor would miss; what it measures by its own clock (how long a cycle has been open) begins
anew.
"""

import asyncio
import contextlib
from collections.abc import Callable

from holdfast.errors import Compacted, Retriable, UnknownOutcome
from holdfast.ledger.follow import follow
from holdfast.ledger.records import Stored
from holdfast.ledger.runtime import Runtime
from holdfast.ledger.types import Compare, Delete, unchanged
from holdfast.rendezvous.board import Board
from holdfast.rendezvous.decide import Clock, Wait, decide, seating, unreached
from holdfast.rendezvous.records import Cycle, Keys, put_cycle
from holdfast.timeouts import DEFAULTS

__all__ = ["Duty"]

_GATHER_S = 0.001
"""Changes come in crowds; one look is enough for all that arrive within this time."""
_DELETES_MAX = 100
_COMPARED_MAX = 100


class Duty:
    """One term as the closer; `run` it until the term ends."""

    def __init__(
        self,
        runtime: Runtime,
        keys: Keys,
        guard: Compare,
        unix: Callable[[], float],
        *,
        open_since: tuple[int, float] = (0, 0.0),
    ) -> None:
        """`open_since`: a cycle that is known to be open, and since when by our own clock."""
        self._runtime = runtime
        self._keys = keys
        self._guard = guard
        self._unix = unix
        self._board = Board(keys)
        self._wake = asyncio.Event()
        self._number, self._open_since = open_since
        self._enough_since: float | None = None
        self._unreached_since: float | None = None

    async def run(self) -> None:
        """Look, decide, commit, until the run has ended."""
        pump = self._runtime.spawn(self._pump(), name="closer's watch")
        pump.add_done_callback(lambda _: self._wake.set())
        try:
            while True:
                self._wake.clear()
                stored = self._board.cycle
                if stored is not None and stored.record.final:
                    return
                wait_s = await self._look(stored)
                await self._sleep(wait_s)
                if pump.done():
                    pump.result()  # without it nothing would ever change again
        finally:
            pump.cancel()

    async def _pump(self) -> None:
        async with contextlib.aclosing(follow(self._runtime, self._keys.root)) as steps:
            async for step in steps:
                if step.change is None:
                    self._board = Board(self._keys, step.entries.values())
                else:
                    for event in step.change.events:
                        self._board.see(event.key, event.entry)
                self._wake.set()

    async def _sleep(self, wait_s: float | None) -> None:
        """Until something changes, or for so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._wake.wait()
        await self._runtime.sleep(_GATHER_S)

    async def _look(self, stored: Stored[Cycle] | None) -> float | None:
        """Commit what is to be done; returns how long nothing needs to be looked at."""
        view = self._board.view()
        if stored is None or view is None:
            return None
        verdict = decide(view, self._clock())
        if isinstance(verdict, Wait):
            return verdict.seconds
        try:
            if verdict.state == "running" and not await self._still(stored, verdict):
                return DEFAULTS.cycle_look_s
            await self._commit(stored, verdict)
        except (Retriable, UnknownOutcome, Compacted):
            pass  # the watch shows what came of it
        return DEFAULTS.cycle_look_s

    def _clock(self) -> Clock:
        now, view = self._runtime.now(), self._board.view()
        assert view is not None
        if view.cycle.number != self._number:
            self._number, self._open_since, self._enough_since = view.cycle.number, now, None
        if not unreached(view):
            self._unreached_since = None
        elif self._unreached_since is None:
            self._unreached_since = now
        if view.cycle.state != "open" or view.cycle.members or seating(view) is None:
            self._enough_since = None
        elif self._enough_since is None:
            self._enough_since = now
        enough_s = 0.0 if self._enough_since is None else now - self._enough_since
        unreached_s = 0.0 if self._unreached_since is None else now - self._unreached_since
        return Clock(now - self._open_since, enough_s, unreached_s, self._unix())

    async def _still(self, stored: Stored[Cycle], verdict: Cycle) -> bool:
        """Whether it is the membership of this moment: a watch lags, and the dead get no rank."""
        fresh = Board(self._keys, (await self._runtime.ledger.range(self._keys.root)).entries)
        if fresh.cycle is None or fresh.cycle.entry != stored.entry:
            return False
        view = fresh.view()
        assert view is not None
        possible = seating(view)
        return possible is not None and possible.members == verdict.members

    async def _commit(self, stored: Stored[Cycle], verdict: Cycle) -> None:
        key = self._keys.cycle
        compare = [unchanged(stored.entry), self._guard]
        if verdict.state == "running" and len(verdict.members) <= _COMPARED_MAX:
            # A transaction may arrive late. Who is dead by then gets no rank; in larger runs they
            # get one, and it costs a cycle.
            compare += [
                Compare(self._keys.node(member.name), "create", "==", member.life)
                for member in verdict.members
            ]
        txn = await self._runtime.ledger.txn(compare, [put_cycle(key, verdict, over=stored.entry)])
        if txn.succeeded and verdict.state == "open":
            await self._tidy()

    async def _tidy(self) -> None:
        """Forget successes of cycles that are over; nobody counts them."""
        old = self._board.old_ends()[:_DELETES_MAX]
        if old:
            await self._runtime.ledger.txn([self._guard], [Delete(key) for key in old])
