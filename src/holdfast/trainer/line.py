"""The order of one line's operations: what is new, what comes next, what is given up.

Pure. A line is a model, whose operations are carried out one after the other by their
numbers, or a sampling session, whose operations are carried out as they come.

- A number means one operation, for ever: a second send is a duplicate and gets the same
  promise; another operation under the number is refused.
- A number that is missing while later ones are there holds these up. It is given up (a
  tombstone is written under it) when it has been missing for longer than any client tries
  to send it, restarts of the trainer notwithstanding; whoever comes with it afterwards is told so.
- Numbers up to `trimmed` were carried out long ago: they are duplicates by their number alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from holdfast.trainer.records import Entry, Result

__all__ = ["SKIP", "Arrival", "Line"]

SKIP = "skip"
"""The kind of a tombstone. Whoever comes under its number gets its result."""


class Arrival(Enum):
    """What an operation that was sent is."""

    NEW = "new"
    DUPLICATE = "duplicate"
    """It has been promised; a number that was given up has its (bad) result, too."""
    CLASH = "clash"
    """The number stands for another operation."""
    PENDING = "pending"
    """It is being written to the journal: `State.arrive`."""
    FORGOTTEN = "forgotten"
    """It was carried out so long ago that its result is no longer kept."""


@dataclass
class Line:
    """One line. `done`: everything up to this number has had its effect here."""

    ordered: bool = True
    done: int = -1
    trimmed: int = -1
    forgotten: dict[int, int] = field(default_factory=dict)
    """Results up to this number are no longer kept, by block (see `block`)."""
    entries: dict[int, Entry] = field(default_factory=dict)
    """Of an ordered line: all above `trimmed`. Of another: those without a durable result."""
    results: dict[int, Result] = field(default_factory=dict)
    computed: set[int] = field(default_factory=set)
    """Of a line without order: what was carried out, while its result is not durable."""
    gap: int | None = None
    """The missing number that holds others up."""
    gap_since: float = 0.0

    def block(self, number: int) -> int:
        """Copies of a sampling client number their operations each in a block of its own."""
        return 0 if self.ordered else number // 1_000_000_000

    def is_forgotten(self, number: int) -> bool:
        """Whether the result is no longer kept."""
        return number <= self.forgotten.get(self.block(number), -1)

    def arrive(self, number: int, kind: str, identity: str) -> Arrival:
        """What a send under this number is. Nothing changes: the ledger decides (`add`)."""
        known = self.entries.get(number) or self.results.get(number)
        if known is None:
            if self.is_forgotten(number):
                return Arrival.FORGOTTEN
            return Arrival.DUPLICATE if number <= self.trimmed else Arrival.NEW
        if known.kind == SKIP:
            return Arrival.DUPLICATE
        if (known.kind, known.identity) != (kind, identity):
            return Arrival.CLASH
        return Arrival.DUPLICATE

    def add(self, number: int, entry: Entry) -> None:
        """The ledger has this operation now."""
        if number > self.trimmed:
            self.entries.setdefault(number, entry)

    def next(self) -> int | None:
        """The number to be carried out next, if there is one that may be."""
        if self.ordered:
            return self.done + 1 if self.done + 1 in self.entries else None
        return next((one for one in self.entries if one not in self.computed), None)

    def finish(self, number: int) -> None:
        """This operation has had its effect."""
        if self.ordered:
            assert number == self.done + 1, f"{number} was carried out after {self.done}"
            self.done = number
        else:
            self.computed.add(number)

    def settle(self, number: int, result: Result) -> None:
        """The ledger has this result now."""
        self.results.setdefault(number, result)
        if not self.ordered:
            self.entries.pop(number, None)
            self.computed.discard(number)

    def is_waiting(self, number: int) -> bool:
        """Whether it is promised and has not had its effect here."""
        return number in self.entries and (not self.ordered or number > self.done)

    def waiting(self) -> int:
        """How many operations have been promised and have not had their effect."""
        if not self.ordered:
            return len(self.entries)
        return len(self.entries) - max(0, min(self.done - self.trimmed, len(self.entries)))

    def missing(self, now: float, patience_s: float, wall: float) -> int | None:
        """The number to be given up now, if any. Call it from time to time.

        It must have been missing for `patience_s`, by the clock on the wall since the first
        operation that waits for it came, and a quarter of that under our eyes: whoever still
        tries to send it has come by then.
        """
        wanted = self.done + 1
        if not self.ordered or wanted in self.entries or not self.waiting():
            self.gap = None
            return None
        if self.gap != wanted:
            self.gap, self.gap_since = wanted, now
            return None
        here_s = now - self.gap_since
        if here_s < patience_s / 4:
            return None
        first = min(entry.at for number, entry in self.entries.items() if number > wanted)
        return wanted if here_s >= patience_s or wall - first >= patience_s else None

    def trim(self, number: int) -> list[int]:
        """Entries up to this number are no longer kept; returns which those were."""
        assert number <= self.done, f"{number} has not been carried out"
        self.trimmed = max(self.trimmed, number)
        old = [one for one in self.entries if one <= number]
        for one in old:
            del self.entries[one]
        return old

    def old_results(self, before: float, keep: int) -> Iterator[int]:
        """Results that may be forgotten: older than `before`, and followed by many newer ones."""
        for number, result in list(self.results.items())[: max(0, len(self.results) - keep)]:
            if result.at >= before or self.is_waiting(number):
                return
            yield number

    def forget(self, numbers: list[int]) -> None:
        """The results of these are no longer kept."""
        for number in numbers:
            self.results.pop(number, None)
            block = self.block(number)
            self.forgotten[block] = max(self.forgotten.get(block, -1), number)
