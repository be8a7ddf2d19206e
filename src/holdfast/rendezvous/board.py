"""A rendezvous as its records tell it, kept up to date from a watch.

Pure: entries in, a `View` out. Records that cannot be read (a hand-written key, a number that is
none) are left out rather than ending everybody's run; the cycle's own record is not.
"""

from collections.abc import Iterable

import msgspec

from holdfast.ledger.records import Stored, decode
from holdfast.ledger.types import Entry
from holdfast.ledger.unreadable import tell
from holdfast.rendezvous.decide import View
from holdfast.rendezvous.records import Cycle, Keys, Node

__all__ = ["Board"]

# Made once: there may be thousands of nodes to read.
_node = msgspec.json.Decoder(Node).decode


class Board:
    """What is below one run's rendezvous."""

    def __init__(self, keys: Keys, entries: Iterable[Entry] = ()) -> None:
        self._keys = keys
        self.cycle: Stored[Cycle] | None = None
        self.nodes: dict[str, tuple[int, Node]] = {}
        self._ends: dict[int, set[int]] = {}
        self._drained: set[str] = set()
        for entry in entries:
            self.see(entry.key, entry)

    def see(self, key: str, entry: Entry | None) -> None:
        """Take in one key as it is now; None: it is gone."""
        keys = self._keys
        if key.startswith(keys.nodes):  # first, because most are
            self._see_node(key.removeprefix(keys.nodes), entry)
        elif key == keys.cycle:
            self.cycle = Stored(entry, decode(Cycle, entry)) if entry is not None else None
        elif key.startswith(keys.ends):
            self._see_end(key.removeprefix(keys.ends), there=entry is not None)
        elif key.startswith(keys.drains):
            name = key.removeprefix(keys.drains)
            (self._drained.discard if entry is None else self._drained.add)(name)

    def view(self) -> View | None:
        """All of it, for `decide`; None when there is no cycle."""
        if self.cycle is None:
            return None
        cycle = self.cycle.record
        ends = frozenset(self._ends.get(cycle.number, ()))
        return View(cycle, self.nodes, ends, self._drained)

    def old_ends(self) -> list[str]:
        """Keys of successes in cycles that are over."""
        number = self.cycle.record.number if self.cycle else 0
        return [
            self._keys.end(old, rank)
            for old, ranks in sorted(self._ends.items())
            if old < number
            for rank in sorted(ranks)
        ]

    def _see_node(self, name: str, entry: Entry | None) -> None:
        if entry is None:
            self.nodes.pop(name, None)
            return
        try:
            self.nodes[name] = entry.create_revision, _node(entry.value)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self.nodes.pop(name, None)
            tell(entry, f"{entry.key} does not hold a Node: {error}")

    def _see_end(self, rest: str, *, there: bool) -> None:
        number, _, rank = rest.partition("/")
        if number.isdecimal() and rank.isdecimal():
            ranks = self._ends.setdefault(int(number), set())
            (ranks.add if there else ranks.discard)(int(rank))
