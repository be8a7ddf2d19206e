"""What becomes of a cycle, case by case."""

import msgspec
import pytest

from holdfast.rendezvous.decide import Clock, View, Wait, begin, decide, restart
from holdfast.rendezvous.records import Cause, Cycle

from .cycles import RULES, changed, names, running, there, waited

ALL = ("n0", "n1", "n2")


def reopened(cycle: Cycle) -> Cycle:
    return restart(cycle, Cause(kind="failed", node="n0", at=10.0))


def test_an_open_cycle_waits_for_the_minimum_says_who_is_missing_and_gives_up() -> None:
    """Too few nodes for too long is the end, with the same reason."""
    view = View(begin(RULES), there(1, "n0"))
    assert decide(view, Clock(open_s=10)) == Wait(50, "1 of at least 2 nodes are ready")
    ended = changed(view, Clock(open_s=60, unix_s=7.0))
    assert ended.state == "failed"
    assert "1 of at least 2 nodes" in str(ended.cause)


def test_the_last_call_is_for_those_who_may_still_come() -> None:
    """With the minimum there it waits; with everybody there it does not."""
    view = View(begin(RULES), there(1, "n0", "n1"))
    assert decide(view, Clock(enough_s=2)) == Wait(3, "more nodes may come")
    late = changed(view, Clock(enough_s=5))
    full = changed(View(begin(RULES), there(1, *ALL)))
    for cycle in (late, full):
        assert (cycle.state, names(cycle)) == ("running", ["n0", "n1"])


def test_a_record_of_another_cycle_never_counts() -> None:
    """Neither of an older one nor of a newer one; nor does a drained node."""
    nodes = there(1, "n0") | there(2, "n1") | there(3, "n2")
    missing = waited(View(reopened(running("n0", "n1")), nodes)).missing
    assert missing == "1 of at least 2 nodes are ready"
    drained = View(begin(RULES), there(1, *ALL), frozenset(), set(ALL))
    assert waited(drained).missing.startswith("0 of at least 2 nodes are ready")


@pytest.mark.parametrize(
    ("heard", "open_s", "waits"),
    [(0, 0.5, True), (0, 1.0, False), (2, 20.0, True), (2, 30.0, False)],
)
def test_a_later_cycle_waits_a_little_for_the_silent_and_longer_for_those_who_are_stopping(
    heard: int, open_s: float, waits: bool
) -> None:
    """A spare takes the rank of a node that says nothing, not of one that is on its way."""
    nodes = there(2, "n0", "n2") | there(1, "n1", heard=heard)
    view = View(reopened(running("n0", "n1")), nodes)
    if waits:
        waited(view, Clock(open_s=open_s))
    else:
        assert names(changed(view, Clock(open_s=open_s))) == ["n0", "n2"]


@pytest.mark.parametrize("spare_is_ready_for", [1, 2])
def test_a_later_cycle_with_its_members_there_waits_for_nothing(spare_is_ready_for: int) -> None:
    """Nor for a silent spare: a spare's trouble never hurts the job."""
    nodes = there(2, "n0", "n1") | there(spare_is_ready_for, "n2")
    assert changed(View(reopened(running("n0", "n1")), nodes)).state == "running"


def test_a_member_that_is_gone_opens_the_next_cycle() -> None:
    """With the reason, and at no cost for the budget."""
    cycle = changed(View(running("n0", "n1"), there(1, "n0", "n2")), Clock(unix_s=9.0))
    assert (cycle.number, cycle.state, cycle.restarts) == (2, "open", ())
    assert cycle.cause == Cause(
        kind="lost", node="n1", detail="rank 1 is no longer there", cycle=1, at=9.0
    )


def test_a_member_that_came_back_is_another() -> None:
    """Its workers died with its first life."""
    nodes = there(1, "n0", "n1")
    nodes["n1"] = (999, nodes["n1"][1])
    assert changed(View(running("n0", "n1"), nodes)).state == "open"


def test_a_spare_that_goes_changes_nothing() -> None:
    """Only members count while a cycle runs."""
    assert decide(View(running("n0", "n1"), there(1, "n0", "n1")), Clock()) == Wait()


def test_success_needs_every_member_and_nobody_else() -> None:
    """Neither does a stray key stand for a member, nor does it keep a run from its end.

    A member that had finished may die: the run does not begin again because of it.
    """
    for alive in (ALL, ("n1",)):
        for ends in ({0}, {0, 7}):
            view = View(running("n0", "n1"), there(1, *alive), frozenset(ends))
            assert decide(view, Clock()) == Wait()
    for ends in ({0, 1}, {0, 1, 7}):
        view = View(running("n0", "n1"), there(1, *ALL), frozenset(ends))
        assert changed(view).state == "succeeded"


def test_one_more_node_than_the_run_has_makes_it_grow() -> None:
    """Unless one has finished already."""
    cycle = running("n0", "n1", rules=msgspec.structs.replace(RULES, spares=0))
    grown = changed(View(cycle, there(1, *ALL)))
    assert grown.state == "open"
    assert grown.cause is not None
    assert grown.cause.kind == "grew"
    assert decide(View(cycle, there(1, *ALL), frozenset({0})), Clock()) == Wait()


def test_a_run_that_grew_grows_again_only_when_its_cycle_is_older() -> None:
    """A node that comes and dies, again and again, costs less and less."""
    grown = running("n0", "n1", rules=msgspec.structs.replace(RULES, spares=0))
    waits = []
    for turn in range(30):
        view = View(grown, there(1, *ALL))
        wait_s = (waited(view).seconds or 0.0) if turn else 0.0
        waits.append(wait_s)
        later = changed(view, Clock(open_s=wait_s))
        grown = msgspec.structs.replace(later, number=1, state="running", members=grown.members)
    assert waits == sorted(waits)
    assert 1 <= waits[1] <= 60
    assert waits[-1] <= 3600


def test_a_drained_node_gets_no_rank() -> None:
    """A spare has it instead."""
    cycle = reopened(running("n0", "n1"))
    assert names(changed(View(cycle, there(2, *ALL), frozenset(), {"n0"}))) == ["n2", "n1"]


@pytest.mark.parametrize("state", ["succeeded", "failed"])
def test_what_has_ended_stays_ended(state: str) -> None:
    """Also where somebody who saw the end asks for a restart all the same."""
    ended = msgspec.structs.replace(running("n0"), state=state)
    assert decide(View(ended, there(1, *ALL)), Clock(open_s=1e9)) == Wait()
    assert restart(ended, Cause(kind="lost")) == ended


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
    """A failure counts for `restart_window_s`."""
    rules = msgspec.structs.replace(RULES, max_restarts=1, restart_window_s=100.0)
    cycle = restart(running("n0", rules=rules), Cause(kind="failed", at=0.0))
    late = restart(cycle, Cause(kind="failed", at=100.0))
    soon = restart(cycle, Cause(kind="failed", at=99.0))
    assert (late.state, soon.state) == ("open", "failed")


@pytest.mark.parametrize("kind", ["lost", "withdrew"])
def test_a_node_that_goes_costs_no_restart(kind: str) -> None:
    """However often machines die, or leave and come back, the workers' budget is theirs."""
    cycle = running("n0", "n1")
    for _ in range(50):
        cycle = restart(cycle, Cause(kind=kind, node="n1"))
    assert (cycle.state, cycle.restarts, len(cycle.history)) == ("open", (), 20)
