"""Nodes that keep the others from their work, and what must become of them."""

import msgspec

from holdfast.ledger import Entry
from holdfast.ledger.records import decode
from holdfast.rendezvous.records import Cycle, Node
from holdfast.sim.protocol import Violation

__all__ = ["TROUBLES", "Blame", "Trouble"]

_IN_A_ROW = 3


class Trouble(msgspec.Struct, frozen=True):
    """The nodes of one schedule that are no good."""

    failing: str = ""
    """Its workers always fail."""
    hidden: str = ""
    """The others do not reach its address."""
    cut_off: str = ""
    """It reaches no other node."""


TROUBLES = (
    Trouble(),
    Trouble(),
    Trouble(),
    Trouble(failing="n1"),
    Trouble(hidden="n0"),
    Trouble(hidden="n1"),
    Trouble(cut_off="n2"),
    Trouble(failing="n1", hidden="n0"),
)


class Blame:
    """Follows which node failed first in each cycle, and which were spares then."""

    def __init__(self) -> None:
        self._nodes: dict[str, tuple[int, int]] = {}
        self._faulty: set[tuple[str, int]] = set()
        self._hidden: set[tuple[str, int]] = set()
        self._row: list[tuple[str, int]] = []
        self._spares: set[tuple[str, int]] = set()

    def see_node(self, name: str, entry: Entry | None) -> None:
        """A node has come, is ready for a cycle, or is gone."""
        if entry is None:
            self._nodes.pop(name, None)
        else:
            self._nodes[name] = entry.create_revision, decode(Node, entry).cycle

    def see_cycle(self, before: Cycle, now: Cycle) -> None:
        """The cycle's record has changed."""
        if now.state == "running":
            first, *others = [(one.name, one.life) for one in now.members]
            if first in self._hidden and not self._hidden.issuperset(others):
                raise Violation(f"{first[0]} got rank 0 again, and the others do not reach it")
        if now.state == "running" and now.cause is not None and now.cause.excused:
            self._row = []
        if before.state != "running" or now.state != "open" or now.cause is None:
            return
        cause = now.cause
        life = next((one.life for one in before.members if one.name == cause.node), 0)
        if cause.kind == "unreachable":
            self._hidden.add((cause.node, life))
            self._faulty.add((cause.node, life))
        if cause.kind in ("failed", "hung"):
            self._see_failure(before, (cause.node, life))

    def _see_failure(self, cycle: Cycle, node: tuple[str, int]) -> None:
        held = {(member.name, member.life) for member in cycle.members}
        waiting = {
            (name, life)
            for name, (life, ready) in self._nodes.items()
            if ready == cycle.number and (name, life) not in held
        }
        self._faulty.add(node)
        if self._row and self._row[-1] == node:
            self._row.append(node)
            self._spares &= waiting - self._faulty
        else:
            self._row, self._spares = [node], waiting - self._faulty
        if cycle.rules.segment == 1 and len(self._row) >= _IN_A_ROW and self._spares:
            raise Violation(
                f"{node[0]} failed {len(self._row)} times in a row and has kept its rank, while "
                f"{min(self._spares)[0]} waited"
            )
