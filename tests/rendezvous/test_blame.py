"""Nodes that keep the others from their work lose their rank: which, when, and at what price.

What a whole run makes of it is in tests/launch/test_launch.py and test_namespaces.py.
"""

import itertools

import msgspec
import pytest

from holdfast.rendezvous.decide import Clock, View, Wait, decide, restart, seating
from holdfast.rendezvous.ranks import Ready, seat
from holdfast.rendezvous.records import Cause, Cycle, Parked, Rules

from .cycles import changed, names, node, numbered, running, there, waited
from .meeting import working

RULES = Rules(minimum=2, maximum=3, spares=1, last_call_s=0.2, settle_s=0.2, max_restarts=1)
ALL = ("n0", "n1", "n2")
_times = itertools.count(1)


def run(*members: str, rules: Rules = RULES) -> Cycle:
    """A running first cycle."""
    return running(*members, rules=rules)


def failed(cycle: Cycle, node: str, *alive: str, kind: str = "failed") -> Cycle:
    """What follows when a node's workers have failed, with these nodes there."""
    cause = Cause(kind=kind, node=node, detail="exit code 7", at=float(next(_times)))
    return restart(cycle, cause, View(cycle, there(cycle.number, *alive)))


def fail(cycle: Cycle, node: str, *alive: str, kind: str = "failed") -> Cycle:
    """The next running cycle, or the end."""
    fresh = failed(cycle, node, *alive, kind=kind)
    return fresh if fresh.final else closed(fresh, *alive)


def closed(cycle: Cycle, *alive: str) -> Cycle:
    """An open cycle, once these nodes are ready and nobody else is waited for."""
    return changed(View(cycle, there(cycle.number, *alive)), Clock(open_s=100.0))


def seated(cycle: Cycle, *alive: str) -> list[str]:
    """Who would get which rank of an open cycle now."""
    return names(seating(View(cycle, there(cycle.number, *alive))))


def parking() -> Cycle:
    """A running cycle in which the spare n2 has taken the rank of n0, which failed twice."""
    return fail(fail(run("n0", "n1"), "n0", *ALL), "n0", *ALL)


@pytest.mark.parametrize("kind", ["failed", "hung"])
def test_the_second_failure_in_a_row_gives_the_rank_to_a_spare_and_is_not_counted(
    kind: str,
) -> None:
    """The first counts until the second shows that one node is the cause."""
    first = fail(run("n0", "n1"), "n0", *ALL, kind=kind)
    assert (names(first), len(first.restarts)) == (["n0", "n1"], 1)
    second = fail(first, "n0", *ALL, kind=kind)
    assert (names(second), len(second.restarts)) == (["n2", "n1"], 0)
    mark = second.mark("n0", 100)
    assert mark is not None
    assert "first to fail, twice in a row; the last time: exit code 7" in mark.reason


def test_failures_of_different_nodes_use_up_the_budget() -> None:
    """No single node causes them."""
    first = fail(run("n0", "n1"), "n0", *ALL)
    assert fail(first, "n1", *ALL).state == "failed"


def test_without_a_spare_a_node_keeps_its_rank_and_the_budget_counts() -> None:
    """A run does not become smaller for it; a drained or parked node is no spare."""
    first = fail(run("n0", "n1"), "n0", "n0", "n1")
    assert fail(first, "n0", "n0", "n1").state == "failed"
    cause = Cause(kind="failed", node="n0", at=9.0)
    drained = View(first, there(first.number, *ALL), drained={"n2"})
    assert restart(first, cause, drained).state == "failed"


def test_a_parked_node_is_no_spare_for_the_next_that_fails() -> None:
    """Otherwise two such nodes would take turns for ever."""
    cycle = fail(parking(), "n2", *ALL)
    assert names(cycle) == ["n2", "n1"]
    assert fail(cycle, "n2", *ALL).state == "failed"


def test_a_parked_node_comes_back_when_the_minimum_is_not_there_without_it() -> None:
    """And only then; started again, it has no mark."""
    cycle = parking()
    lost = restart(cycle, Cause(kind="lost", node="n1", at=5.0))
    assert set(seated(lost, "n0", "n2", "n3")) == {"n2", "n3"}
    assert set(seated(lost, "n0", "n2")) == {"n0", "n2"}
    assert cycle.mark("n0", 101) is None


def test_a_spare_that_is_slow_to_hear_of_a_cycle_is_waited_for_before_a_parked_node() -> None:
    """Without a parked node it would be waited for during `settle_s` only."""
    opened = failed(fail(run("n0", "n1"), "n0", *ALL), "n0", *ALL)
    nodes = there(opened.number, "n0", "n1") | there(opened.number - 1, "n2")
    for open_s in (0.0, RULES.settle_s + 1.0):
        waited(View(opened, nodes), Clock(open_s=open_s))
    assert names(closed(opened, *ALL)) == ["n2", "n1"]
    given_up = changed(View(opened, nodes), Clock(open_s=RULES.stop_s + 1.0))
    assert set(names(given_up)) == {"n0", "n1"}


def test_a_parked_node_does_not_get_rank_0_while_another_member_can_have_it() -> None:
    """Rank 0 is where the others meet: whatever a node was parked for, it is the wrong one."""
    cycle = parking()
    assert names(cycle) == ["n2", "n1"]
    lost = restart(cycle, Cause(kind="lost", node="n2", at=5.0))
    assert seated(lost, "n0", "n1") == ["n1", "n0"]


def test_a_node_whose_workers_fail_because_another_node_died_is_not_blamed() -> None:
    """A dead node is missed when its lease ends; the workers of the others fail before."""
    rules = Rules(minimum=2, maximum=4, spares=2, max_restarts=5)
    silent = there(1, "n1")  # dead, but its lease has not ended
    first = restart(run("n0", "n1", rules=rules), Cause(kind="failed", node="n0", at=1.0))
    alive = there(first.number, "n0", "n2", "n3") | silent
    second = changed(View(first, alive), Clock(open_s=100.0))
    assert names(second) == ["n0", "n2"]
    third = fail(second, "n0", "n0", "n2", "n3")
    assert (names(third), len(third.restarts)) == (["n0", "n2"], 2)
    assert names(fail(third, "n0", "n0", "n2", "n3")) == ["n3", "n2"]


FOUR = ("n0", "n1", "n2", "n3")
OF_THREE = Rules(minimum=3, maximum=4, spares=1, max_restarts=0)


def test_a_rank_0_that_most_others_do_not_reach_loses_its_rank() -> None:
    """To a spare if there is one; otherwise it changes places with a node that is reached."""
    view = View(run("n0", "n1", "n2", rules=OF_THREE), there(1, *FOUR, n1=1, n2=1))
    fresh = changed(view, Clock(unix_s=3.0))
    assert str(fresh.cause) == ("n0 unreachable: 2 of 2 other nodes do not reach it at a: n1, n2")
    assert seated(fresh, *FOUR) == ["n3", "n1", "n2"]
    assert seated(fresh, *ALL) == ["n1", "n0", "n2"]


def test_a_member_that_alone_does_not_reach_rank_0_loses_its_own_rank() -> None:
    """After the others had time to say the same."""
    view = View(run("n0", "n1", "n2", rules=OF_THREE), there(1, *FOUR, n2=1))
    waited(view, Clock(unreached_s=3.0))
    fresh = changed(view, Clock(unreached_s=60.0))
    assert seated(fresh, *FOUR) == ["n0", "n1", "n3"]


def test_reports_of_an_old_cycle_or_an_old_life_count_for_nothing() -> None:
    """Only what a member of this cycle says about this cycle."""
    cycle = msgspec.structs.replace(run("n0", "n1"), number=5)
    assert decide(View(cycle, there(5, "n0", "n1", n1=4)), Clock()) == Wait()
    life, record = there(5, "n1", n1=5)["n1"]
    lost = changed(View(cycle, there(5, "n0") | {"n1": (life + 1, record)}))
    assert lost.cause is not None
    assert lost.cause.kind == "lost"


def test_nodes_that_never_reach_each_other_use_up_the_budget() -> None:
    """Each is parked once; after that the restarts count, and the run ends."""
    cycle = run("n0", "n1", rules=msgspec.structs.replace(RULES, spares=0, maximum=2))
    for _ in range(3):
        cycle = closed(_unreached(cycle), "n0", "n1")
    assert _unreached(cycle).final


def _unreached(cycle: Cycle) -> Cycle:
    """What becomes of a cycle whose rank 1 reports that it does not reach rank 0."""
    nodes = there(cycle.number, "n0", "n1", **{cycle.members[1].name: cycle.number})
    return changed(View(cycle, nodes), Clock(unreached_s=60.0))


@pytest.mark.parametrize(
    ("parked", "wanted"), [(1, [1, 0, 2, 3]), (2, [2, 3, 0, 1]), (3, [3, 2, 0, 1]), (4, range(4))]
)
def test_segments_stay_whole_when_rank_0_moves(parked: int, wanted: list[int]) -> None:
    """A reachable node of the same domain goes first; if there is none, another segment does."""
    ready = [Ready(f"n{i}", 100 + i, node(i, domain="xxyy"[i])) for i in range(4)]
    former = tuple(one.member() for one in ready)
    marks = [Parked(f"n{i}", 100 + i, "unreachable") for i in range(parked)]
    found = seat(ready, former, Rules(minimum=4, maximum=4, segment=2), marks)
    assert names(found) == numbered(wanted)


async def test_the_first_report_in_the_ledger_says_which_node_failed_first(url: str) -> None:
    """The report comes before the workers are stopped: a slow stop shifts no blame."""
    async with working(url, RULES) as here:
        stopping = here["n0"].crew.stop
        seen: list[str] = []

        async def stop(cause: Cause | None) -> None:
            view = await here.look()
            seen.append(str(view.cycle.cause))
            await stopping(cause)

        here["n0"].crew.stop = stop  # type: ignore[method-assign]
        here["n0"].crew.end(Cause(kind="failed", detail="exit code 7"))
        await here.until("stop", lambda: seen)
        assert seen[0] == "n0 failed: exit code 7"
