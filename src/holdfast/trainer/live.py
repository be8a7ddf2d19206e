"""A trainer's life on a real machine: files, HTTP, and an end that is noticed."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.jobs.fence import Incarnation
from holdfast.jobs.policy import read_policy
from holdfast.jobs.records import Checkpoint
from holdfast.ledger.runtime import LiveRuntime
from holdfast.ledger.types import Compare
from holdfast.proc.asgi import serve_asgi
from holdfast.timeouts import DEFAULTS
from holdfast.trainer.app import App
from holdfast.trainer.compute import TorchCompute
from holdfast.trainer.journal import Write
from holdfast.trainer.paths import STATE, parse
from holdfast.trainer.records import Keys, Save, check_name
from holdfast.trainer.segments import FileSegments
from holdfast.trainer.service import Service
from holdfast.trainer.trainer import Trainer
from holdfast.trainer.vault import WeightsVault

if TYPE_CHECKING:
    from holdfast.transfer import Store

__all__ = ["Life"]


class Life:
    """One incarnation: `begin`, then `serve`."""

    def __init__(
        self,
        runtime: LiveRuntime,
        who: Incarnation,
        compute: TorchCompute,
        folder: Path,
        *,
        guards: Sequence[Compare] = (),
        policy: dict[str, object] | None = None,
        cycle: int = 0,
        sync: bool = False,
        store: "Store | None" = None,
    ) -> None:
        self._who = who
        self._compute = compute
        self._cycle = cycle
        self._store = store
        home = folder / check_name("account", who.account) / check_name("job", who.job)
        self._trainer = Trainer(
            runtime,
            Keys(who.run, who.account, who.job),
            [who.guard(), *guards],
            compute=compute,
            segments=lambda term: FileSegments(home, term, sync=sync),
            vault=lambda journal: WeightsVault(
                home / "weights", runtime.ledger, who.run, lambda: journal.guards
            ),
            wall=time.time,
            policy=read_policy(policy or {}),
            tell=self._told,
            owner=who.account,
        )

    def _told(self, path: str, save: Save, content: str | None) -> list[Write]:
        """What the control plane is told of saved weights: users list it there."""
        model, folder, name = parse(path)
        if content is None:
            return [self._who.unsaved(f"{model}.{folder}.{name}")]
        kind = "training" if folder == STATE else "sampler"
        checkpoint = Checkpoint(
            name=f"{model}.{folder}.{name}",
            created_at=save.created_at,
            kind=kind,
            step=save.number,
            path=path,
            content=content,
        )
        return [self._who.saved(checkpoint)]

    async def begin(self, by: str) -> None:
        """Take over."""
        await self._trainer.begin(self._who.epoch, cycle=self._cycle, by=by)

    async def serve(self, host: str, port: int, wrap: Callable[[Any], Any]) -> None:
        """Serve until a signal comes (then end well) or something goes wrong (then raise)."""
        service = Service(
            self._trainer.core, self._trainer.upkeep, self._compute, store=self._store
        )
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(self._trainer.run(), name="trainer"),
            asyncio.create_task(stop.wait(), name="stop"),
        ]
        warm = asyncio.create_task(self._compute.warm_up(), name="warm up")
        warm.add_done_callback(self._warm)
        try:
            # The signals are ours, and so is the order in which things end.
            async with serve_asgi(wrap(App(service)), host=host, port=port) as (server, serving):
                waited = (*tasks, serving)
                done, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                server.force_exit = not stop.is_set()  # who must end keeps nobody waiting
                for task in {*tasks} - done:
                    task.cancel()
                for task in done:
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DEFAULTS.serve_drain_s + 1):
                    await asyncio.gather(*tasks, return_exceptions=True)
            await self._compute.close()

    def _warm(self, task: "asyncio.Task[None]") -> None:
        """What cannot be loaded is no trainer: the process ends, and says why."""
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._trainer.journal.fail(error)
