"""A node for tests: seats, specs, real workers; and an agent that can be killed.

Run as a program, it is a small agent: `python node.py FOLDER SCRIPT SLOTS LEASE_S` starts a
warden, workers and one warm interpreter, renews every 50 ms, and tells what happens, one JSON
object per line.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from holdfast.launch.logs import Logs, Streams
from holdfast.launch.spec import Seat, Spec
from holdfast.launch.warden import Warden, boottime_s
from holdfast.launch.warm import WarmPool
from holdfast.launch.workers import Failure, Outcome, Workers
from holdfast.rendezvous.records import Place
from patience import HANG_S, auntil, until

GRANDCHILD = """
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"])
with open(sys.argv[1] + "/pids", "a") as file:
    file.write(f"{child.pid}\\n")
"""
"""The beginning of a script that leaves a process behind, and says which."""


def make_seat(slots: int = 1, *, run: str = "r1", **changes: Any) -> Seat:
    """The place of a node that is alone."""
    place: dict[str, Any] = {
        "cycle": 3,
        "revision": 17,
        "rank": 0,
        "nodes": 1,
        "first_rank": 0,
        "world_size": slots,
        "slots": slots,
        "address": "127.0.0.1",
        "port": 29511,
    }
    place |= changes
    return Seat(run=run, node="n0", place=Place(**place), max_restarts=5, ledger_url="sqlite:///x")


def make_spec(entry: Path | str, *args: str, slots: int = 1, **changes: Any) -> Spec:
    """Workers that run this."""
    env = {**os.environ, **changes.pop("env", {})}
    return Spec(entry=str(entry), args=args, slots=slots, env=env, **changes)


def script(folder: Path, text: str, name: str = "train.py") -> Path:
    """A script with this text."""
    path = folder / name
    path.write_text(text)
    return path


@asynccontextmanager
async def started(
    spec: Spec,
    folder: Path,
    *,
    pool: WarmPool | None = None,
    seat: Seat | None = None,
    grace_s: float = 0.0,
    **options: Any,
) -> AsyncIterator[Workers]:
    """Workers that are gone afterwards; their output is in files only."""
    seat = seat or make_seat(spec.slots)
    logs = Logs(folder=folder / "logs", redirects=Streams.BOTH, tee=Streams.NONE).cycle(seat)
    workers = await Workers.start(spec, seat, pool, logs, **options)
    try:
        yield workers
    finally:
        await workers.stop(grace_s)
        logs.close()


async def ended(workers: Workers, limit_s: float = HANG_S) -> Outcome:
    """Wait until one has failed, or all have ended."""
    return await asyncio.wait_for(workers.wait(), limit_s)


async def failed(workers: Workers) -> Failure:
    """Wait until one has failed; the first that has."""
    first = (await ended(workers)).first
    assert first is not None
    return first


def printed(workers: Workers, slot: int = 0) -> str:
    """What a worker has written to stdout."""
    path = workers.workers[slot].files.stdout
    assert path is not None
    return path.read_text() if path.exists() else ""


@asynccontextmanager
async def kept_warm(spec: Spec, *, ready: int = 1, **options: Any) -> AsyncIterator[WarmPool]:
    """A pool that was filled, once so many are ready; nothing of it is left afterwards."""
    pool = WarmPool(spec, **({"preload": ()} | options))
    try:
        if ready:
            pool.fill()
            await auntil(lambda: pool.ready == ready, f"{ready} ready", limit_s=90)
        yield pool
    finally:
        await pool.close()


def numbers(path: Path, count: int) -> list[int]:
    """The pids that processes have written to a file, one per line, when all are there."""

    def lines() -> list[str]:
        return path.read_text().splitlines() if path.exists() else []

    until(lambda: len(lines()) >= count, f"{count} lines in {path.name}")
    return [int(line) for line in lines()]


async def _agent(folder: Path, entry: str, slots: int, lease_s: float) -> None:
    def tell(**facts: Any) -> None:
        print(json.dumps(facts), flush=True)

    spec = make_spec(entry, str(folder), slots=slots)
    warden = Warden()
    warden.renew(boottime_s() + 30)  # starting may take a while on a busy machine
    pool = WarmPool(make_spec(entry), preload=())
    pool.fill()
    async with started(spec, folder, guard=warden.guard) as workers:
        await auntil(lambda: pool.ready, "a warm interpreter")
        warm = [blank.process.pid for blank in pool._blanks]
        tell(workers=workers.pids, warden=warden.pid, warm=warm)
        ended = asyncio.ensure_future(workers.wait())
        while not ended.done():
            if not warden.failed.done():
                warden.renew(boottime_s() + lease_s)
                (folder / "renewed").write_text(str(time.monotonic()))
            await asyncio.wait([ended], timeout=0.05)
            if warden.failed.done():
                tell(failed=warden.failed.result())
                break
        if ended.done():
            codes = [failure.code for failure in ended.result().failures]
            await auntil(lambda: warden.fired or warden.failed.done() or not codes, "a word")
            tell(codes=codes, fired=warden.fired)
    await pool.close()
    await warden.close()


if __name__ == "__main__":
    asyncio.run(_agent(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))
