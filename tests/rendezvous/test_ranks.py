"""Who holds which rank: whole segments, old places first, spares in order."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import Mistake
from holdfast.rendezvous.ranks import Ready, assign
from holdfast.rendezvous.records import Member, Node, Rules

from .cycles import names


def node(
    name: str, life: int, infra_rank: int | None = None, domain: str = "", slots: int = 1
) -> Ready:
    record = Node(cycle=1, address=name, port=1, slots=slots, infra_rank=infra_rank, domain=domain)
    return Ready(name, life, record)


def some(*numbers: int, domain: str = "n", first: int = 0) -> list[Ready]:
    """n3, or b3 in the domain b, is the fourth to come."""
    return [node(f"{domain}{i}", first + i, first + i, domain) for i in numbers]


def members(*names: str) -> list[Member]:
    return [Member(name, 1, 1, name, 1, name[0]) for name in names]


def test_order_of_arrival_without_infra_ranks() -> None:
    """Whoever came first has rank 0."""
    ready = [node("b", 5), node("a", 9), node("c", 2)]
    assert names(assign(ready, (), Rules(minimum=3, maximum=3))) == ["c", "b", "a"]


def test_infra_rank_decides_and_those_without_come_last() -> None:
    """The scheduler's order counts, not who was faster."""
    ready = [node("late", 9, 0), node("none", 1), node("two", 3, 2), node("one", 4, 1)]
    assert names(assign(ready, (), Rules(minimum=4, maximum=4))) == ["late", "one", "two", "none"]


def test_the_same_infra_rank_twice_is_no_reason_to_fail() -> None:
    """Arrival decides between them."""
    ready = [node("a", 5, 0), node("b", 4, 0)]
    assert names(assign(ready, (), Rules(minimum=2, maximum=2))) == ["b", "a"]


@pytest.mark.parametrize(
    ("ready", "active"), [(1, None), (2, 2), (3, 2), (4, 3), (5, 4), (6, 4), (9, 4)]
)
def test_spares_are_kept_back_while_the_minimum_holds(ready: int, active: int | None) -> None:
    """--nnodes 2:5 --spares 1: one of up to five is kept back; nodes beyond five are spares."""
    seating = assign(some(*range(ready)), (), Rules(minimum=2, maximum=5, spares=1))
    if active is None:
        assert seating is None
    else:
        assert seating is not None
        assert names(seating) == [f"n{i}" for i in range(active)]
        assert seating.spares == tuple(f"n{i}" for i in range(active, ready))


FOUR = members("n0", "n1", "n2", "n3")


def test_survivors_keep_their_ranks_and_a_spare_takes_the_freed_one() -> None:
    """Also when the spare's infra_rank would put it elsewhere, and above the minimum."""
    four, two = Rules(minimum=4, maximum=4), Rules(minimum=2, maximum=4, spares=1)
    assert names(assign(some(0, 2, 3, 5), FOUR, four)) == ["n0", "n5", "n2", "n3"]
    assert names(assign(some(0, 2, 3), FOUR[:3], two)) == ["n0", "n3", "n2"]


def test_when_ranks_are_fewer_the_last_ones_move() -> None:
    """Four become three: whoever held rank 3 fills the gap."""
    rules = Rules(minimum=2, maximum=4)
    assert names(assign(some(0, 2, 3), FOUR, rules)) == ["n0", "n3", "n2"]


def test_a_former_member_goes_before_a_spare() -> None:
    """A node that held a rank that no longer exists is preferred to one that held none."""
    ready = [node("spare", 1, 0), node("n2", 9, 9)]
    assert names(assign(ready, FOUR[:3], Rules(minimum=1, maximum=1))) == ["n2"]


PAIRS = Rules(minimum=4, maximum=4, segment=2)
IN_PAIRS = members("a0", "a1", "b0", "b1")


def test_a_segment_comes_from_one_domain_and_the_rest_are_spares() -> None:
    """A domain that cannot fill a segment gives no node at all."""
    ready = some(0, 1, 2, domain="a") + some(0, 1, domain="b", first=10)
    ready += some(0, domain="c", first=20)
    seating = assign(ready, (), Rules(minimum=2, maximum=6, segment=2))
    assert names(seating) == ["a0", "a1", "b0", "b1"]
    assert seating is not None
    assert seating.spares == ("a2", "c0")


def test_a_freed_rank_goes_to_a_spare_of_the_same_domain() -> None:
    """The other segment is not touched."""
    ready = some(0, 2, domain="a") + some(0, 1, 2, domain="b", first=3)
    assert names(assign(ready, IN_PAIRS, PAIRS)) == ["a0", "a2", "b0", "b1"]


def test_a_domain_that_cannot_refill_its_segment_is_replaced_whole() -> None:
    """Its survivor becomes a spare; the place is taken by another domain."""
    ready = some(0, domain="a") + some(0, 1, domain="b", first=3)
    ready += some(0, 1, domain="c", first=6)
    seating = assign(ready, IN_PAIRS, PAIRS)
    assert names(seating) == ["c0", "c1", "b0", "b1"]
    assert seating is not None
    assert seating.spares == ("a0",)


def test_domains_stay_together_without_segments() -> None:
    """Neighbours in rank are neighbours in the network."""
    ready = [node("a0", 1, None, "a"), node("b0", 2, None, "b"), node("a1", 3, None, "a")]
    assert names(assign(ready, (), Rules(minimum=3, maximum=3))) == ["a0", "a1", "b0"]


TIMES = ("last_call_s", "join_s", "stop_s", "restart_window_s")


@pytest.mark.parametrize(
    "wrong",
    [
        {"minimum": 5},
        {"minimum": 0},
        {"minimum": 2, "spares": 3},
        {"spares": -1},
        {"minimum": 3, "maximum": 3, "segment": 2},
        {"segment": 0},
        {"max_restarts": -1},
        {"last_call_s": -1.0},
        {"maximum": 1_000_000},
        *({field: value} for field in TIMES for value in (math.inf, math.nan)),
    ],
)
def test_rules_that_nobody_can_keep_are_refused(wrong: dict[str, Any]) -> None:
    """One clear line, before anything is started. JSON has no infinity: the run's record could
    not be read again by anybody."""
    with pytest.raises(Mistake):
        Rules(**({"minimum": 1, "maximum": 4} | wrong)).check()


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Ready], list[Member], Rules]:
    minimum = draw(st.integers(1, 6))
    maximum = draw(st.integers(minimum, 10))
    spares = draw(st.integers(0, maximum - minimum))
    segment = draw(st.integers(1, 3))
    rules = Rules(minimum=minimum, maximum=maximum, spares=spares, segment=segment)
    count = draw(st.integers(0, 14))
    ready = [
        node(f"n{i}", 100 + i, draw(st.none() | st.integers(0, 5)), draw(st.sampled_from("abc")))
        for i in range(count)
    ]
    former = [
        Member(f"n{i}", 1, 1, "", 1, draw(st.sampled_from("abc")))
        for i in draw(st.permutations(range(14)))[: draw(st.integers(0, 10))]
    ]
    return ready, former, rules


def _most(ready: Sequence[Ready], rules: Rules) -> int:
    """How many could be active, counted the simple way."""
    domains: dict[str, int] = {}
    for one in ready:
        key = one.node.domain if rules.segment > 1 else ""
        domains[key] = domains.get(key, 0) + 1
    return sum(count // rules.segment * rules.segment for count in domains.values())


@given(cases())
def test_every_seating_keeps_the_rules(case: tuple[list[Ready], list[Member], Rules]) -> None:
    """Whatever comes: sizes, whole segments, nobody twice, nobody forgotten, old ranks kept."""
    ready, former, rules = case
    if rules.lowest > rules.highest:
        return
    seating = assign(ready, former, rules)
    possible = _most(ready, rules)
    assert (seating is None) == (possible < rules.lowest)
    if seating is None:
        return
    found = names(seating)
    assert rules.lowest <= len(found) <= rules.highest
    assert sorted([*found, *seating.spares]) == sorted(one.name for one in ready)
    domains = {one.name: one.node.domain for one in ready}
    if rules.segment > 1:
        for start in range(0, len(found), rules.segment):
            assert len({domains[name] for name in found[start : start + rules.segment]}) == 1
    else:
        for rank, member in enumerate(former[: len(found)]):
            assert member.name not in domains or found[rank] == member.name
    assert assign(list(reversed(ready)), former, rules) == seating
