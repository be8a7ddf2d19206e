"""What becomes of a cycle, case by case."""

import msgspec
import pytest

from holdfast.rendezvous.decide import Clock, View, Wait, begin, decide, restart
from holdfast.rendezvous.records import Cause, Cycle, Member, Node, Rules

RULES = Rules(minimum=2, maximum=3, spares=1, last_call_s=5, join_s=60, settle_s=1, stop_s=30)


def there(*cycles: int, heard: int = 0) -> dict[str, tuple[int, Node]]:
    return {
        f"n{i}": (
            100 + i,
            Node(cycle=cycle, heard=heard, address="a", port=1, slots=1, infra_rank=i),
        )
        for i, cycle in enumerate(cycles)
    }


def running(*names: str, number: int = 1) -> Cycle:
    members = tuple(Member(name, 100 + int(name[1:]), 1) for name in names)
    return Cycle(number=number, state="running", rules=RULES, members=members)


def reopened(cycle: Cycle, kind: str = "failed") -> Cycle:
    return restart(cycle, Cause(kind=kind, node="n0", at=10.0))


def test_an_open_cycle_waits_for_the_minimum_and_says_who_is_missing() -> None:
    verdict = decide(View(begin(RULES), there(1)), Clock(open_s=10))
    assert verdict == Wait(50, "1 of at least 2 nodes are ready")


def test_too_few_nodes_for_too_long_is_the_end_with_a_reason() -> None:
    verdict = decide(View(begin(RULES), there(1)), Clock(open_s=60, unix_s=7.0))
    assert isinstance(verdict, Cycle)
    assert verdict.state == "failed"
    assert "1 of at least 2 nodes" in str(verdict.cause)


def test_the_last_call_is_for_those_who_may_still_come() -> None:
    """With the minimum there it waits; with everybody there it does not."""
    assert decide(View(begin(RULES), there(1, 1)), Clock(enough_s=2)) == Wait(
        3, "more nodes may come"
    )
    late = decide(View(begin(RULES), there(1, 1)), Clock(enough_s=5))
    full = decide(View(begin(RULES), there(1, 1, 1)), Clock())
    for verdict in (late, full):
        assert isinstance(verdict, Cycle)
        assert verdict.state == "running"
        assert [member.name for member in verdict.members] == ["n0", "n1"]


def test_a_record_of_another_cycle_never_counts() -> None:
    """Neither of an older one nor of a newer one."""
    cycle = reopened(running("n0", "n1"))
    assert cycle.number == 2
    verdict = decide(View(cycle, there(1, 2, 3)), Clock())
    assert isinstance(verdict, Wait)
    assert verdict.missing == "1 of at least 2 nodes are ready"


@pytest.mark.parametrize(
    ("heard", "open_s", "waits"),
    [(0, 0.5, True), (0, 1.0, False), (2, 20.0, True), (2, 30.0, False)],
)
def test_a_later_cycle_waits_a_little_for_the_silent_and_longer_for_those_who_are_stopping(
    heard: int, open_s: float, waits: bool
) -> None:
    """A spare takes the rank of a node that says nothing, not of one that is on its way."""
    nodes = there(2, 1, 2, heard=heard)
    verdict = decide(View(reopened(running("n0", "n1")), nodes), Clock(open_s=open_s))
    if waits:
        assert isinstance(verdict, Wait)
    else:
        assert isinstance(verdict, Cycle)
        assert [member.name for member in verdict.members] == ["n0", "n2"]


def test_a_later_cycle_with_everybody_there_waits_for_nothing() -> None:
    verdict = decide(View(reopened(running("n0", "n1")), there(2, 2, 2)), Clock())
    assert isinstance(verdict, Cycle)
    assert verdict.state == "running"


def test_a_silent_spare_holds_nobody_up() -> None:
    """A spare's trouble never hurts the job."""
    verdict = decide(View(reopened(running("n0", "n1")), there(2, 2, 1)), Clock())
    assert isinstance(verdict, Cycle)
    assert verdict.state == "running"


def test_a_member_that_is_gone_opens_the_next_cycle() -> None:
    nodes = there(1, 1, 1)
    del nodes["n1"]
    verdict = decide(View(running("n0", "n1"), nodes), Clock(unix_s=9.0))
    assert isinstance(verdict, Cycle)
    assert (verdict.number, verdict.state) == (2, "open")
    assert verdict.cause == Cause(
        kind="lost", node="n1", detail="rank 1 is no longer there", cycle=1, at=9.0
    )
    assert verdict.restarts == ()


def test_a_member_that_came_back_is_another() -> None:
    """Its workers died with its first life."""
    nodes = there(1, 1)
    nodes["n1"] = (999, nodes["n1"][1])
    verdict = decide(View(running("n0", "n1"), nodes), Clock())
    assert isinstance(verdict, Cycle)
    assert verdict.state == "open"


def test_a_spare_that_goes_changes_nothing() -> None:
    assert decide(View(running("n0", "n1"), there(1, 1)), Clock()) == Wait()


def test_success_needs_every_member() -> None:
    nodes = there(1, 1, 1)
    assert decide(View(running("n0", "n1"), nodes, frozenset({0})), Clock()) == Wait()
    verdict = decide(View(running("n0", "n1"), nodes, frozenset({0, 1})), Clock())
    assert isinstance(verdict, Cycle)
    assert verdict.state == "succeeded"


def test_a_member_that_had_finished_may_die() -> None:
    """Its success is recorded: the run does not begin again because of it."""
    nodes = there(1, 1)
    del nodes["n0"]
    assert decide(View(running("n0", "n1"), nodes, frozenset({0})), Clock()) == Wait()


def test_one_more_node_than_the_run_has_makes_it_grow() -> None:
    rules = msgspec.structs.replace(RULES, spares=0)
    cycle = msgspec.structs.replace(running("n0", "n1"), rules=rules)
    verdict = decide(View(cycle, there(1, 1, 1)), Clock())
    assert isinstance(verdict, Cycle)
    assert verdict.state == "open"
    assert verdict.cause is not None
    assert verdict.cause.kind == "grew"
    assert decide(View(cycle, there(1, 1, 1), frozenset({0})), Clock()) == Wait()


def test_a_drained_node_gets_no_rank() -> None:
    cycle = reopened(running("n0", "n1"))
    verdict = decide(View(cycle, there(2, 2, 2), frozenset(), {"n0"}), Clock())
    assert isinstance(verdict, Cycle)
    assert [member.name for member in verdict.members] == ["n2", "n1"]


def test_what_has_ended_stays_ended() -> None:
    for state in ("succeeded", "failed"):
        cycle = msgspec.structs.replace(running("n0"), state=state)
        assert decide(View(cycle, there(1, 1, 1)), Clock(open_s=1e9)) == Wait()


def test_the_budget_of_restarts() -> None:
    """Three failures are forgiven; the fourth ends the run with its reason."""
    cycle = running("n0", "n1")
    for turn in range(3):
        cycle = restart(cycle, Cause(kind="failed", at=float(turn)))
        assert cycle.state == "open"
        cycle = msgspec.structs.replace(cycle, state="running")
    end = restart(cycle, Cause(kind="hung", node="n1", detail="rank 1 hangs", at=3.0))
    assert end.state == "failed"
    assert str(end.cause) == "n1 hung: rank 1 hangs"
    assert [cause.cycle for cause in end.history] == [1, 2, 3, 4]


def test_old_failures_are_forgotten_after_the_window() -> None:
    rules = msgspec.structs.replace(RULES, max_restarts=1, restart_window_s=100.0)
    cycle = msgspec.structs.replace(running("n0"), rules=rules)
    cycle = restart(cycle, Cause(kind="failed", at=0.0))
    late = restart(cycle, Cause(kind="failed", at=100.0))
    soon = restart(cycle, Cause(kind="failed", at=99.0))
    assert (late.state, soon.state) == ("open", "failed")


def test_a_lost_node_costs_no_restart() -> None:
    """However often machines die, the workers' budget is theirs."""
    cycle = running("n0", "n1")
    for _ in range(50):
        cycle = restart(cycle, Cause(kind="lost", node="n1"))
    assert cycle.state == "open"
    assert cycle.restarts == ()
    assert len(cycle.history) == 20
