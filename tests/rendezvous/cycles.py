"""Cycles, nodes and verdicts, for tests of the pure parts."""

from collections.abc import Iterable
from typing import Any

from holdfast.rendezvous.decide import Clock, View, Wait, decide
from holdfast.rendezvous.ranks import Seating
from holdfast.rendezvous.records import Cycle, Member, Node, Rules

RULES = Rules(minimum=2, maximum=3, spares=1, last_call_s=5, join_s=60, settle_s=1, stop_s=30)


def node(number: int, *, cycle: int = 1, **more: Any) -> Node:
    """The record of a node with this infra_rank."""
    return Node(cycle=cycle, address="a", port=1, slots=1, infra_rank=number, **more)


def there(
    cycle: int, *names: str, heard: int = 0, **unreached: int
) -> dict[str, tuple[int, Node]]:
    """Living nodes that are ready for a cycle; `n1=3`: it does not reach rank 0 of cycle 3."""
    return {
        name: (
            100 + int(name[1:]),
            node(int(name[1:]), cycle=cycle, heard=heard, unreached=unreached.get(name, 0)),
        )
        for name in names
    }


def running(*names: str, rules: Rules = RULES, number: int = 1) -> Cycle:
    """A running cycle whose members are in the lives that `there` gives them."""
    members = tuple(Member(name, 100 + int(name[1:]), 1, "a") for name in names)
    return Cycle(number=number, state="running", rules=rules, members=members)


def changed(view: View, clock: Clock | None = None) -> Cycle:
    """What becomes of a cycle that does not stay as it is."""
    verdict = decide(view, clock or Clock())
    assert isinstance(verdict, Cycle), verdict
    return verdict


def waited(view: View, clock: Clock | None = None) -> Wait:
    """For what a cycle that stays as it is waits."""
    verdict = decide(view, clock or Clock())
    assert isinstance(verdict, Wait), verdict
    return verdict


def names(found: Cycle | Seating | None) -> list[str]:
    """Who has which rank."""
    assert found is not None
    return [member.name for member in found.members]


def numbered(numbers: Iterable[int]) -> list[str]:
    """The names of nodes."""
    return [f"n{number}" for number in numbers]
