"""Who holds which rank: whole segments, old places first.

Pure. `assign` is given the nodes that are ready for a cycle and who held which rank in the last
one:

- as many nodes are active as the rules allow (`wanted`), and as were before, as long as there are
  enough; the others are spares;
- a segment's nodes come from one domain, and a domain that cannot fill a segment gives none;
- whoever held a rank keeps it when it can; freed ranks go to spares of the same domain first,
  and when a domain can no longer fill a segment, the whole segment goes to another domain;
- otherwise the order is `infra_rank`, then arrival, with domains kept together;
- a parked node comes after all others: one whose workers kept failing gets a rank only when the
  minimum is not there without it; one that others do not reach gets a rank when the membership
  would be smaller without it; neither gets rank 0 while another member can have it."""

from collections.abc import Mapping, Sequence

import msgspec

from holdfast.rendezvous.records import Member, Node, Parked, Rules

__all__ = ["UNREACHABLE", "Ready", "Seating", "assign", "seat"]

UNREACHABLE = "unreachable"
"""The mark of a node that works, but that others do not reach."""


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
        return Member(
            self.name,
            self.life,
            node.slots,
            node.address,
            node.port,
            node.domain,
            node.probe_port,
        )


class Seating(msgspec.Struct, frozen=True):
    """A possible membership."""

    members: tuple[Member, ...]
    spares: tuple[str, ...]


def seat(
    ready: Sequence[Ready],
    former: Sequence[Member],
    rules: Rules,
    parked: Sequence[Parked] = (),
) -> Seating | None:
    """Give every rank to a node, to parked nodes last, or None when the minimum is not there."""
    marks = {(one.name, one.life): one.kind for one in parked}
    sound: list[Ready] = []
    hidden: list[Ready] = []
    bad: list[Ready] = []
    for one in ready:
        mark = marks.get((one.name, one.life))
        (sound if mark is None else hidden if mark == UNREACHABLE else bad).append(one)
    best = assign(sound, former, rules)
    for count in range(1, len(hidden) + 1):
        more = assign(sound + hidden[:count], former, rules)
        if more is not None and (best is None or len(more.members) > len(best.members)):
            best = more
    for count in range(1, len(bad) + 1):
        best = best or assign(sound + hidden + bad[:count], former, rules)
    if best is None:
        return None
    members = _sound_first(best.members, marks, rules.segment)
    seated = {member.name for member in members}
    waiting = (*sorted(sound, key=_order), *hidden, *bad)
    return Seating(members, tuple(one.name for one in waiting if one.name not in seated))


def _sound_first(
    members: tuple[Member, ...], marks: Mapping[tuple[str, int], str], size: int
) -> tuple[Member, ...]:
    """The same members with rank 0 at a node that is not parked, or at least is reached by the
    others; segments stay whole."""

    def worth(rank: int) -> tuple[bool, bool]:
        mark = marks.get((members[rank].name, members[rank].life))
        return mark == UNREACHABLE, mark is not None

    found = min(range(len(members)), key=worth)
    out = list(members)
    first = found // size * size
    out[:size], out[first : first + size] = out[first : first + size], out[:size]
    within = found % size
    out[0], out[within] = out[within], out[0]
    return tuple(out)


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
