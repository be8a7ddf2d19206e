"""Who holds which rank: whole segments, old places first.

Pure. `assign` is given the nodes that are ready for a cycle and who held which rank in the last
one:

- as many nodes are active as the rules allow (`wanted`), and as were before, as long as there are
  enough; the others are spares;
- a segment's nodes come from one domain, and a domain that cannot fill a segment gives none;
- whoever held a rank keeps it when it can; freed ranks go to spares of the same domain first,
  and when a domain can no longer fill a segment, the whole segment goes to another domain;
- otherwise the order is `infra_rank`, then arrival, with domains kept together."""

from collections.abc import Mapping, Sequence

import msgspec

from holdfast.rendezvous.records import Member, Node, Rules

__all__ = ["Ready", "Seating", "assign"]


class Ready(msgspec.Struct, frozen=True):
    """A node that is ready for the cycle. `life` is also the order of arrival."""

    name: str
    life: int
    node: Node

    @property
    def order(self) -> tuple[int, int, int]:
        """Where it stands among its like."""
        rank = self.node.infra_rank
        return (1, 0, self.life) if rank is None else (0, rank, self.life)

    def member(self) -> Member:
        """It, with a rank."""
        node = self.node
        return Member(self.name, self.life, node.slots, node.address, node.port, node.domain)


class Seating(msgspec.Struct, frozen=True):
    """A possible membership."""

    members: tuple[Member, ...]
    spares: tuple[str, ...]


def assign(ready: Sequence[Ready], former: Sequence[Member], rules: Rules) -> Seating | None:
    """Give every rank to a node, or None when the minimum is not there."""
    size = rules.segment
    domains = _domains(ready, rules)
    room = {domain: len(nodes) // size for domain, nodes in domains.items()}
    held = min(len(former), len(ready), rules.highest)  # a spare is there to take a freed rank
    segments = min(max(_wanted(len(ready), rules), held) // size, sum(room.values()))
    if segments * size < rules.lowest:
        return None
    places = _places(former, domains, room, segments, size)
    members = _seat(places, domains, former, size)
    seated = {one.name for one in members}
    spares = tuple(one.name for one in sorted(ready, key=_order) if one.name not in seated)
    return Seating(tuple(one.member() for one in members), spares)


def _order(one: Ready) -> tuple[int, int, int]:
    return one.order


def _wanted(ready: int, rules: Rules) -> int:
    """How many nodes should be active when `ready` are there."""
    active = max(rules.minimum, min(ready, rules.maximum) - rules.spares)
    return max(rules.lowest, active // rules.segment * rules.segment)


def _domains(ready: Sequence[Ready], rules: Rules) -> dict[str, list[Ready]]:
    """Nodes by domain, both in order. Without segments everybody is of one domain."""
    domains: dict[str, list[Ready]] = {}
    for one in sorted(ready, key=_order):
        domains.setdefault(one.node.domain, []).append(one)
    if rules.segment == 1:
        return {"": [one for nodes in domains.values() for one in nodes]}
    return domains


def _places(
    former: Sequence[Member],
    domains: Mapping[str, list[Ready]],
    room: Mapping[str, int],
    segments: int,
    size: int,
) -> list[str]:
    """Which domain each segment comes from: the old one where it still has room."""
    here = {one.name: domain for domain, nodes in domains.items() for one in nodes}
    left = dict(room)
    old: list[str | None] = []
    stays: list[tuple[int, int, str]] = []
    for index in range(segments):
        names = [member.name for member in former[index * size : (index + 1) * size]]
        there = [here[name] for name in names if name in here]
        domain = max(there, key=there.count) if there else None
        old.append(domain)
        if domain is not None:
            stays.append((-there.count(domain), index, domain))
    places: list[str | None] = [None] * segments
    for _, index, domain in sorted(stays):  # the segments that lost the fewest stay first
        if left[domain]:
            left[domain] -= 1
            places[index] = domain
    free = [domain for domain in domains for _ in range(left[domain])]
    return [place if place is not None else free.pop(0) for place in places]


def _seat(
    places: Sequence[str],
    domains: Mapping[str, list[Ready]],
    former: Sequence[Member],
    size: int,
) -> list[Ready]:
    """Fill the segments: old ranks first, then who held another rank, then spares in order."""
    rank_of = {member.name: rank for rank, member in enumerate(former)}
    seats: list[Ready | None] = [None] * (len(places) * size)
    waiting: dict[str, list[Ready]] = {}
    for domain, nodes in domains.items():
        waiting[domain] = []
        for one in nodes:
            rank = rank_of.get(one.name)
            if rank is not None and rank < len(seats) and places[rank // size] == domain:
                seats[rank] = one
            else:
                waiting[domain].append(one)
        waiting[domain].sort(key=lambda one: one.name not in rank_of)
    return [
        seat if seat is not None else waiting[places[rank // size]].pop(0)
        for rank, seat in enumerate(seats)
    ]
