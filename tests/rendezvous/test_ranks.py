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

from .cycles import names, numbered


def node(
    name: str, life: int, infra_rank: int | None = None, domain: str = "", slots: int = 1
) -> Ready:
    record = Node(cycle=1, address=name, port=1, slots=slots, infra_rank=infra_rank, domain=domain)
    return Ready(name, life, record)


def some(text: str) -> list[Ready]:
    """Nodes, in the order of their places and of their coming; the first letter is the domain."""
    return [node(name, at, at, name[0]) for at, name in enumerate(text.split())]


def members(*names: str) -> list[Member]:
    return [Member(name, 1, 1, name, 1, name[0]) for name in names]


@pytest.mark.parametrize(
    ("ready", "active"), [(1, None), (2, 2), (3, 2), (4, 3), (5, 4), (6, 4), (9, 4)]
)
def test_spares_are_kept_back_while_the_minimum_holds(ready: int, active: int | None) -> None:
    """--nnodes 2:5 --spares 1: one of up to five is kept back; nodes beyond five are spares."""
    all_ready = some(" ".join(numbered(range(ready))))
    seating = assign(all_ready, (), Rules(minimum=2, maximum=5, spares=1))
    if active is None:
        assert seating is None
    else:
        assert seating is not None
        assert names(seating) == [f"n{i}" for i in range(active)]
        assert seating.spares == tuple(f"n{i}" for i in range(active, ready))


FOUR, IN_PAIRS = members("n0", "n1", "n2", "n3"), members("a0", "a1", "b0", "b1")
ONE_KEPT_BACK, TWO_TO_FOUR = Rules(minimum=2, maximum=4, spares=1), Rules(minimum=2, maximum=4)
IN_TWOS = Rules(minimum=2, maximum=6, segment=2)
SPARE_AND_N2 = [node("spare", 1, 0), node("n2", 9, 9)]
ARRIVED = [node("b", 5), node("a", 9), node("c", 2)]
MIXED = [node("late", 9, 0), node("none", 1), node("two", 3, 2), node("one", 4, 1)]
NEIGHBOURS = [node("a0", 1, None, "a"), node("b0", 2, None, "b"), node("a1", 3, None, "a")]


def exactly(count: int, segment: int = 1) -> Rules:
    return Rules(minimum=count, maximum=count, segment=segment)


@pytest.mark.parametrize(
    ("_what", "ready", "former", "rules", "wanted", "spares"),
    [
        ("whoever came first", ARRIVED, (), exactly(3), "c b a", ""),
        ("the scheduler's order, then the rest", MIXED, (), exactly(4), "late one two none", ""),
        ("one place twice", [node("a", 5, 0), node("b", 4, 0)], (), exactly(2), "b a", ""),
        ("a spare in a freed rank", some("n0 n2 n3 n5"), FOUR, exactly(4), "n0 n5 n2 n3", ""),
        ("above the minimum", some("n0 n2 n3"), FOUR[:3], ONE_KEPT_BACK, "n0 n3 n2", ""),
        ("fewer ranks: the last moves", some("n0 n2 n3"), FOUR, TWO_TO_FOUR, "n0 n3 n2", ""),
        ("a former member first", SPARE_AND_N2, FOUR[:3], exactly(1), "n2", "spare"),
        ("a small domain", some("a0 a1 a2 b0 b1 c0"), (), IN_TWOS, "a0 a1 b0 b1", "a2 c0"),
        ("its own spare", some("a0 a2 b0 b1 b2"), IN_PAIRS, exactly(4, 2), "a0 a2 b0 b1", "b2"),
        ("a segment moves", some("a0 b0 b1 c0 c1"), IN_PAIRS, exactly(4, 2), "c0 c1 b0 b1", "a0"),
        ("domains stay together", NEIGHBOURS, (), exactly(3), "a0 a1 b0", ""),
    ],
)
def test_who_gets_which_rank(
    _what: str,
    ready: list[Ready],
    former: Sequence[Member],
    rules: Rules,
    wanted: str,
    spares: str,
) -> None:
    """Order of arrival, or the scheduler's; survivors keep their ranks, and spares take the freed
    ones; a segment comes from one domain, and what a domain cannot fill goes to another whole."""
    seating = assign(ready, former, rules)
    assert seating is not None
    assert names(seating) == wanted.split()
    assert seating.spares == tuple(spares.split())


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
