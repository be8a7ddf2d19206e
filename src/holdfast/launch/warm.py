"""Interpreters kept ready, so that replacing a worker costs no interpreter start.

Responsible for: keeping up to `slots` `Blank`s with torch imported; giving one out for an
order that it can serve; filling up again without hurting the training that goes on.

Invariants:

- **Never more than `slots` wait**, and none is started while memory is short: the pool is
  bounded in memory.
- **At most `Budget.starts` starts within any `Budget.window_s`**, and after `MAX_FAILURES`
  interpreters in a row that died before they were ready, none at all: neither a crash loop
  nor a broken installation can drain the machine.
- **One that was started with another environment or folder is never given out** (the rule is
  `spec.import_time_differences`), nor one that said it has a Python thread in it. The caller
  then starts cold, and gets the reason.
- A gentle fill-up imports one interpreter at a time, at low priority, but not for ever: after
  `patience_s`, or when it is needed, its priority is as usual. Low priority means nice 19
  where that can be taken back (root, RLIMIT_NICE), and the autogroup's nice 19, which needs
  no rights; where a kernel has neither, one at a time is all.
- All of them die with the agent.
"""

import asyncio
import contextlib
import functools
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from holdfast import events
from holdfast.errors import HoldfastError
from holdfast.launch.health import memory
from holdfast.launch.process import Blank
from holdfast.launch.spec import Order, Spec, base, import_time_differences
from holdfast.proc import preload as preload_lists
from holdfast.proc.forkserver import ForkServer
from holdfast.timeouts import DEFAULTS

__all__ = ["Budget", "WarmLost", "WarmOff", "WarmPool", "WarmReady"]

MAX_FAILURES = 3
MIN_FREE_BYTES = 1 << 30
_LOW = 19


class Budget(msgspec.Struct, frozen=True):
    """At most `starts` within any `window_s` seconds."""

    starts: int
    window_s: float = 60.0

    def wait_s(self, begun: Sequence[float], now: float) -> float:
        """How long to wait before another start, given the times of the last ones."""
        if len(begun) < self.starts:
            return 0.0
        return max(0.0, begun[-self.starts] + self.window_s - now)


class WarmReady(events.Event, frozen=True, tag="launch.warm.ready"):
    """An interpreter is ready. `threads` counts native ones too."""

    child_pid: int
    import_s: float
    threads: int


class WarmLost(events.Event, frozen=True, tag="launch.warm.lost"):
    """An interpreter ended, or was not fit, before it was needed."""

    child_pid: int
    reason: str


class WarmOff(events.Event, frozen=True, tag="launch.warm.off"):
    """No interpreters are kept ready any more."""

    reason: str


class _About(msgspec.Struct):
    """What a `child.py` says of itself."""

    import_s: float
    threads: int
    python_threads: int


class WarmPool:
    """Up to `spec.slots` interpreters that wait for an order. Make it in the agent's loop."""

    def __init__(
        self,
        spec: Spec,
        *,
        cwd: Path | None = None,
        preload: Sequence[str] = preload_lists.USER,
        budget: Budget | None = None,
        forks: ForkServer | None = None,
        patience_s: float = 20.0,
        tell: Callable[[events.Event], None] = events.emit,
    ) -> None:
        self.off = "" if spec.kind != "program" else "the workers are not Python programs"
        self.started = 0
        self._slots = spec.slots
        self._env = base(spec)
        self._cwd = str(cwd or Path.cwd())
        self._preload = tuple(preload)
        self._budget = budget or Budget(6 * spec.slots)
        self._forks = forks
        self._patience_s = patience_s
        self._tell = tell
        self._blanks: list[Blank] = []
        self._low: dict[int, asyncio.TimerHandle] = {}  # by pid: until when at low priority
        self._begun: deque[float] = deque(maxlen=self._budget.starts)
        self._wanted = 0
        self._gentle = False
        self._failures = 0
        self._again: asyncio.TimerHandle | None = None
        self._ending: set[asyncio.Task[bool]] = set()

    def fill(self) -> None:
        """Start what is missing, all at once: for before the first cycle."""
        self._want(gentle=False)

    def refill(self) -> None:
        """Start what is missing, one after another at low priority: while training goes on."""
        self._want(gentle=True)

    @property
    def waiting(self) -> int:
        """How many there are, ready or still importing."""
        return len(self._blanks)

    @property
    def ready(self) -> int:
        """How many could run an order at once."""
        return sum(blank.told.done() for blank in self._blanks)

    def take(self, order: Order) -> tuple[Blank | None, str]:
        """One for this order, a ready one if there is; or None, and why.

        From here on it is the caller's. The pool does not fill up before it is told to.
        """
        self._wanted = 0
        if order.kind == "program":
            return None, "the worker is not a Python program"
        if self.off:
            return None, self.off
        if order.cwd != self._cwd:
            return None, f"it was to run in {order.cwd}, not in {self._cwd}"
        if names := import_time_differences(self._env, order.env):
            return None, f"variables that count at import differ: {', '.join(names[:5])}"
        for blank in sorted(self._blanks, key=lambda blank: not blank.told.done()):
            self._blanks.remove(blank)
            self._usual_priority(blank)
            if blank.process.alive():
                return blank, ""
            self._end(blank)
        if self._forks is not None and self._forks.ready():
            return self._blank(), ""
        return None, "no interpreter was ready"

    async def close(self) -> None:
        """End all that wait."""
        self.off = "the pool is closed"
        self._wanted = 0
        if self._again is not None:
            self._again.cancel()
        for blank in tuple(self._blanks):
            self._blanks.remove(blank)
            self._usual_priority(blank)
            self._end(blank)
        if self._ending:
            await asyncio.wait(self._ending)

    def _want(self, *, gentle: bool) -> None:
        self._wanted, self._gentle = self._slots, gentle
        if not gentle:
            for blank in self._blanks:
                self._usual_priority(blank)
        self._top_up()

    def _top_up(self) -> None:
        if self._again is not None:
            self._again.cancel()
            self._again = None
        while not self.off and len(self._blanks) < self._wanted:
            if self._gentle and self.ready < len(self._blanks):
                return  # goes on when the one that is importing is ready
            now = time.monotonic()
            wait_s = self._budget.wait_s(self._begun, now)
            if not wait_s and not _memory_is_short():
                self._begun.append(now)
                try:
                    self._start()
                    continue
                except HoldfastError as error:
                    self._failed(0, str(error))
            self._again = asyncio.get_running_loop().call_later(
                wait_s or DEFAULTS.restart_pause_s, self._top_up
            )
            return

    def _start(self) -> None:
        blank = self._blank()
        self._blanks.append(blank)
        if self._gentle:
            pid = blank.process.pid
            _lower(blank)
            self._low[pid] = asyncio.get_running_loop().call_later(
                self._patience_s, self._usual_priority, blank
            )
        blank.told.add_done_callback(lambda told: self._ready(blank, told.result()))
        blank.process.exited.add_done_callback(lambda _: self._lost(blank))

    def _blank(self) -> Blank:
        self.started += 1
        return Blank(env=self._env, cwd=self._cwd, preload=self._preload, forks=self._forks)

    def _ready(self, blank: Blank, said: bytes) -> None:
        self._usual_priority(blank)
        if not said or blank not in self._blanks:
            return  # dead, which its process tells; or given out before it was ready
        about = msgspec.json.decode(said, type=_About)
        pid = blank.process.pid
        if about.python_threads > 1:
            self._blanks.remove(blank)
            self._end(blank)
            self._failed(pid, f"importing {', '.join(self._preload)} started a thread")
        else:
            self._failures = 0
            self._tell(WarmReady(child_pid=pid, import_s=about.import_s, threads=about.threads))
        self._top_up()

    def _lost(self, blank: Blank) -> None:
        if blank not in self._blanks:
            return
        self._blanks.remove(blank)
        self._usual_priority(blank)
        ready = blank.told.done() and bool(blank.told.result())
        code = blank.process.exited.result()
        self._end(blank)
        if ready:
            self._tell(WarmLost(child_pid=blank.process.pid, reason=f"it ended with {code}"))
        else:
            self._failed(blank.process.pid, f"it ended with {code} while importing")
        self._top_up()

    def _failed(self, pid: int, reason: str) -> None:
        self._tell(WarmLost(child_pid=pid, reason=reason))
        self._failures += 1
        if self._failures >= MAX_FAILURES and not self.off:
            self.off = f"{self._failures} waiting interpreters failed in a row: {reason}"
            self._tell(WarmOff(reason=self.off))

    def _end(self, blank: Blank) -> None:
        task = asyncio.get_running_loop().create_task(blank.discard(DEFAULTS.worker_kill_s))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def _usual_priority(self, blank: Blank) -> None:
        handle = self._low.pop(blank.process.pid, None)
        if handle is not None:
            handle.cancel()
            _raise_again(blank)


def _memory_is_short() -> bool:
    with contextlib.suppress(OSError, ValueError):
        return memory(MIN_FREE_BYTES) is not None
    return False


def _lower(blank: Blank) -> None:
    with contextlib.suppress(OSError):
        Path(f"/proc/{blank.process.pid}/autogroup").write_text(str(_LOW))
    if _nice_can_be_taken_back():
        _set_nice(blank, _LOW)


def _raise_again(blank: Blank, tries: int = 20) -> None:
    """Back to what a child that starts now would have."""
    if not blank.process.alive():
        return
    if _nice_can_be_taken_back():
        _set_nice(blank, os.getpriority(os.PRIO_PROCESS, 0))
    try:
        Path(f"/proc/{blank.process.pid}/autogroup").write_text("0")
    except BlockingIOError:  # without rights, once in 0.1 s on the whole machine
        if tries:
            asyncio.get_running_loop().call_later(0.15, _raise_again, blank, tries - 1)
    except OSError:
        pass  # a kernel without it, or a process that has just ended


def _set_nice(blank: Blank, nice: int) -> None:
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{blank.process.pid}/task").iterdir():
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, int(task.name), nice)


@functools.cache
def _nice_can_be_taken_back() -> bool:
    """Tried once, on a thread of its own: nice counts per thread, and the thread ends."""

    def attempt() -> None:
        usual = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, 0, _LOW)
        os.setpriority(os.PRIO_PROCESS, 0, usual)

    with ThreadPoolExecutor(1) as threads:
        return threads.submit(attempt).exception() is None
