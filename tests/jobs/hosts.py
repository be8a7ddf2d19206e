"""Hosts in a test's own process, with real trainers below it; and jobs that wait for them."""

import asyncio
import contextlib
import gc
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil

from holdfast import ledger
from holdfast.jobs import decide
from holdfast.jobs.host import Host
from holdfast.jobs.local import LocalLauncher
from holdfast.jobs.store import Jobs, Seen
from holdfast.ledger import Ledger, LiveRuntime
from holdfast.timeouts import Timeouts
from kids import below
from patience import HANG_S, auntil

TOY = f"{sys.executable} -u {Path(__file__).parent / 'toy.py'}"
BUDGET = decide.Budget(restarts=3, base_s=0.05, max_s=0.2)


@contextlib.asynccontextmanager
async def host(
    tmp_path: Path,
    name: str = "h1",
    *,
    kind: type[Jobs] = Jobs,
    through: Callable[[Ledger], Any] = lambda opened: opened,
    url: str = "",
    commands: bool = False,
    start_s: float = 30.0,
    **times: float,
) -> AsyncIterator[Host]:
    """A host with a connection of its own, as in a process of its own."""
    url = url or f"sqlite:///{tmp_path}/ledger.db"
    launcher = LocalLauncher(
        {"default": TOY}, tmp_path, url, allow_commands=commands, start_s=start_s
    )
    async with ledger.open(url) as opened:
        own = kind(LiveRuntime(through(opened)), "r", time.time)
        kept = Timeouts(**{"host_lease_s": 2.0, **times})
        it = Host(own, launcher, name, timeouts=kept, grace_s=4.0, budget=BUDGET)
        task = asyncio.create_task(it.run())
        try:
            yield it
        finally:
            task.cancel()
            await asyncio.wait((task,), timeout=HANG_S)
            gc.collect()  # a task that failed unseen is told of here, not while pytest reports


async def until(
    jobs: Jobs, wanted: Callable[[Seen], bool], job: str = "j", limit_s: float = HANG_S
) -> Seen:
    """Wait until a job is as it is wanted."""
    last: list[Seen] = []

    async def look() -> bool:
        last[:] = [await jobs.get("a", job)]
        return wanted(last[0])

    await auntil(look, lambda: f"it is {last[0].job}", limit_s)
    return last[0]


async def until_state(jobs: Jobs, state: str, job: str = "j", limit_s: float = HANG_S) -> Seen:
    """Wait until a job is in a state."""
    return await until(jobs, lambda it: it.job.state == state, job, limit_s)


async def until_next(jobs: Jobs, before: Seen) -> Seen:
    """Wait until a later incarnation of a job serves."""
    return await until(jobs, lambda it: is_running(it) and it.job.epoch > before.job.epoch)


def is_running(it: Seen) -> bool:
    """Whether the job's trainer serves."""
    return it.job.state == "RUNNING" and it.lives


def trainers() -> list[psutil.Process]:
    """The trainers below this process."""
    return below(os.getpid(), "toy.py")


async def left_running(jobs: Jobs, lease_s: float = 60.0) -> tuple[Seen, int]:
    """Let a's job "j" be RUNNING under the lease of a host that is not there; and the lease."""
    found = await jobs.get("a", "j")
    lease = await jobs.runtime.ledger.grant(lease_s)
    taken = decide.take(found.job, "dead", jobs.wall())
    assert taken is not None
    assert await jobs.commit(found, taken, ops=[jobs.alive_op(taken, lease.id)])
    await jobs.update(
        "a", "j", lambda it: decide.ready(it.job, it.job.epoch, "127.0.0.1:9", jobs.wall())
    )
    return found, lease.id
