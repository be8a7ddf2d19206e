"""Jobs in a real ledger: made once, changed under comparison, fenced by their epoch."""

import asyncio

import pytest

from holdfast.errors import Exists, Fenced, Gone, Mistake, NotFound
from holdfast.jobs import decide
from holdfast.jobs.fence import Incarnation
from holdfast.jobs.records import Keys
from holdfast.jobs.store import Jobs
from holdfast.ledger import Ledger, Put


async def run(jobs: Jobs, job: str = "j", host: str = "h") -> int:
    """Bring a job to RUNNING; returns its epoch."""
    found = await jobs.get("a", job)
    taken = decide.take(found.job, host, jobs.wall())
    assert taken is not None
    assert await jobs.commit(found, taken, compare=(jobs.without_alive(found),))
    await jobs.update(
        "a", job, lambda it: decide.ready(it.job, taken.epoch, "127.0.0.1:1", jobs.wall())
    )
    return taken.epoch


async def test_an_id_is_used_once(jobs: Jobs) -> None:
    """Also when its job is gone; and only within its account."""
    await jobs.create("a", "j", {"x": 1})
    with pytest.raises(Exists):
        await jobs.create("a", "j", {"x": 1})
    assert (await jobs.create("b", "j", {})).account == "b"
    assert (await jobs.change("a", "j", "delete")).state == "DELETED"
    with pytest.raises(Exists, match="DELETED"):
        await jobs.create("a", "j", {})
    with pytest.raises(Gone):
        await jobs.change("a", "j", "resume")


async def test_of_many_who_create_one_does(jobs: Jobs) -> None:
    made = await asyncio.gather(
        *(jobs.create("a", "j", {"n": n}) for n in range(20)), return_exceptions=True
    )
    assert sum(not isinstance(one, Exception) for one in made) == 1
    assert all(isinstance(one, Exists) for one in made if isinstance(one, Exception))


async def test_names_are_not_paths(jobs: Jobs) -> None:
    for bad in ("../x", "a/b", "", "A", "x" * 100):
        with pytest.raises(Mistake):
            await jobs.create("a", bad, {})
        with pytest.raises((Mistake, NotFound)):
            await jobs.get("a", bad)


async def test_the_epoch_key_follows_the_record(jobs: Jobs, opened: Ledger) -> None:
    """Both are written by one transaction: a trainer compares the key, people read the record."""
    keys = Keys("r")
    await jobs.create("a", "j", {})
    epoch = await run(jobs)
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
    who = Incarnation("r", "a", "j", await run(jobs))
    assert (await opened.txn([who.guard()], [Put("/effect", b"1")])).succeeded
    await jobs.change("a", "j", verb)
    assert not (await opened.txn([who.guard()], [Put("/effect", b"2")])).succeeded
    with pytest.raises(Fenced):
        await jobs.update(
            "a", "j", lambda it: decide.ready(it.job, who.epoch, "127.0.0.1:2", jobs.wall())
        )


async def test_pages(jobs: Jobs) -> None:
    names = [f"j{number}" for number in range(7)]
    for name in names:
        await jobs.create("a", name, {})
    await jobs.create("b", "other", {})
    got, after, more = [], "", True
    while more:
        page, more = await jobs.page("a", after, 3)
        got += [job.id for job in page]
        after = page[-1].id
    assert got == names
