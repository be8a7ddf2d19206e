"""A run's records in the ledger: each is written once, and the first writer decides.

So any number of orchestrators may be at work, one after another or at once: what one of them
has written all of them go by.
"""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from holdfast.ledger import Ledger, absent
from holdfast.ledger.records import Record, decode, load, put
from holdfast.ledger.runtime import Runtime
from holdfast.retry import insist
from holdfast.run.records import EvalDone, Keys, StepDone, StepRecord
from holdfast.timeouts import DEFAULTS

__all__ = ["Steps"]

R = TypeVar("R", bound=Record)
T = TypeVar("T")


class Steps:
    """Reads and writes them."""

    def __init__(self, runtime: Runtime, run: str) -> None:
        self.keys = Keys(run)
        self._runtime = runtime

    @property
    def _ledger(self) -> Ledger:
        return self._runtime.ledger

    async def once(self, key: str, record: R) -> tuple[R, bool]:
        """Write a record unless there is one; returns what is there, and whether it is ours.

        Two writers may write the same: then it is both theirs.
        """

        async def write() -> R:
            await self._ledger.txn([absent(key)], [put(key, record)])
            there = await load(self._ledger, key, type(record))
            assert there is not None
            return there.record

        there = await self._insist(write)
        return there, there == record

    async def read(self, key: str, kind: type[R]) -> R | None:
        """What is there."""
        there = await self._insist(lambda: load(self._ledger, key, kind))
        return None if there is None else there.record

    async def _insist(self, call: Callable[[], Awaitable[T]]) -> T:
        until = self._runtime.now() + DEFAULTS.ledger_away_s
        return await insist(self._runtime, call, until=until)

    async def _all(self, prefix: str, kind: type[R]) -> dict[int, R]:
        found = {}
        async for page in self._ledger.pages(prefix):
            for entry in page.entries:
                found[int(entry.key.rpartition("/")[2])] = decode(kind, entry)
        return found

    async def committed(self) -> dict[int, StepRecord]:
        """What every step that was begun trains on."""
        return await self._all(self.keys.commits, StepRecord)

    async def done(self) -> dict[int, StepDone]:
        """What came of every step that is done."""
        return await self._all(self.keys.dones, StepDone)

    async def evaluated(self) -> dict[int, EvalDone]:
        """What versions earned."""
        return await self._all(self.keys.evals, EvalDone)
