"""Nodes that meet, on every ledger: ranks, spares, failures, ends."""

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import ledger
from holdfast.errors import Mistake
from holdfast.ledger.types import Put
from holdfast.rendezvous.records import Cause, Keys, Rules

from .meeting import KEYS, RUN, meeting, working

_numbers = itertools.count()


@pytest.fixture(params=["memory", "sqlite", "etcd"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A ledger without this run."""
    if request.param == "memory":
        yield f"memory:rdzv-{next(_numbers)}"
    elif request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/ledger.db"
    else:
        found = request.getfixturevalue("etcd_url")
        yield found
        with ledger.open_sync(found) as opened:
            for entry in opened.range(f"/runs/{RUN}/").entries:
                opened.txn([], [ledger.Delete(entry.key)])


async def test_ranks_spare_and_a_common_end(url: str) -> None:
    """Two work, one waits; when both have succeeded, all three leave with success."""
    async with meeting(url) as here:
        here.join("n2", "n0", "n1")
        await here.ranks("n0", "n1")
        place = here["n1"].crew.places[0]
        assert (place.nodes, place.world_size, place.first_rank) == (2, 2, 1)
        assert place.address == "n0"
        here.end("n0")
        await asyncio.sleep(0.1)
        assert not here["n0"].task.done(), "left before success was recorded"
        here.end("n1")
        await here.ended()


async def test_a_failed_worker_begins_a_new_cycle_with_the_same_ranks(url: str) -> None:
    """Everybody hears why, stops, and starts again; the spare stays one."""
    async with working(url) as here:
        here["n1"].crew.end(Cause(kind="failed", detail="rank 1 fell over"))
        await here.cycles(2)
        await here.ranks("n0", "n1")
        assert str(here["n0"].crew.stops[0]) == "n1 failed: rank 1 fell over"
        first, second = here["n0"].crew.places
        assert second.port != first.port
        assert second.cycle == 2
        assert second.revision > first.revision


async def test_a_spare_takes_the_rank_of_a_node_that_died(url: str) -> None:
    """Rank 0's death costs one cycle like any other's; the survivor keeps its rank."""
    async with working(url) as here:
        await here["n0"].kill()
        await here.ranks("n2", "n1")
        assert here["n1"].crew.places[1].address == "n2"


async def test_a_node_that_leaves_tells_so(url: str) -> None:
    """It returns without a verdict, and the others go on with the spare at once."""
    async with working(url, lease_s=20.0) as here:
        here["n0"].crew.leave()
        assert await here["n0"].result() is None
        await here.ranks("n2", "n1")
        view = await here.look()
        assert str(view.cycle.history[-1]) == "n0 withdrew: asked to"


async def test_a_newcomer_lets_the_run_grow_to_its_maximum(url: str) -> None:
    """And not beyond: the fourth is a spare, and nothing ends because of it."""
    rules = Rules(minimum=2, maximum=3, last_call_s=0.1, settle_s=0.2)
    async with working(url, rules, ("n0", "n1")) as here:
        here.join("n2")
        await here.ranks("n0", "n1", "n2")
        await here.arrive("n3")
        await asyncio.sleep(0.3)
        await here.ranks("n0", "n1", "n2")
        assert (await here.look()).cycle.number == 2


async def test_too_few_nodes_end_the_run(url: str) -> None:
    """After the time to join, with a count."""
    async with meeting(url, Rules(minimum=3, maximum=3, join_s=0.5)) as here:
        here.join("n0", "n1")
        ended = await here.ended("n0", state="failed")
        assert "2 of at least 3 nodes are ready after 0.5 s" in str(ended.cause)


async def test_a_name_that_is_taken(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of that name is refused, and told who has it; the first is not disturbed."""
    # It waits for some leases of the first, which on a busy machine must not end by themselves.
    monkeypatch.setattr("holdfast.rendezvous.rendezvous._NAME_TAKEN_LEASES", 0.05)
    async with working(url, names=("n0", "n1"), lease_s=20.0) as here:
        with pytest.raises(Mistake, match="already in this run"):
            async with here.enter("n0", lease_s=20.0):
                pass
        await here.ranks("n0", "n1")


async def test_other_rules_are_refused(url: str) -> None:
    """The node that began the run has set them; the message shows both."""
    async with working(url, names=("n0", "n1")) as here:
        with pytest.raises(Mistake, match=r"maximum=3.*maximum=5"):
            async with here.enter("n5", Rules(minimum=2, maximum=5)):
                pass


async def test_records_of_other_versions(url: str) -> None:
    """A newer node's record with fields we do not know counts; a broken one counts for nothing."""
    async with meeting(url) as here:
        lease = await here.ledger.grant(60.0)
        newer = (
            b'{"schema":7,"cycle":1,"heard":1,"address":"x","port":4,"slots":1,'
            b'"infra_rank":0,"colour":"blue"}'
        )
        await here.ledger.txn([], [Put(KEYS.node("n9"), newer, lease.id)])
        await here.ledger.txn([], [Put(KEYS.node("n8"), b"not a record", lease.id)])
        here.join("n1")
        await here.until("a rank", lambda: here["n1"].crew.working)
        assert here["n1"].crew.places[0].rank == 1
        assert here["n1"].crew.places[0].port == 4


@pytest.mark.parametrize("bad", ["a/b", "", "../x"])
def test_names_from_outside_cannot_leave_their_place(bad: str) -> None:
    """A run or a node with a slash in its name is refused."""
    with pytest.raises(Mistake):
        Keys(bad)
    with pytest.raises(Mistake):
        KEYS.node(bad)
