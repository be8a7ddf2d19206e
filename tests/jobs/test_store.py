"""Jobs in a real ledger: made once, changed under comparison, fenced by their epoch."""

import asyncio
import time
from typing import Any

import pytest

from holdfast.errors import Exists, Fenced, UnknownOutcome
from holdfast.jobs import decide
from holdfast.jobs.fence import Incarnation
from holdfast.jobs.records import Keys
from holdfast.jobs.store import Jobs
from holdfast.ledger import Ledger, LiveRuntime, Put
from jobs.hosts import left_running
from through import Through


async def test_of_many_who_create_one_does(jobs: Jobs) -> None:
    made = await asyncio.gather(
        *(jobs.create("a", "j", {"n": n}) for n in range(20)), return_exceptions=True
    )
    assert sum(not isinstance(one, Exception) for one in made) == 1
    assert all(isinstance(one, Exists) for one in made if isinstance(one, Exception))


async def test_the_epoch_key_follows_the_record(jobs: Jobs, opened: Ledger) -> None:
    """Both are written by one transaction: a trainer compares the key, people read the record."""
    keys = Keys("r")
    await jobs.create("a", "j", {})
    epoch = (await left_running(jobs))[0].job.epoch
    for verb in ("pause", "resume"):
        entry = await opened.get(keys.epoch("a", "j"))
        assert entry is not None
        assert entry.value == str((await jobs.get("a", "j")).job.epoch).encode()
        await jobs.change("a", "j", verb)
    assert (await jobs.get("a", "j")).job.epoch == epoch + 1


@pytest.mark.parametrize("verb", ["pause", "cancel", "delete"])
async def test_whoever_was_replaced_changes_nothing(
    jobs: Jobs, opened: Ledger, verb: decide.Verb
) -> None:
    """From the moment the control plane says so, whatever the trainer's process believes."""
    await jobs.create("a", "j", {})
    who = Incarnation("r", "a", "j", (await left_running(jobs))[0].job.epoch)
    assert (await opened.txn([who.guard()], [Put("/effect", b"1")])).succeeded
    await jobs.change("a", "j", verb)
    assert not (await opened.txn([who.guard()], [Put("/effect", b"2")])).succeeded
    with pytest.raises(Fenced):
        await jobs.update(
            "a", "j", lambda it: decide.ready(it.job, who.epoch, "127.0.0.1:2", jobs.wall())
        )


async def test_create_knows_its_own_job_when_a_host_was_faster(jobs: Jobs) -> None:
    """The answer was lost, a host took the job, and the caller is not told "exists already"."""

    lost: list[str] = []

    async def lose(name: str, _: object) -> None:
        if name == "txn" and not lost:
            lost.append(name)
            await left_running(jobs)
            raise UnknownOutcome("the answer was lost")

    opened: Any = Through(jobs.runtime.ledger, after=lose)
    made = await Jobs(LiveRuntime(opened), "r", time.time).create("a", "j", {"mine": 1})
    assert made.id == "j"
