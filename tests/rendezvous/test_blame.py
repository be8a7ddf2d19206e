"""Nodes that keep the others from their work lose their rank: which, when, and at what price."""

import itertools

import msgspec
import pytest

from holdfast.rendezvous.decide import Clock, View, Wait, begin, decide, restart, seating
from holdfast.rendezvous.overview import lines
from holdfast.rendezvous.ranks import Ready, seat
from holdfast.rendezvous.records import Cause, Cycle, Member, Node, Parked, Rules

from .meeting import meeting

RULES = Rules(minimum=2, maximum=3, spares=1, last_call_s=0.2, settle_s=0.2, max_restarts=1)
FAILED = Cause(kind="failed", detail="exit code 7")
_times = itertools.count(1)


def there(number: int, *names: str, **unreached: int) -> dict[str, tuple[int, Node]]:
    """Living nodes that are ready for a cycle; `n1=3`: it does not reach rank 0 of cycle 3."""
    return {
        name: (
            100 + int(name[1:]),
            Node(
                cycle=number,
                address="a",
                port=1,
                slots=1,
                infra_rank=int(name[1:]),
                unreached=unreached.get(name, 0),
            ),
        )
        for name in names
    }


def run(rules: Rules, *names: str) -> Cycle:
    """A running first cycle."""
    members = tuple(Member(name, 100 + int(name[1:]), 1, "a") for name in names)
    return msgspec.structs.replace(begin(rules), state="running", members=members)


def fail(cycle: Cycle, node: str, *alive: str, kind: str = "failed") -> Cycle:
    """The next running cycle after a node's workers failed, with these nodes there."""
    cause = Cause(kind=kind, node=node, detail="exit code 7", at=float(next(_times)))
    fresh = restart(cycle, cause, View(cycle, there(cycle.number, *alive)))
    if fresh.final:
        return fresh
    closed = decide(View(fresh, there(fresh.number, *alive)), Clock(open_s=100.0))
    assert isinstance(closed, Cycle)
    return closed


def ranks(cycle: Cycle) -> list[str]:
    return [member.name for member in cycle.members]


@pytest.mark.parametrize("kind", ["failed", "hung"])
def test_the_second_failure_in_a_row_gives_the_rank_to_a_spare_and_is_not_counted(
    kind: str,
) -> None:
    """The first counts until the second shows that one node is the cause."""
    first = fail(run(RULES, "n0", "n1"), "n0", "n0", "n1", "n2", kind=kind)
    assert (ranks(first), len(first.restarts)) == (["n0", "n1"], 1)
    second = fail(first, "n0", "n0", "n1", "n2", kind=kind)
    assert (ranks(second), len(second.restarts)) == (["n2", "n1"], 0)
    mark = second.mark("n0", 100)
    assert mark is not None
    assert "first to fail, twice in a row; the last time: exit code 7" in mark.reason


def test_failures_of_different_nodes_use_up_the_budget() -> None:
    """No single node causes them."""
    first = fail(run(RULES, "n0", "n1"), "n0", "n0", "n1", "n2")
    second = fail(first, "n1", "n0", "n1", "n2")
    assert second.state == "failed"


def test_without_a_spare_a_node_keeps_its_rank_and_the_budget_counts() -> None:
    """A run does not become smaller for it; a drained or parked node is no spare."""
    first = fail(run(RULES, "n0", "n1"), "n0", "n0", "n1")
    assert fail(first, "n0", "n0", "n1").state == "failed"
    cause = Cause(kind="failed", node="n0", at=9.0)
    drained = View(first, there(first.number, "n0", "n1", "n2"), drained={"n2"})
    assert restart(first, cause, drained).state == "failed"


def test_a_parked_node_is_no_spare_for_the_next_that_fails() -> None:
    """Otherwise two such nodes would take turns for ever."""
    cycle = run(RULES, "n0", "n1")
    for node in ("n0", "n0", "n2"):
        cycle = fail(cycle, node, "n0", "n1", "n2")
    assert ranks(cycle) == ["n2", "n1"]
    assert fail(cycle, "n2", "n0", "n1", "n2").state == "failed"


def test_a_parked_node_comes_back_when_the_minimum_is_not_there_without_it() -> None:
    """And only then; started again, it has no mark."""
    cycle = fail(fail(run(RULES, "n0", "n1"), "n0", "n0", "n1", "n2"), "n0", "n0", "n1", "n2")
    lost = restart(cycle, Cause(kind="lost", node="n1", at=5.0))
    with_n3 = seating(View(lost, there(lost.number, "n0", "n2", "n3")))
    without = seating(View(lost, there(lost.number, "n0", "n2")))
    assert with_n3 is not None
    assert without is not None
    assert {member.name for member in with_n3.members} == {"n2", "n3"}
    assert with_n3.spares == ("n0",)
    assert {member.name for member in without.members} == {"n0", "n2"}
    assert cycle.mark("n0", 101) is None


def test_an_open_cycle_waits_for_a_spare_rather_than_take_a_parked_node_back() -> None:
    """The spare may answer a moment later than the node that has just lost its rank."""
    cycle = fail(run(RULES, "n0", "n1"), "n0", "n0", "n1", "n2")
    cause = Cause(kind="failed", node="n0", at=20.0)
    fresh = restart(cycle, cause, View(cycle, there(cycle.number, "n0", "n1", "n2")))
    nodes = there(fresh.number, "n0", "n1") | there(cycle.number, "n2")
    assert isinstance(decide(View(fresh, nodes), Clock()), Wait)
    closed = decide(View(fresh, there(fresh.number, "n1", "n2") | nodes), Clock())
    assert isinstance(closed, Wait)
    closed = decide(View(fresh, nodes | there(fresh.number, "n2")), Clock())
    assert isinstance(closed, Cycle)
    assert ranks(closed) == ["n2", "n1"]


def test_a_spare_that_is_slow_to_hear_of_a_cycle_is_waited_for_before_a_parked_node() -> None:
    """Without a parked node it would be waited for during `settle_s` only."""
    cycle = fail(run(RULES, "n0", "n1"), "n0", "n0", "n1", "n2")
    cause = Cause(kind="failed", node="n0", at=9.0)
    opened = restart(cycle, cause, View(cycle, there(cycle.number, "n0", "n1", "n2")))
    nodes = {**there(opened.number, "n0", "n1"), **there(cycle.number, "n2")}
    slow = View(opened, nodes)
    waits = decide(slow, Clock(open_s=RULES.settle_s + 1.0))
    assert isinstance(waits, Wait)
    closed = decide(slow, Clock(open_s=RULES.stop_s + 1.0))
    assert isinstance(closed, Cycle)
    assert set(ranks(closed)) == {"n0", "n1"}


def test_a_parked_node_does_not_get_rank_0_while_another_member_can_have_it() -> None:
    """Rank 0 is where the others meet: whatever a node was parked for, it is the wrong one."""
    cycle = fail(fail(run(RULES, "n0", "n1"), "n0", "n0", "n1", "n2"), "n0", "n0", "n1", "n2")
    assert ranks(cycle) == ["n2", "n1"]
    lost = restart(cycle, Cause(kind="lost", node="n2", at=5.0))
    possible = seating(View(lost, there(lost.number, "n0", "n1")))
    assert possible is not None
    assert [member.name for member in possible.members] == ["n1", "n0"]


def test_a_node_whose_workers_fail_because_another_node_died_is_not_blamed() -> None:
    """A dead node is missed when its lease ends; the workers of the others fail before."""
    rules = Rules(minimum=2, maximum=4, spares=2, max_restarts=5)
    silent = there(1, "n1")  # dead, but its lease has not ended
    first = restart(run(rules, "n0", "n1"), Cause(kind="failed", node="n0", at=1.0))
    alive = there(first.number, "n0", "n2", "n3") | silent
    second = decide(View(first, alive), Clock(open_s=100.0))
    assert isinstance(second, Cycle)
    assert ranks(second) == ["n0", "n2"]
    third = fail(second, "n0", "n0", "n2", "n3")
    assert (ranks(third), len(third.restarts)) == (["n0", "n2"], 2)
    assert ranks(fail(third, "n0", "n0", "n2", "n3")) == ["n3", "n2"]


def test_a_rank_0_that_most_others_do_not_reach_loses_its_rank() -> None:
    """To a spare if there is one; otherwise it changes places with a node that is reached."""
    rules = Rules(minimum=3, maximum=4, spares=1, max_restarts=0)
    cycle = run(rules, "n0", "n1", "n2")
    nodes = there(1, "n0", "n1", "n2", "n3", n1=1, n2=1)
    fresh = decide(View(cycle, nodes), Clock(unix_s=3.0))
    assert isinstance(fresh, Cycle)
    assert str(fresh.cause) == ("n0 unreachable: 2 of 2 other nodes do not reach it at a: n1, n2")
    with_spare = seating(View(fresh, there(2, "n0", "n1", "n2", "n3")))
    without = seating(View(fresh, there(2, "n0", "n1", "n2")))
    assert with_spare is not None
    assert without is not None
    assert [member.name for member in with_spare.members] == ["n3", "n1", "n2"]
    assert [member.name for member in without.members] == ["n1", "n0", "n2"]


def test_a_member_that_alone_does_not_reach_rank_0_loses_its_own_rank() -> None:
    """After the others had time to say the same."""
    cycle = run(Rules(minimum=3, maximum=4, spares=1, max_restarts=0), "n0", "n1", "n2")
    view = View(cycle, there(1, "n0", "n1", "n2", "n3", n2=1))
    assert isinstance(decide(view, Clock(unreached_s=3.0)), Wait)
    fresh = decide(view, Clock(unreached_s=60.0))
    assert isinstance(fresh, Cycle)
    possible = seating(View(fresh, there(2, "n0", "n1", "n2", "n3")))
    assert possible is not None
    assert [member.name for member in possible.members] == ["n0", "n1", "n3"]


def test_reports_of_an_old_cycle_or_an_old_life_count_for_nothing() -> None:
    """Only what a member of this cycle says about this cycle."""
    cycle = msgspec.structs.replace(run(RULES, "n0", "n1"), number=5)
    assert decide(View(cycle, there(5, "n0", "n1", n1=4)), Clock()) == Wait()
    life, node = there(5, "n1", n1=5)["n1"]
    nodes = there(5, "n0") | {"n1": (life + 1, node)}
    lost = decide(View(cycle, nodes), Clock())
    assert isinstance(lost, Cycle)
    assert lost.cause is not None
    assert lost.cause.kind == "lost"


def test_nodes_that_never_reach_each_other_use_up_the_budget() -> None:
    """Each is parked once; after that the restarts count, and the run ends."""
    cycle = run(msgspec.structs.replace(RULES, spares=0, maximum=2), "n0", "n1")
    for number in range(1, 20):
        reporter = cycle.members[1].name
        nodes = there(cycle.number, "n0", "n1", **{reporter: cycle.number})
        fresh = decide(View(cycle, nodes), Clock(unreached_s=60.0))
        assert isinstance(fresh, Cycle)
        if fresh.final:
            assert number == 4
            return
        closed = decide(View(fresh, there(fresh.number, "n0", "n1")), Clock(open_s=100.0))
        assert isinstance(closed, Cycle)
        cycle = closed
    raise AssertionError("it goes on for ever")


def test_segments_stay_whole_when_rank_0_moves() -> None:
    """A reachable node of the same domain goes first; if there is none, another segment does."""

    def node(name: str, domain: str) -> Ready:
        number = int(name[1:])
        record = Node(cycle=1, address="a", port=1, slots=1, infra_rank=number, domain=domain)
        return Ready(name, 100 + number, record)

    rules = Rules(minimum=4, maximum=4, segment=2)
    ready = [node("n0", "x"), node("n1", "x"), node("n2", "y"), node("n3", "y")]
    former = tuple(one.member() for one in ready)
    marks = [Parked(f"n{i}", 100 + i, "unreachable") for i in range(4)]
    for parked, wanted in (
        (marks[:1], ["n1", "n0", "n2", "n3"]),
        (marks[:2], ["n2", "n3", "n0", "n1"]),
        (marks[:3], ["n3", "n2", "n0", "n1"]),
        (marks, ["n0", "n1", "n2", "n3"]),
    ):
        seating = seat(ready, former, rules, parked)
        assert seating is not None
        assert [member.name for member in seating.members] == wanted


# ---- nodes that meet ----------------------------------------------------------------


async def test_a_node_that_always_fails_costs_two_failures(tmp_path: object) -> None:
    """Then a spare has its rank, it hears why, `status` says so, and the run succeeds."""
    async with meeting(f"sqlite:///{tmp_path}/ledger.db", RULES) as here:
        here.join("n0", "n1", "n2")
        bad = here["n0"].crew
        await here.ranks("n0", "n1")
        bad.end(FAILED)
        await here.until("stop", lambda: len(bad.stops) == 1)
        await here.ranks("n0", "n1")
        bad.end(FAILED)
        await here.ranks("n2", "n1")
        await here.until("word", lambda: here["n0"].crew.parkings)
        assert "twice in a row" in here["n0"].crew.parkings[0]
        view = await here.look()
        assert [node.state for node in view.nodes if node.name == "n0"] == ["parked"]
        assert "n0: its workers were the first to fail" in "\n".join(lines(view))
        assert "0 of 1 restarts used" in "\n".join(lines(view))
        here.end("n2", "n1")
        for name in ("n0", "n1", "n2"):
            ended = await here[name].result()
            assert ended is not None
            assert ended.state == "succeeded"


async def test_the_first_report_in_the_ledger_says_which_node_failed_first(
    tmp_path: object,
) -> None:
    """The report comes before the workers are stopped: a slow stop shifts no blame."""
    async with meeting(f"sqlite:///{tmp_path}/ledger.db", RULES) as here:
        here.join("n0", "n1", "n2")
        await here.ranks("n0", "n1")
        stopping = here["n0"].crew.stop
        seen: list[str] = []

        async def stop(cause: Cause | None) -> None:
            view = await here.look()
            seen.append(str(view.cycle.cause))
            await stopping(cause)

        here["n0"].crew.stop = stop  # type: ignore[method-assign]
        here["n0"].crew.end(FAILED)
        await here.until("stop", lambda: seen)
        assert seen[0] == "n0 failed: exit code 7"
