"""Starts the house, keeps it standing, and takes it down when the run is done.

What a part knew is in the ledger: one that dies is started again, and goes on. The supervisor
itself knows nothing that is not in the run's folder: everything it started dies with it, and
another one, with `--resume`, goes on.
"""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec

from holdfast import events, faults, ledger
from holdfast.errors import Exists, HoldfastError, NotFound
from holdfast.files import private_folder, write_private
from holdfast.jobs.accounts import Accounts
from holdfast.jobs.store import Jobs
from holdfast.ledger.runtime import LiveRuntime
from holdfast.proc import preload
from holdfast.proc import supervisor as proc_supervisor
from holdfast.proc.forkserver import begin
from holdfast.proc.ports import reserve
from holdfast.run.ending import state_of
from holdfast.run.folder import ACCOUNT, JOB, Folder
from holdfast.run.happenings import Begun, Ended, PartDied, PartStarted
from holdfast.run.parts import ORCHESTRATOR, base_directory, parts_of
from holdfast.run.records import RunDone
from holdfast.timeouts import DEFAULTS
from holdfast.transfer import shm

__all__ = ["Supervisor"]

FAULTS = "HOLDFAST_RUN_FAULTS"
"""Fault points that are armed in the parts of a run: see `holdfast.faults`."""
LINE = "HOLDFAST_RUN_LINE"
"""A port that the orchestrator is told in place of the gateway's: chaos is there, and cuts it."""
_POISON = 50
"""Deaths after which an operation is given up: kills on purpose must not add up to that."""


class Supervisor:
    """One life of a run."""

    def __init__(self, folder: Folder, say: Callable[[str], None], *, resumed: bool) -> None:
        self._folder = folder
        self._say = say
        self._resumed = resumed
        self._lives: dict[str, int] = {}
        self._born: dict[str, int] = {}
        self._is_done = False
        self._parts: list[proc_supervisor.Part] = []
        self._keeper = proc_supervisor.Supervisor(
            self._parts, died=self._died, started=self._started, say=_say_at_once
        )

    def run(self) -> RunDone | None:
        """Go on until the run is done, or Ctrl-C; None if it is not done."""
        folder = self._folder
        private_folder(folder.path / "events")
        events.configure(folder.path / "events" / "supervisor.jsonl", process="supervisor")
        config = folder.config
        events.emit(
            Begun(run=folder.run, seed=config.seed, steps=config.steps, resumed=self._resumed)
        )
        done: RunDone | None = None
        how = "failed"
        try:
            with self._keeper.signals():
                done = self._work()
            how = "finished" if done is not None else "stopped"
        finally:
            steps = 0
            with contextlib.suppress(HoldfastError):
                steps, done = state_of(folder)
            events.emit(Ended(how=how, steps=steps, content=done.content if done else ""))
            events.unconfigure()
        return done

    def _work(self) -> RunDone | None:
        folder = self._folder
        _arm(folder)
        if folder.cwd:
            os.chdir(folder.cwd)
        base = base_directory(folder)
        known = asyncio.run(_prepare(folder))
        line = int(os.environ.pop(LINE, "0"))
        with contextlib.closing(reserve("127.0.0.1", 0)) as reserved:
            port = reserved.getsockname()[1]
            if line:
                write_private(folder.path / "gateway.json", msgspec.json.encode({"port": port}))
            forks = begin(preload.RUN)
            self._parts += parts_of(folder, base, known, port, forks, line=line)
            try:
                while not self._keeper.stopped and not forks.ready() and forks.alive():
                    time.sleep(DEFAULTS.process_look_s)
                self._keeper.run(forks.tend)
                return state_of(folder)[1] if self._is_done else None
            finally:
                self._remove_store()
                forks.close()

    def _started(self, part: proc_supervisor.Part) -> None:
        life = self._lives[part.name] = self._lives.get(part.name, 0) + 1
        self._born[part.name] = part.pid
        events.emit(PartStarted(part=part.name, child=part.pid, life=life))

    def _died(self, part: proc_supervisor.Part, code: int) -> bool:
        """Tell of it; true when the orchestrator says that the run is done."""
        child = self._born.pop(part.name, 0)
        if part.name == ORCHESTRATOR and code == 0:
            self._is_done = True
            return True
        lived_s = round(part.lived_s, 3)
        events.emit(PartDied(part=part.name, child=child, code=code, lived_s=lived_s))
        if code > 0:
            self._say(f"{part.name} ended with code {code}{part.last_words}")
        if part.name == ORCHESTRATOR and part.given_up:
            step = state_of(self._folder)[0] + 1
            raise HoldfastError(f"step {step} cannot be done{part.last_words}")
        return False

    def _remove_store(self) -> None:
        """Samples that are left can be made again: they go with the processes.

        Of what was killed, children may live for a moment longer, and have it open.
        """
        if self._folder.config.store:
            return
        until = time.monotonic() + DEFAULTS.part_end_s
        with contextlib.suppress(NotFound):
            while not shm.remove(self._folder.run) and time.monotonic() < until:
                time.sleep(DEFAULTS.process_look_s)


def _say_at_once(text: str) -> None:
    sys.stderr.write(f"holdfast: {text}\n")


def _arm(folder: Folder) -> None:
    """Give the parts a plan of fault points, if there is one. Not for this process itself."""
    plan = os.environ.pop(FAULTS, "")
    if plan:
        os.environ[faults.PLAN_VARIABLE] = plan
        os.environ[faults.LOG_VARIABLE] = str(folder.path / "faults.jsonl")


async def _prepare(folder: Folder) -> Any:
    """What the parts need before they start: a key, and the job."""
    async with ledger.open(folder.ledger) as opened:
        runtime, known = LiveRuntime(opened), folder.secrets()
        if not known.key:
            key, _ = await Accounts(runtime, folder.run, time.time).add_key(ACCOUNT)
            known = msgspec.structs.replace(known, key=key)
            folder.keep(known)
        policy = {
            "checkpoint_s": folder.config.train.checkpoint_s,
            "poison_deaths": _POISON,
            "sampler_keep": 16,
        }
        with contextlib.suppress(Exists):
            spec = {"holdfast": {"policy": policy}}
            await Jobs(runtime, folder.run, time.time).create(ACCOUNT, JOB, spec)
        return known
