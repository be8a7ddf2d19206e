"""Killing writers: the ledger's file survives kill -9 of any process at any moment."""

import asyncio
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast import ledger, proc
from holdfast.errors import Unavailable
from holdfast.ledger import Put, absent
from holdfast.ledger.check import check
from holdfast.ledger.sqlite import SqliteLedger
from holdfast.timeouts import Timeouts
from kids import state
from ledger.conformance import within
from patience import HANG_S

PARTS = 3


def _writer(path: Path, name: str, pipe: int) -> None:
    """Write numbered transactions of several keys for ever, reporting each that committed."""

    async def main() -> None:
        async with ledger.open(f"sqlite:///{path}") as led:
            for number in range(1_000_000):
                keys = [f"/{name}/{number:06d}/{part}" for part in range(PARTS)]
                txn = await led.txn([absent(keys[0])], [Put(key, os.urandom(200)) for key in keys])
                assert txn.succeeded
                os.write(pipe, f"{name} {number}\n".encode())

    asyncio.run(main())


def _fork(path: Path, name: str) -> tuple[int, int]:
    """A child that writes; returns its pid and the pipe on which it reports."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            _writer(path, name, writing)
        finally:
            os._exit(1)
    os.close(writing)
    return pid, reading


def _drain(pipe: int) -> list[str]:
    data = b""
    while chunk := os.read(pipe, 65536):
        data += chunk
    os.close(pipe)
    # The last line may be cut: it was being written when the child died.
    return data.decode().split("\n")[:-1]


@pytest.mark.parametrize("kills", [60, pytest.param(200, marks=pytest.mark.long)])
def test_killed_writers_tear_nothing_and_lose_nothing(tmp_path: Path, kills: int) -> None:
    """Never a torn transaction, never a lost committed one, never a stuck lock."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    luck = random.Random(seed)
    path = tmp_path / "x.db"
    acknowledged: list[str] = []
    alive = {name: _fork(path, name) for name in ("w0", "w1", "w2")}
    for kill in range(kills):
        time.sleep(luck.uniform(0.002, 0.06))  # a moment in the child's life, by seed
        name = luck.choice(sorted(alive))
        pid, pipe = alive.pop(name)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        acknowledged += _drain(pipe)
        alive[f"w{kill + 3}"] = _fork(path, f"w{kill + 3}")
    for pid, pipe in alive.values():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        acknowledged += _drain(pipe)

    async def look() -> tuple[dict[str, set[str]], list[str]]:
        async with ledger.open(f"sqlite:///{path}") as led:
            await within(led.txn([], [Put("/after", b"")]))  # no lock is stuck
            found: dict[str, set[str]] = {}
            for entry in (await led.range("/w")).entries:
                _, name, number, part = entry.key.split("/")
                found.setdefault(f"{name} {int(number)}", set()).add(part)
            problems, _ = await check(led)
            return found, problems

    found, problems = asyncio.run(look())
    assert problems == []
    assert len(acknowledged) > kills, "the writers must have written"
    lost = [one for one in acknowledged if one not in found]
    assert not lost, f"seed {seed}: committed and lost: {lost[:5]}"
    torn = [one for one, parts in found.items() if len(parts) != PARTS]
    assert not torn, f"seed {seed}: torn: {torn[:5]}"


WRITE_ONE = """
import asyncio, sys
from holdfast import ledger

async def main():
    async with ledger.open(sys.argv[1]) as led:
        await led.txn([], [ledger.Put("/a", b"1")])

asyncio.run(main())
"""


def _write_one(url: str, fault: str) -> proc.Child:
    """A process that writes /a, with a fault on its way."""
    env = {"HOLDFAST_FAULTS": f"ledger.sqlite.{fault}@1"}
    return proc.spawn([sys.executable, "-c", WRITE_ONE, url], env=env)


def _asleep(task: "asyncio.Future[Any]") -> bool:
    """Whether a watch waits for its bell."""
    assert isinstance(task, asyncio.Task)
    return any(frame.f_code.co_name == "__anext__" for frame in task.get_stack())


@pytest.mark.parametrize("point", ["before_commit", "after_commit"])
async def test_killed_around_the_commit(tmp_path: Path, point: str) -> None:
    """What was killed before its commit is not there; after it, it is, and watches hear of it.

    The writer dies before it can wake anybody and nobody else writes: the watch, which is
    asleep by then, finds the change by itself.
    """
    url = f"sqlite:///{tmp_path}/x.db"
    async with ledger.open(url) as led, led.watch("/", start=1) as watch:
        first = asyncio.ensure_future(anext(watch))
        while not _asleep(first):
            await asyncio.sleep(0)
        with _write_one(url, f"{point}:kill") as child:
            assert await asyncio.to_thread(child.wait, HANG_S) == -signal.SIGKILL
        if point == "after_commit":
            seen = ["/a"]
        else:
            await led.txn([], [Put("/b", b"2")])
            seen = ["/b"]
        assert [event.key for event in (await within(first)).events] == seen
        assert (await led.get("/a") is not None) == (seen == ["/a"])


async def test_a_stopped_writer_is_reported_not_waited_for_ever(tmp_path: Path) -> None:
    """SIGSTOP inside a transaction: others get a clear, retriable error; SIGCONT heals."""
    path = tmp_path / "x.db"
    async with SqliteLedger(path, timeouts=Timeouts(sqlite_busy_s=0.3)) as led:
        with _write_one(f"sqlite:///{path}", "before_commit:stop") as child:
            await asyncio.to_thread(child.wait_until, lambda: state(child.pid) == "T", HANG_S)
            assert await led.get("/a") is None  # readers are not held up
            with pytest.raises(Unavailable, match="has held the lock"):
                await led.txn([], [Put("/b", b"")])
            child.signal(signal.SIGCONT)
            assert await asyncio.to_thread(child.wait, HANG_S) == 0
        await led.txn([], [Put("/b", b"")])
        assert [entry.key for entry in (await led.range("/")).entries] == ["/a", "/b"]
