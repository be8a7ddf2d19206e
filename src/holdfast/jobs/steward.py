"""Drawing the conclusions that a missing sign of life allows, where no host is left to do it.

Hosts do it for each other (`host.py`). A gateway does it too, a little later: so a job whose only
host died does not stay RUNNING, or DELETING, for ever. Many may do it at once: one commits.
"""

import asyncio

from holdfast.errors import Retriable, UnknownOutcome
from holdfast.jobs import decide
from holdfast.jobs.decide import Budget
from holdfast.jobs.host import settle_one
from holdfast.jobs.store import Jobs
from holdfast.jobs.view import View, keep
from holdfast.timeouts import DEFAULTS

__all__ = ["Steward"]


class Steward:
    """Looks at jobs whose hosts are silent. `run` goes on for ever."""

    def __init__(self, jobs: Jobs, budget: Budget = Budget()) -> None:  # noqa: B008 -- frozen
        self._jobs = jobs
        self._budget = budget
        self._view = View(jobs.keys)
        self._due: set[str] = set()
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Follow the jobs, and settle what nobody else has settled."""
        runtime = self._jobs.runtime
        watching = runtime.spawn(keep(runtime, self._view, self._changed), name="steward sees")
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                await runtime.sleep(DEFAULTS.steward_wait_s * (0.5 + runtime.random.random()))
                names, self._due = sorted(self._due), set()
                for name in names:
                    await self._settle(name)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    def _changed(self, names: set[str]) -> None:
        due = {name for name in names if self._is_due(name)}
        if due:
            self._due |= due
            self._wake.set()

    def _is_due(self, name: str) -> bool:
        it = self._view.jobs.get(name)
        return it is not None and (
            decide.settle(it.job, it.alive, self._jobs.wall(), self._budget) is not None
        )

    async def _settle(self, name: str) -> None:
        it = self._view.jobs.get(name)
        if it is None:
            return
        try:
            await settle_one(self._jobs, it, self._budget)
        except UnknownOutcome:
            pass  # the next change tells
        except Retriable:
            self._changed({name})
