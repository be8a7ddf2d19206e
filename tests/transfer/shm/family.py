"""The parent's end of `children.py`, and stores that are removed after each test."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast import faults, proc
from holdfast.transfer import Store, shm
from holdfast.transfer.shm.backend import ShmBackend
from holdfast.transfer.shm.session import Session
from patience import HANG_S

LIMIT_S = HANG_S
CHILDREN = Path(__file__).with_name("children.py")


class Kid:
    """A running child. Every wait has a limit and tells what it waited for."""

    def __init__(self, child: proc.Child, log: Path | None) -> None:
        assert child.process.stdout is not None
        assert child.process.stdin is not None
        self.child = child
        self.log = log
        self._out = child.process.stdout.fileno()
        self._in = child.process.stdin
        self._heard = b""

    def lines(self, limit_s: float) -> list[dict[str, Any]]:
        """What has been said within the limit; empty if it has ended or is silent."""
        waiting = select.poll()  # `select` knows descriptors up to 1023 only
        waiting.register(self._out)
        if not waiting.poll(1000 * limit_s):
            return []
        self._heard += os.read(self._out, 1 << 20)
        *whole, self._heard = self._heard.split(b"\n")
        return [json.loads(line) for line in whole]

    def hear(self, what: str, limit_s: float = LIMIT_S) -> dict[str, Any]:
        """The child's next message of this kind; those before it are dropped."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            for line in self.lines(0.5):
                if line["what"] == what:
                    return line
                assert line["what"] != "error", line
            if not self.child.alive():
                code = self.child.wait(1)
                raise AssertionError(f"{self.child.name} ended with {code} before it said {what}")
        raise AssertionError(f"{self.child.name} did not say {what} in {limit_s} s")

    def all(self, limit_s: float = LIMIT_S) -> list[dict[str, Any]]:
        """Everything that the child says until it ends."""
        deadline = time.monotonic() + limit_s
        found = []
        while True:
            some = self.lines(0.05)
            found += some
            if not some and not self.child.alive():
                return found + self.lines(0)
            assert time.monotonic() < deadline, f"{self.child.name} still runs after {limit_s} s"

    def tell(self, text: object = "go") -> None:
        """Send a line."""
        self._in.write(f"{text}\n".encode())
        self._in.flush()

    def kill(self) -> None:
        """SIGKILL."""
        self.child.kill_group()

    def stopped(self) -> None:
        """Wait until the child is stopped."""
        stat = Path(f"/proc/{self.child.pid}/stat")
        self.child.wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")

    def fired(self) -> str:
        """The fault point that has acted last."""
        if self.log is None or not self.log.exists():
            return ""
        return str(json.loads(self.log.read_text().splitlines()[-1])["point"])


@contextlib.contextmanager
def start(what: str, /, *, fault: str = "", folder: Path, **args: object) -> Iterator[Kid]:
    """Start a child; it is killed at the end of the `with`."""
    env = {"PYTHONPATH": os.pathsep.join(sys.path)}
    log = None
    if fault:
        log = folder / f"faults-{time.monotonic_ns()}"
        env |= {faults.PLAN_VARIABLE: fault, faults.LOG_VARIABLE: str(log)}
    with proc.spawn(
        [sys.executable, str(CHILDREN), what, json.dumps(args)],
        name=what,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        try:
            yield Kid(child, log)
        finally:
            child.signal(signal.SIGCONT)


def session(store: Store) -> Session:
    """A store as this process has it open."""
    assert isinstance(store.backend, ShmBackend)
    return store.backend.session()


def points() -> list[str]:
    """Every fault point of this back end."""
    return [name for name in faults.catalogue().points if name.startswith("shm.")]


def fresh_name() -> str:
    """The name of a store that nobody has."""
    return f"test-{os.getpid()}-{time.monotonic_ns()}"


def remove(name: str) -> None:
    """Remove a test's store, which nobody may have open any more."""
    if any(one.name == name for one in shm.stores()):
        assert shm.remove(name), f"{name} is still in use: {shm.stores()}"
