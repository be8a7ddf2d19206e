"""Starts the house, keeps it standing, and takes it down when the run is done.

What a part knew is in the ledger: one that dies is started again, and goes on. The supervisor
itself knows nothing that is not in the run's folder: everything it started dies with it, and
another one, with `--resume`, goes on.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import msgspec

from holdfast import events, faults, ledger
from holdfast.errors import Exists, HoldfastError, NotFound
from holdfast.files import private_folder, write_private
from holdfast.gateway.serve import Part
from holdfast.jobs.accounts import Accounts
from holdfast.jobs.store import Jobs
from holdfast.ledger.runtime import LiveRuntime
from holdfast.proc.forkserver import begin
from holdfast.proc.ports import reserve
from holdfast.run.ending import state_of
from holdfast.run.folder import Folder
from holdfast.run.happenings import Begun, Ended, PartDied, PartStarted
from holdfast.run.parts import ACCOUNT, JOB, ORCHESTRATOR, PRELOAD, base_directory, parts_of
from holdfast.run.records import RunDone
from holdfast.transfer import shm

__all__ = ["Supervisor"]

FAULTS = "HOLDFAST_RUN_FAULTS"
"""Fault points that are armed in the parts of a run: see `holdfast.faults`."""
LINE = "HOLDFAST_RUN_LINE"
"""A port that the orchestrator is told in place of the gateway's: chaos is there, and cuts it."""
_POLL_S = 0.05
_FAILURES = 5
_WORDS = 400
_LEAVE_S = 10.0
_POISON = 50
"""Deaths after which an operation is given up: kills on purpose must not add up to that."""


class Supervisor:
    """One life of a run."""

    def __init__(self, folder: Folder, say: Callable[[str], None], *, resumed: bool) -> None:
        self._folder = folder
        self._say = say
        self._resumed = resumed
        self._stop = False
        self._parts: list[Part] = []
        self._lives: dict[str, int] = {}
        self._born: dict[str, tuple[int, float]] = {}
        self._failures = (0, 0)
        """The last step that was done, and how often the orchestrator failed since."""

    def run(self) -> RunDone | None:
        """Go on until the run is done, or Ctrl-C; None if it is not done."""
        folder = self._folder
        private_folder(folder.path / "events")
        events.configure(folder.path / "events" / "supervisor.jsonl", process="supervisor")
        before = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        config = folder.config
        events.emit(
            Begun(run=folder.run, seed=config.seed, steps=config.steps, resumed=self._resumed)
        )
        done: RunDone | None = None
        how = "failed"
        try:
            done = self._work()
            how = "finished" if done is not None else "stopped"
        finally:
            steps = 0
            with contextlib.suppress(HoldfastError):
                steps, done = state_of(folder)
            events.emit(Ended(how=how, steps=steps, content=done.content if done else ""))
            for number, handler in before.items():
                signal.signal(number, handler)
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
            forks = begin(PRELOAD)
            self._parts = parts_of(folder, base, known, port, forks, line=line)
            try:
                while not self._stop and not forks.ready() and forks.alive():
                    time.sleep(_POLL_S)
                while not self._stop:
                    forks.tend()
                    if self._look():
                        return state_of(folder)[1]
                    time.sleep(_POLL_S)
                return None
            finally:
                self._end()
                forks.close()

    def _look(self) -> bool:
        """Start what is not there; true when the orchestrator says that the run is done."""
        for part in self._parts:
            code = part.look()
            if code is not None:
                child, since = self._born.pop(part.name, (0, time.monotonic()))
                if part.name == ORCHESTRATOR and code == 0:
                    return True
                lived_s = round(time.monotonic() - since, 3)
                events.emit(PartDied(part=part.name, child=child, code=code, lived_s=lived_s))
                if code > 0:
                    self._say(f"{part.name} ended with code {code}{part.last_words[:_WORDS]}")
                if part.name == ORCHESTRATOR and code == 1:
                    self._count_failure(part.last_words)
            elif part.pid and part.name not in self._born:
                life = self._lives[part.name] = self._lives.get(part.name, 0) + 1
                self._born[part.name] = (part.pid, time.monotonic())
                events.emit(PartStarted(part=part.name, child=part.pid, life=life))
        return False

    def _count_failure(self, words: str) -> None:
        """Give up when the orchestrator says again and again, at one step, that it cannot."""
        step = state_of(self._folder)[0]
        count = self._failures[1] + 1 if step == self._failures[0] else 1
        self._failures = step, count
        if count >= _FAILURES:
            raise HoldfastError(f"step {step + 1} cannot be done{words[:_WORDS]}")

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._stop:
            for part in self._parts:
                part.end(0.0)
            os._exit(130)
        self._stop = True
        sys.stderr.write("holdfast: stopping (once more: at once)\n")

    def _end(self) -> None:
        """Users first, servers last: nobody is to wait for what is gone already."""
        for part in reversed(self._parts):
            part.ask()
        for part in reversed(self._parts):
            part.end(15.0)
        self._remove_store()

    def _remove_store(self) -> None:
        """Samples that are left can be made again: they go with the processes.

        Of what was killed, children may live for a moment longer, and have it open.
        """
        if self._folder.config.store:
            return
        until = time.monotonic() + _LEAVE_S
        with contextlib.suppress(NotFound):
            while not shm.remove(self._folder.run) and time.monotonic() < until:
                time.sleep(_POLL_S)


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
