"""Children of a test: programs that say JSON lines, hear lines, and are killed at the end."""

import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from holdfast import faults, proc
from patience import HANG_S


def stat(pid: int) -> list[str]:
    """State, parent, group, ... of a process; nothing if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def state(pid: int) -> str:
    """The letter that the kernel has for a process; empty if it is gone."""
    return "".join(stat(pid)[:1])


def alive(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    return state(pid) not in ("", "Z", "X")


def be(*children: Callable[..., Any]) -> None:
    """In a child: do what the parent asked for, with the arguments that it gave (see `start`)."""
    act = next(one for one in children if one.__name__ == sys.argv[1])
    result = act(**json.loads(sys.argv[2]))
    if asyncio.iscoroutine(result):
        asyncio.run(result)


def below(pid: int, word: str) -> list[psutil.Process]:
    """The living processes below one whose command says `word`, in its first three words."""
    found = []
    for one in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            said = " ".join(" ".join(one.cmdline()).split()[:3])
            if word in said and one.status() != psutil.STATUS_ZOMBIE:
                found.append(one)
    return found


def points(prefix: str) -> list[str]:
    """Every declared fault point below a prefix."""
    found = [name for name in faults.catalogue() if name.startswith(prefix)]
    assert found
    return found


class Kid:
    """A running child. Every wait has a limit and tells what it waited for."""

    def __init__(self, child: proc.Child, faults_log: Path | None = None) -> None:
        assert child.process.stdout is not None
        assert child.process.stdin is not None
        self.child = child
        self._faults_log = faults_log
        self._out = child.process.stdout.fileno()
        self._in = child.process.stdin
        self._begun = b""
        self._told: list[dict[str, Any]] = []

    def _listen(self, limit_s: float) -> bool:
        """Wait for more; whether the child can still say something."""
        waiting = select.poll()  # `select` knows descriptors up to 1023 only
        waiting.register(self._out)
        if not waiting.poll(1000 * max(limit_s, 0.0)):
            return True
        data = os.read(self._out, 1 << 20)
        *whole, self._begun = (self._begun + data).split(b"\n")
        self._told += [json.loads(line) for line in whole]
        return bool(data)

    def lines(self, limit_s: float) -> list[dict[str, Any]]:
        """What has been said and not been heard yet; empty if it is silent for so long."""
        if not self._told:
            self._listen(limit_s)
        found, self._told = self._told, []
        return found

    def hear(self, what: str, limit_s: float = HANG_S) -> dict[str, Any]:
        """The child's next message of this kind; those before it are dropped."""
        deadline, can_speak = time.monotonic() + limit_s, True
        while can_speak:
            while self._told:
                line = self._told.pop(0)
                if line["what"] == what:
                    return line
                assert line["what"] != "error", line
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"{self.child.name} did not say {what} in {limit_s} s"
            can_speak = self._listen(left_s)
        code = self.child.wait(HANG_S)
        raise AssertionError(f"{self.child.name} ended with {code} before it said {what}")

    async def ahear(self, what: str, limit_s: float = HANG_S) -> dict[str, Any]:
        """`hear`, beside other things that go on."""
        return await asyncio.to_thread(self.hear, what, limit_s)

    def all(self, limit_s: float = HANG_S) -> list[dict[str, Any]]:
        """Everything that the child says until it ends."""
        deadline = time.monotonic() + limit_s
        while self._listen(deadline - time.monotonic()):
            assert time.monotonic() < deadline, f"{self.child.name} runs after {limit_s} s"
        self.child.wait(HANG_S)
        return self.lines(0)

    def tell(self, text: object = "go") -> None:
        """Send a line."""
        self._in.write(f"{text}\n".encode())
        self._in.flush()

    def kill(self) -> None:
        """SIGKILL."""
        self.child.kill_group()

    def stopped(self) -> str:
        """Wait until the child is stopped; returns the fault point, if that did it."""
        self.child.wait_until(lambda: state(self.child.pid) == "T", HANG_S)
        return self.fired()

    async def killed(self) -> str:
        """Wait until the child was killed; returns the fault point, if that did it."""
        code = await asyncio.to_thread(self.child.wait, HANG_S)
        assert code == -signal.SIGKILL, f"{self.child.name} ended with {code}"
        return self.fired()

    def fired(self) -> str:
        """The fault point that has acted last."""
        if self._faults_log is None or not self._faults_log.exists():
            return ""
        return str(json.loads(self._faults_log.read_text().splitlines()[-1])["point"])


@contextlib.contextmanager
def start(
    program: Path, what: str, /, *, fault: str = "", folder: Path, **args: object
) -> Iterator[Kid]:
    """Start `python PROGRAM WHAT ARGS`; it is killed at the end."""
    env = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    log = None
    if fault:
        log = folder / f"faults-{what}-{time.monotonic_ns()}"
        env |= {faults.PLAN_VARIABLE: fault, faults.LOG_VARIABLE: str(log)}
    with proc.spawn(
        [sys.executable, str(program), what, json.dumps(args)],
        name=what,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        try:
            yield Kid(child, log)
        finally:
            child.signal(signal.SIGCONT)  # so that nobody waits for a stopped process
