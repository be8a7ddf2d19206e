"""States and schedules that must not leave a job to nobody."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from gateway.service import answer_ok
from holdfast.errors import Unavailable, UnknownOutcome
from holdfast.jobs.records import Job
from holdfast.jobs.store import Jobs, Seen
from holdfast.ledger import Ledger
from jobs.hosts import host, is_running, trainers, until, until_state
from patience import HANG_S, auntil
from through import Through


@pytest.mark.parametrize(
    "spec",
    [
        {"holdfast": {"trainer": []}},
        {"holdfast": {"command": ["a\0b"]}},
        {"fill": "x" * 140_000},
        {"how": "raw", "answer": "HTTP/1.1\r\n"},
        {"how": "raw", "answer": "x" * 70_000},
    ],
    ids=["unhashable", "nul", "argument list too long", "no status", "endless line"],
)
async def test_a_job_that_cannot_be_started_does_not_hang(
    jobs: Jobs, tmp_path: Path, spec: dict[str, Any]
) -> None:
    """It fails, or is tried again; at least it can be deleted."""
    await jobs.create("a", "j", spec)
    async with host(tmp_path, commands=True):
        # Long enough for a start that was refused, and for a delete after it.
        with contextlib.suppress(AssertionError):
            await until_state(jobs, "FAILED", limit_s=2.0)
        await jobs.change("a", "j", "delete")
        await until_state(jobs, "DELETED", limit_s=3.0)


class _Interrupted(Jobs):
    """The answer to the first take is lost, and a user pauses the job meanwhile."""

    done = False

    async def commit(self, found: Seen, new: Job, **more: Any) -> bool:
        succeeded = await super().commit(found, new, **more)
        if new.state == "CREATING" and not self.done:
            self.done = True
            await super().change(new.account, new.id, "pause")
            raise UnknownOutcome("the answer was lost")
        return succeeded


async def test_a_job_paused_while_the_answer_to_its_take_was_lost(
    jobs: Jobs, tmp_path: Path
) -> None:
    """It can be resumed, and its host takes it."""
    await jobs.create("a", "j", {})
    async with host(tmp_path, kind=_Interrupted):
        await until_state(jobs, "PAUSED", limit_s=5.0)
        await jobs.change("a", "j", "resume")
        await until(jobs, is_running, limit_s=6.0)


async def test_a_host_adrift_stops_what_it_was_about_to_publish(
    jobs: Jobs, tmp_path: Path
) -> None:
    """After `adrift_s` without a ledger, as it does with trainers that were published before."""
    away = asyncio.Event()

    async def cut(name: str, given: object) -> None:
        if name == "txn" and '"RUNNING"' in repr(given):
            away.set()
        if away.is_set() and name in ("txn", "keep_alive", "grant"):
            raise Unavailable("the ledger is away")

    def through(opened: Ledger) -> Through:
        return Through(opened, before=cut)

    await jobs.create("a", "j", {})
    try:
        async with host(tmp_path, through=through, host_adrift_s=1.0):
            await asyncio.wait_for(away.wait(), HANG_S)
            await auntil(lambda: not trainers())
    finally:
        for one in trainers():
            one.kill()


async def test_whoever_else_listens_at_the_port_is_not_the_trainer(
    jobs: Jobs, tmp_path: Path
) -> None:
    """An address is published only for an incarnation that answers itself."""
    await jobs.create("a", "j", {"how": "silent"})
    async with host(tmp_path):
        await auntil(lambda: trainers() and "PORT" in trainers()[0].environ())
        port = int(trainers()[0].environ()["PORT"])
        async with await asyncio.start_server(answer_ok, "127.0.0.1", port):
            with pytest.raises(AssertionError, match="not within"):
                await until(jobs, is_running, limit_s=2.0)


async def test_deleted_means_that_nothing_of_it_lives(jobs: Jobs, tmp_path: Path) -> None:
    """Also when the trainer was in its grace time after a pause."""
    await jobs.create("a", "j", {"how": "deaf"})
    async with host(tmp_path, commands=True):
        await until(jobs, is_running)
        await jobs.change("a", "j", "pause")
        await jobs.change("a", "j", "delete")
        gone = await until_state(jobs, "DELETED")
        assert (gone.alive, trainers()) == (None, [])
