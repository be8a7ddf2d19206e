"""Keeps processes alive: what every owner of several parts does, with one policy (`restarts`).

Everything that a supervisor starts dies with it. It runs until a signal comes, until its owner
says that the work is done, or until a part is given up, which is an error that says why.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from holdfast.errors import HoldfastError, Unavailable
from holdfast.proc.child import Child, spawn
from holdfast.proc.forkserver import ForkServer
from holdfast.proc.restarts import Death, RestartPolicy, Restarts
from holdfast.timeouts import DEFAULTS

__all__ = ["POLICY", "Part", "Supervisor", "as_program"]

POLICY = RestartPolicy(well_s=DEFAULTS.well_s, most_s=DEFAULTS.restart_pause_s)
_WORDS = 400
_INTERRUPTED = 130


class Part:
    """One process that is kept alive."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
        forks: ForkServer | None = None,
        policy: RestartPolicy = POLICY,
        progress: Callable[[], object] = lambda: None,
    ) -> None:
        self.name = name
        self.last_words = ""
        self.lived_s = 0.0
        self.given_up = False
        self._argv = list(argv)
        self._given: Any = {"name": name, "env": env, "log": log}
        self._forks = forks
        self._restarts = Restarts(policy)
        self._progress = progress
        self._child: Child | None = None
        self._began = 0.0
        self._not_before = 0.0
        self._trim_at = 0.0

    def start(self) -> None:
        """Start it."""
        self._began = time.monotonic()
        child = self._forks.spawn(self._argv, **self._given) if self._forks else None
        self._child = child or spawn(self._argv, **self._given)

    @property
    def pid(self) -> int:
        """The process that is it now."""
        return self._child.pid if self._child else 0

    def look(self) -> int | None:
        """Start it if it is not there and it is time; returns the exit code it died with."""
        now = time.monotonic()
        if self._child is None:
            if now >= self._not_before:
                try:
                    self.start()
                except Unavailable:  # no process or no memory now: that may change
                    self._not_before = now + DEFAULTS.restart_pause_s
            return None
        if self._child.alive():
            if now >= self._trim_at:
                self._trim_at = now + DEFAULTS.log_trim_s
                self._child.trim_log()
            return None
        code = self._child.wait(1.0)
        said = self._child.tail()
        # The cause stands at the end.
        self.last_words = said if len(said) <= _WORDS else f": … {said[-_WORDS:]}"
        self.lived_s = now - self._began
        words = self._child.last_line()
        self._child.kill_group()
        self._child = None
        wait_s = self._restarts.died(Death(self.lived_s, code, words, self._progress()))
        self.given_up = wait_s is None
        self._not_before = now + (wait_s or 0.0)
        return code

    def ask(self) -> None:
        """Ask it to end."""
        if self._child is not None:
            self._child.signal(signal.SIGTERM)

    def end(self, grace_s: float) -> None:
        """Wait for its end, and end it."""
        if self._child is not None:
            with contextlib.suppress(Exception):
                self._child.wait(max(0.0, grace_s))
            self._child.kill_group()


@dataclass(eq=False)
class Supervisor:
    """Keeps parts alive. `died` is told of every death, and returns true if that ends it all."""

    parts: Sequence[Part]
    _: KW_ONLY
    died: Callable[[Part, int], bool]
    started: Callable[[Part], None] = lambda _: None
    say: Callable[[str], None] = lambda _: None
    end_s: float = DEFAULTS.part_end_s

    def __post_init__(self) -> None:
        self.stopped = False
        """Whether a signal has come."""
        self._pids: dict[str, int] = {}

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """The first SIGTERM or SIGINT ends the parts in peace, the second at once."""
        numbers = (signal.SIGTERM, signal.SIGINT)
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def run(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Start everything and watch over it. Raises `HoldfastError` if a part is given up."""
        with self.signals():
            try:
                while not self.stopped and not self._look():
                    meanwhile()
                    time.sleep(DEFAULTS.process_look_s)
            finally:
                # Users first, servers last: nobody is to wait for what is gone already.
                for part in reversed(self.parts):
                    part.ask()
                until = time.monotonic() + self.end_s
                for part in reversed(self.parts):
                    part.end(until - time.monotonic())

    def _look(self) -> bool:
        for part in self.parts:
            code = part.look()
            if code is not None:
                self._pids.pop(part.name, None)
                if self.died(part, code):
                    return True
                if part.given_up:
                    raise HoldfastError(
                        f"{part.name} ends again and again by the same error, with code {code}"
                        f"{part.last_words}"
                    )
            elif part.pid and part.name not in self._pids:
                self._pids[part.name] = part.pid
                self.started(part)
        return False

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self.stopped:
            for part in self.parts:
                part.end(0.0)
            os._exit(_INTERRUPTED)
        self.stopped = True
        self.say("stopping (once more: at once)")


@contextlib.contextmanager
def as_program() -> Iterator[None]:
    """What a part's `main` does, so that its supervisor can tell what may pass from what will not.

    An error of ours is told in one line, and its exit code is the process's.
    """
    try:
        yield
    except HoldfastError as error:
        sys.stderr.write(f"holdfast: {type(error).__name__}: {error}\n")
        sys.exit(error.exit_code)
