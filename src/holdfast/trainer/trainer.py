"""One life of a job's trainer: take the seat, read the journal, go on where it ended.

Clients are served from the moment the journal has been read; operations that are still to be
carried out again hold up only their own results. Whatever goes wrong here ends the process:
a successor begins from the journal.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from holdfast.errors import HoldfastError, Retriable
from holdfast.jobs.policy import Policy
from holdfast.ledger.runtime import Runtime
from holdfast.ledger.types import Compare
from holdfast.timeouts import DEFAULTS, Timeouts
from holdfast.trainer.core import Core
from holdfast.trainer.journal import Journal
from holdfast.trainer.records import Keys, Now
from holdfast.trainer.runner import Runner
from holdfast.trainer.saves import Tell
from holdfast.trainer.seams import Compute, Vault
from holdfast.trainer.segments import Segments
from holdfast.trainer.upkeep import Upkeep

__all__ = ["Trainer"]


class Trainer:
    """See the module. `begin`, then serve `core` while `run` runs."""

    def __init__(
        self,
        runtime: Runtime,
        keys: Keys,
        guards: Sequence[Compare],
        *,
        compute: Compute,
        segments: Callable[[int], Segments],
        vault: Callable[[Journal], Vault],
        wall: Callable[[], float],
        policy: Policy | None = None,
        tell: Tell = lambda *_: (),
        owner: str = "",
        timeouts: Timeouts = DEFAULTS,
        journal: type[Journal] = Journal,
        core: type[Core] = Core,
        runner: Callable[[Core, Now | None], Runner] = Runner,
    ) -> None:
        policy = policy or Policy()
        self._runtime = runtime
        self._wall = wall
        self.journal = journal(runtime, keys, guards, room_s=policy.room_s, timeouts=timeouts)
        self._make_core: Callable[[], Core] = lambda: core(
            runtime,
            self.journal,
            segments(self.journal.term),
            compute,
            vault(self.journal),
            policy,
            wall,
            tell,
            owner,
        )
        self._make_runner = runner
        self.core: Core
        self.runner: Runner
        self.upkeep: Upkeep

    async def begin(self, epoch: int, *, cycle: int = 0, by: str) -> None:
        """Take over, and read what there is. `Fenced` when somebody newer is there."""
        await self.journal.take(epoch, cycle=cycle, by=by, at=self._wall())
        book = await self.journal.read()
        self.core = self._make_core()
        await self.core.open(book)
        # Ledger and vault were read one after the other: still by the one who acts for the job?
        await self.journal.check()
        self.runner = self._make_runner(self.core, book.now)
        self.upkeep = Upkeep(self.core)

    async def run(self) -> None:
        """Work until something goes wrong, and raise that."""
        tasks = [
            self._runtime.spawn(self._carry_out(), name="trainer: runner"),
            self._runtime.spawn(self.upkeep.run(), name="trainer: upkeep"),
            self._runtime.spawn(self.journal.failed(), name="trainer: failed"),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except HoldfastError:
            # Whoever was replaced may find that things are gone which its successor removed.
            with contextlib.suppress(Retriable):
                await self.journal.check()
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.core.wake_all()

    async def _carry_out(self) -> None:
        await self.runner.supply()
        await self.runner.run()
