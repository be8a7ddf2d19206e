"""The workers of one cycle on one node: start, watch, stop.

Responsible for: starting every slot, warm where the pool can serve it; telling the first
failure with its reason; ending all of them with whatever they have started.

Invariants:

- **The user's code runs in no worker before all were started and are guarded**: each waits
  for its order, warm or cold, program or Python.
- **One failure is the outcome.** Of several, the first is the one whose error file is oldest,
  or, without one, whose end was seen first. What ended after `stop` began is not a failure.
- **After `stop` nothing is left of any worker's process group.** Ended workers stay zombies until
  then, so that no signal ever hits a stranger. What left its group (setsid) is not found.
- Nothing polls: ends arrive through pidfds.
"""

import asyncio
import contextlib
import json
import math
import mmap
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

import msgspec

from holdfast import events, progress
from holdfast.errors import NotFound, TimedOut
from holdfast.launch.logs import CycleLogs, Files
from holdfast.launch.process import Blank
from holdfast.launch.spec import Order, Seat, Spec, arguments, environment
from holdfast.launch.warm import WarmPool
from holdfast.proc import Child
from holdfast.timeouts import DEFAULTS

__all__ = ["Failure", "Outcome", "Worker", "WorkerStarted", "Workers", "check"]

_MAX_ERROR_FILE_BYTES = 1 << 20
_MAX_REASON_CHARS = 10_000


class WorkerStarted(events.Event, frozen=True, tag="launch.worker.started"):
    """A worker was started, `warm` or cold, and then `why` says why."""

    labels: ClassVar[tuple[str, ...]] = ("warm",)

    run: str
    cycle: int
    rank: int
    slot: int
    worker_pid: int
    warm: bool
    why: str = ""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker failed. `at` is in wall-clock seconds.

    `code` is negative for a signal, and None if it had written its error file but not ended.
    """

    rank: int
    slot: int
    pid: int
    code: int | None
    at: float
    reason: str
    error_file: Path | None

    def __str__(self) -> str:
        how = "not ended yet" if self.code is None else f"exit code {self.code}"
        if self.code is not None and self.code < 0:
            with contextlib.suppress(ValueError):
                how = f"signal {signal.Signals(-self.code).name}"
        reason = f": {self.reason}" if self.reason else ""
        return f"rank {self.rank} (slot {self.slot}, pid {self.pid}) failed, {how}{reason}"


class Outcome(msgspec.Struct, frozen=True):
    """How a cycle went on this node.

    `success`: all workers exited 0 by themselves. Workers that were stopped are neither a
    success nor a failure.
    """

    success: bool
    failures: tuple[Failure, ...] = ()

    @property
    def first(self) -> Failure | None:
        """The failure that the others followed, as far as can be told."""
        return self.failures[0] if self.failures else None


def check(spec: Spec) -> None:
    """Raise `NotFound` if it is plain that this cannot run."""
    if spec.kind == "script" and not Path(spec.entry).exists():
        raise NotFound(f"there is no script {spec.entry}")
    path = spec.env.get("PATH", os.defpath)
    if spec.kind == "program" and shutil.which(spec.entry, path=path) is None:
        raise NotFound(f"the program {spec.entry} was not found, or is not executable")


class _Beats:
    """Where a worker beats: a file in memory, which is gone with us whatever happens."""

    def __init__(self, name: str) -> None:
        self._file = os.fdopen(os.memfd_create(name, os.MFD_CLOEXEC), "r+b", buffering=0)
        os.ftruncate(self._file.fileno(), progress.SIZE)
        self._map = mmap.mmap(self._file.fileno(), progress.SIZE, prot=mmap.PROT_READ)
        self.path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"

    def read(self) -> progress.Beat | None:
        return None if self._map.closed else progress.read(self._map)

    def close(self) -> None:
        self._map.close()
        self._file.close()


class Worker:
    """One worker."""

    def __init__(
        self, blank: Blank, beats: _Beats, rank: int, slot: int, files: Files, *, python: bool
    ) -> None:
        self.rank, self.slot, self.files = rank, slot, files
        self.stacks = files.stacks if python else None
        self.process: Child = blank.process
        self.blank = blank
        self.ended_at: float | None = None
        self._beats = beats

    @property
    def pid(self) -> int:
        """Its process, which leads its group."""
        return self.process.pid

    def running(self) -> bool:
        """Whether it has not ended."""
        return self.process.alive()

    def beat(self) -> progress.Beat | None:
        """Its last sign of life."""
        return self._beats.read()

    def close(self) -> None:
        """Let go of its file of beats."""
        self._beats.close()

    @property
    def succeeded(self) -> bool:
        """Whether it exited 0 by itself."""
        return self.ended_at is not None and self.process.exited.result() == 0

    def failure(self) -> Failure | None:
        """How it failed, if it ended, or wrote its error file, before it was told to end."""
        code = None if self.ended_at is None else self.process.exited.result()
        if code == 0:
            return None
        at, reason, file = self.ended_at or math.inf, "", None
        with contextlib.suppress(OSError):
            at = min(at, self.files.error.stat().st_mtime)
            reason = _reason(self.files.error)
            file = self.files.error
        if code is None and file is None:
            return None
        return Failure(
            rank=self.rank,
            slot=self.slot,
            pid=self.pid,
            code=code,
            at=at,
            reason=(reason or self.files.last_lines())[:_MAX_REASON_CHARS],
            error_file=file,
        )


def _reason(path: Path) -> str:
    """The message of an error file, which is the user's and may hold anything."""
    with path.open("rb") as file:
        data = file.read(_MAX_ERROR_FILE_BYTES)
    try:
        message = json.loads(data)["message"]
        return str(message["message"] if isinstance(message, dict) else message)
    except (ValueError, KeyError, TypeError, RecursionError):
        return data.decode(errors="replace").strip()


class Workers:
    """The workers of one cycle. Whoever starts them must `stop` them."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.workers: list[Worker] = []
        self.starts: tuple[WorkerStarted, ...] = ()
        self._stopping = False
        self._ends = 0
        self._changed = asyncio.Event()

    @classmethod
    async def start(
        cls,
        spec: Spec,
        seat: Seat,
        pool: WarmPool | None,
        logs: CycleLogs,
        *,
        guard: Callable[[Sequence[int]], None] | None = None,
        cwd: Path | None = None,
    ) -> "Workers":
        """Start a worker in every slot. `guard` gets all pids before any user code runs."""
        check(spec)
        self = cls(seat)
        try:
            orders = self._open(spec, pool, logs, str((cwd or Path.cwd()).absolute()))
            if guard is not None:
                guard(self.pids)
            pairs = zip(self.workers, orders, strict=True)
            await asyncio.gather(*(worker.blank.give(order) for worker, order in pairs))
        except BaseException:
            await self.stop(0.0)
            raise
        return self

    def _open(self, spec: Spec, pool: WarmPool | None, logs: CycleLogs, cwd: str) -> list[Order]:
        """Have a waiting process for every slot, and say what each is to run."""
        orders, starts = [], []
        seat = self.seat
        for slot, files in enumerate(logs.files):
            beats = _Beats(f"holdfast-beats-{seat.rank(slot)}")
            order = Order(
                entry=spec.entry,
                kind=spec.kind,
                args=arguments(spec, slot),
                env=environment(spec, seat, slot, error_file=str(files.error), beat=beats.path),
                cwd=cwd,
                stdout=str(files.stdout or ""),
                stderr=str(files.stderr or ""),
                stacks=str(files.stacks),
            )
            blank, why = pool.take(order) if pool is not None else (None, "warm starts are off")
            warm, python = blank is not None, spec.kind != "program"
            if blank is None:
                blank = Blank(env=order.env, cwd=cwd, door=not python)
            worker = Worker(blank, beats, seat.rank(slot), slot, files, python=python)
            self.workers.append(worker)
            worker.process.exited.add_done_callback(partial(self._ended, worker))
            orders.append(order)
            starts.append(
                WorkerStarted(
                    run=seat.run,
                    cycle=seat.place.cycle,
                    rank=worker.rank,
                    slot=slot,
                    worker_pid=worker.pid,
                    warm=warm,
                    why=why,
                )
            )
        self.starts = tuple(starts)
        return orders

    @property
    def pids(self) -> list[int]:
        """The workers' processes, by slot."""
        return [worker.pid for worker in self.workers]

    def beats(self) -> dict[int, progress.Beat]:
        """The last signs of life of running workers, by rank."""
        found = ((worker.rank, worker.beat()) for worker in self.workers if worker.running())
        return {rank: beat for rank, beat in found if beat is not None}

    async def wait(self) -> Outcome:
        """Wait until one has failed, or all have ended."""
        while True:
            self._changed.clear()
            outcome = self.outcome()
            # Ends that `_ended` has not heard of yet are not told: half of the story is none.
            if outcome.failures or self._ends == len(self.workers):
                return outcome
            await self._changed.wait()

    def outcome(self) -> Outcome:
        """How it went so far, the first failure first."""
        failures = [found for worker in self.workers if (found := worker.failure()) is not None]
        if all(failure.code is None for failure in failures):
            failures = []  # nobody has ended: what was written may still be dealt with
        return Outcome(
            all(worker.succeeded for worker in self.workers),
            tuple(sorted(failures, key=lambda failure: failure.at)),
        )

    async def stop(self, grace_s: float) -> None:
        """SIGTERM to all groups, SIGKILL after `grace_s`, and collect them all.

        Raises `TimedOut` if a worker hangs in the kernel and cannot be killed.
        """
        self._stopping = True
        if grace_s > 0:
            for worker in self.workers:
                worker.process.signal(signal.SIGTERM)
            waiting = [w.process.exited for w in self.workers if not w.process.exited.done()]
            if waiting:
                await asyncio.wait(waiting, timeout=grace_s)
        ended = await asyncio.gather(
            *(w.process.collect(DEFAULTS.worker_kill_s) for w in self.workers)
        )
        for worker in self.workers:
            worker.close()
        if stuck := [str(w.pid) for w, done in zip(self.workers, ended, strict=True) if not done]:
            raise TimedOut(
                f"processes {', '.join(stuck)} cannot be killed: they hang in the kernel"
            )

    def _ended(self, worker: Worker, _: object) -> None:
        if not self._stopping:
            worker.ended_at = time.time()
        self._ends += 1
        self._changed.set()
