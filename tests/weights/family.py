"""The parent's end of `children.py`: start a child, talk to it, stop it, look at what is left."""

import asyncio
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from holdfast import faults, ledger, proc
from holdfast.ledger import Ledger
from holdfast.weights import Publisher, Retention, Subscriber
from holdfast.weights.layout import Layout
from patience import HANG_S
from weights.children import read_pin

CHILDREN = Path(__file__).with_name("children.py")
LIMIT_S = HANG_S


class Kid:
    """A running child. Every wait has a limit and tells what it waited for."""

    def __init__(self, child: proc.Child, faults_log: Path | None = None) -> None:
        assert child.process.stdout is not None
        assert child.process.stdin is not None
        self.child = child
        self.faults_log = faults_log
        self._out = child.process.stdout.fileno()
        self._in = child.process.stdin
        self._heard = b""

    def hear(self, what: str, limit_s: float = LIMIT_S) -> dict[str, Any]:
        """The child's next message of this kind; messages before it are dropped."""
        deadline = time.monotonic() + limit_s
        while True:
            line, newline, rest = self._heard.partition(b"\n")
            if newline:
                self._heard = rest
                message: dict[str, Any] = json.loads(line)
                if message["what"] == what:
                    return message
                continue
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._out], [], [], left)[0]:
                raise AssertionError(f"{self.child.name} did not say {what} in {limit_s} s")
            data = os.read(self._out, 1 << 16)
            if not data:
                code = self.child.wait(HANG_S)
                raise AssertionError(f"{self.child.name} ended with {code} before {what}")
            self._heard += data

    async def ahear(self, what: str, limit_s: float = LIMIT_S) -> dict[str, Any]:
        """`hear`, beside other things that go on."""
        return await asyncio.to_thread(self.hear, what, limit_s)

    def tell(self, text: object) -> None:
        """Send a line."""
        self._in.write(f"{text}\n".encode())
        self._in.flush()

    async def killed(self) -> str:
        """Wait until the child was killed; returns the fault point, if that did it."""
        code = await asyncio.to_thread(self.child.wait, LIMIT_S)
        assert code == -signal.SIGKILL, f"{self.child.name} ended with {code}"
        return self.fired()

    async def stopped(self) -> str:
        """Wait until the child is stopped; returns the fault point, if that did it."""
        await asyncio.to_thread(self.child.wait_until, lambda: _state(self.child.pid) == "T")
        return self.fired()

    def fired(self) -> str:
        """The fault point that has acted last."""
        if self.faults_log is None or not self.faults_log.exists():
            return ""
        found: str = json.loads(self.faults_log.read_text().splitlines()[-1])["point"]
        return found


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@contextlib.contextmanager
def start(
    what: str, /, *, fault: str = "", under: Sequence[str] = (), folder: Path, **args: object
) -> Iterator[Kid]:
    """Start a child; it is killed at the end of the `with`. `under` runs it in another program."""
    env = {"PYTHONPATH": os.pathsep.join(sys.path)}
    log = None
    if fault:
        log = folder / f"faults-{what}-{time.monotonic_ns()}"
        env |= {faults.PLAN_VARIABLE: fault, faults.LOG_VARIABLE: str(log)}
    with proc.spawn(
        [*under, sys.executable, str(CHILDREN), what, json.dumps(args)],
        name=what,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        try:
            yield Kid(child, log)
        finally:
            child.signal(signal.SIGCONT)  # so that nobody waits for a stopped process


def points(prefix: str) -> list[str]:
    """Every declared fault point below a prefix."""
    found = [name for name in faults.catalogue().points if name.startswith(prefix)]
    assert found
    return found


def need_strace() -> str:
    """The program strace; without it the test cannot be done."""
    found = shutil.which("strace")
    if found is None:
        missing = pytest.fail if os.environ.get("CI") else pytest.skip
        missing("strace is not installed (package strace)")
    return found


class House:
    """One channel with its ledger, as the test itself looks at it."""

    def __init__(self, folder: Path, led: Ledger, url: str) -> None:
        self.folder = folder
        self.root = str(folder / "weights")
        self.url = url
        self.ledger = led
        self.layout = Layout(self.root, "policy")
        self.base = Path(self.layout.base)

    def where(self) -> dict[str, Any]:
        """What a child needs to find it."""
        return {"root": self.root, "url": self.url, "folder": self.folder}

    def publisher(self, **retention: Any) -> Publisher:
        """A publisher of this process."""
        return Publisher(self.root, self.ledger, "policy", Retention(**retention), name="parent")

    def subscriber(self, name: str = "parent", **options: Any) -> Subscriber:
        """A subscriber of this process."""
        return Subscriber(self.root, self.ledger, "policy", name, **options)

    async def committed(self) -> list[int]:
        """The versions that the ledger knows."""
        entries = (await self.ledger.range("/runs/default/weights/policy/live/versions/")).entries
        return [int(entry.key.rpartition("/")[2]) for entry in entries]

    async def consumers(self) -> list[str]:
        """The consumers that hold a lease."""
        entries = (await self.ledger.range("/runs/default/weights/policy/live/consumers/")).entries
        return [entry.key.split("/")[-2] for entry in entries]

    def folders(self) -> list[int]:
        """The versions that have a folder."""
        return sorted(int(path.name.removeprefix("step_")) for path in self.base.glob("step_*"))

    def leftovers(self) -> list[str]:
        """Everything in the temporary folders."""
        places = (self.layout.drafts, self.layout.trash, self.layout.staging)
        found = [path for place in places for path in Path(place).glob("*")]
        return sorted(str(path.relative_to(self.base)) for path in found)

    def bytes_of(self, number: int) -> dict[str, bytes]:
        """All files of a version's folder."""
        folder = self.base / f"step_{number}"
        return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}

    async def read(self, number: int | None = None) -> tuple[int, int]:
        """Pin a version, verified, and read all of it."""
        async with (
            self.subscriber("reader", needs="latest") as subscriber,
            subscriber.pin(number) as pin,
        ):
            return read_pin(pin)

    async def read_all(self) -> list[tuple[int, int]]:
        """Read every version that the ledger knows."""
        return [await self.read(number) for number in await self.committed()]


@contextlib.asynccontextmanager
async def house(folder: Path, url: str = "") -> AsyncIterator[House]:
    """A new channel with a ledger beside it."""
    url = url or f"sqlite:///{folder}/ledger.db"
    async with ledger.open(url) as led:
        yield House(folder, led, url)
