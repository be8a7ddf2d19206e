"""`holdfast serve`: gateways and a host, started and restarted by one process.

Everything that it starts dies with it; what they knew is in the ledger, so starting it again
goes on where it was. A process that dies is started again at once, then more and more slowly.
"""

import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from holdfast import events, proc
from holdfast.jobs.serving import SETTINGS
from holdfast.proc import child as child_module
from holdfast.proc.forkserver import ForkServer

__all__ = ["Part", "Supervisor", "own_name"]

_POLL_S = 0.05
_WELL_S = 10.0
"""A process that has lived so long was well: its death is a first one."""
_WAIT_MAX_S = 5.0


class Restarted(events.Event, frozen=True, tag="serve.restarted"):
    """A part died and was started again."""

    labels = ("part",)

    part: str
    code: int


class Part:
    """One process that is kept alive."""

    def __init__(
        self,
        name: str,
        module: str,
        settings: msgspec.Struct,
        log: Path,
        forks: ForkServer | None = None,
    ) -> None:
        self.name = name
        self._forks = forks
        self._argv = [sys.executable, "-m", module]
        self._env = {SETTINGS: msgspec.json.encode(settings).decode()}
        self._log = log
        self._child: proc.Child | None = None
        self._began = 0.0
        self._not_before = 0.0
        self._wait_s = 0.0
        self._trim_at = 0.0
        self.deaths = 0
        self.last_words = ""

    def start(self) -> None:
        """Start it."""
        self._began = time.monotonic()
        given: Any = {"name": self.name, "log": self._log, "env": self._env}
        child = self._forks.spawn(self._argv, **given) if self._forks else None
        self._child = child or proc.spawn(self._argv, **given)

    @property
    def pid(self) -> int:
        """The process that is it now."""
        return self._child.pid if self._child else 0

    def look(self) -> int | None:
        """Start it again if it has died and it is time; returns the exit code it died with."""
        now = time.monotonic()
        if self._child is None:
            if now >= self._not_before:
                try:
                    self.start()
                except OSError:  # no process or no memory now: that may change
                    self._not_before = now + _WAIT_MAX_S
            return None
        if self._child.alive():
            if now >= self._trim_at:
                self._trim_at = now + child_module.TRIM_S
                self._child.trim_log()
            return None
        code = self._child.wait(1.0)
        self.last_words = self._child.tail()
        self._child.kill_group()
        self._child = None
        self.deaths += 1
        well = now - self._began > _WELL_S
        self._wait_s = 0.0 if well else min(_WAIT_MAX_S, max(0.1, self._wait_s * 2))
        self._not_before = now + self._wait_s
        return code

    def ask(self) -> None:
        """Ask it to end."""
        if self._child is not None:
            self._child.signal(signal.SIGTERM)

    def end(self, grace_s: float) -> None:
        """Wait for its end, and end it."""
        if self._child is not None:
            with contextlib.suppress(Exception):
                self._child.wait(grace_s)
            self._child.kill_group()


class Supervisor:
    """Keeps parts alive until it is asked to end."""

    def __init__(self, parts: Sequence[Part], say: Callable[[str], None]) -> None:
        self._parts = parts
        self._say = say
        self._stop = False

    def run(self, ready: Callable[[], bool], announce: Callable[[], None]) -> None:
        """Start everything, say when it is ready, and watch over it."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        for part in self._parts:
            part.start()
        told = False
        try:
            while not self._stop:
                self._look()
                if not told and ready():
                    told = True
                    announce()
                time.sleep(_POLL_S)
        finally:
            self._end()

    def _look(self) -> None:
        for part in self._parts:
            code = part.look()
            if code is not None:
                events.emit(Restarted(part=part.name, code=code))
                self._say(
                    f"{part.name} ended with code {code}; starting it again{part.last_words}"
                )

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._stop:
            for part in self._parts:
                part.end(0.0)
            os._exit(130)
        self._stop = True

    def _end(self) -> None:
        self._say("stopping (once more: at once)")
        for part in self._parts:
            part.ask()
        for part in self._parts:
            part.end(20.0)


def own_name() -> str:
    """A name that no other process uses: a host is known by it."""
    return f"{os.uname().nodename.split('.')[0].lower()[:40]}-{secrets.token_hex(3)}"
