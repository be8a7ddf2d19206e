"""What a run has left: its events in their places, and what follows from the places alone.

Lines of one file are in the order in which they were written; across files there is only the wall
clock. Rules therefore go by file and line, by numbers and by terms wherever they can.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar, cast

from holdfast.check.schema import LineRefused, LinesDropped, PartDied, Record, RunBegun, RunEnded

__all__ = ["SLACK_S", "Entry", "Flaw", "History", "Life", "MetricsLine"]

E = TypeVar("E", bound=Record)
K = TypeVar("K", bound=Hashable)

SLACK_S = 1.0
"""By how much two wall clocks may disagree."""


@dataclass(frozen=True)
class Life:
    """One life of a process that writes a file: from 1."""

    file: str
    index: int
    pid: int


@dataclass(frozen=True)
class Entry(Generic[E]):
    """An event and its place."""

    event: E
    file: str
    line: int
    life: Life

    @property
    def place(self) -> str:
        """Where it is, for people."""
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Flaw:
    """A line that is not an event."""

    place: str
    reason: str


@dataclass(frozen=True)
class MetricsLine:
    """A line of metrics.jsonl."""

    line: int
    fields: dict[str, object]

    @property
    def place(self) -> str:
        """Where it is, for people."""
        return f"metrics.jsonl:{self.line}"


@dataclass(frozen=True)
class History:
    """Everything that was read, by file and line."""

    files: tuple[str, ...]
    entries: Sequence[Entry[Record]]
    flaws: Sequence[Flaw] = ()
    metrics: Sequence[MetricsLine] | None = None
    """None: there is no such file."""
    cut: frozenset[str] = frozenset()
    """The logs whose beginning was dropped, because they were too long."""

    @cached_property
    def _by_type(self) -> dict[type[Record], list[Entry[Record]]]:
        found: dict[type[Record], list[Entry[Record]]] = defaultdict(list)
        for entry in self.entries:
            found[type(entry.event)].append(entry)
        return found

    def of(self, kind: type[E]) -> list[Entry[E]]:
        """The events of one type."""
        return cast("list[Entry[E]]", self._by_type.get(kind, []))

    def by(self, kind: type[E], key: Callable[[E], K]) -> dict[K, list[Entry[E]]]:
        """The events of one type by what they are about, in order."""
        found: dict[K, list[Entry[E]]] = defaultdict(list)
        for entry in self.of(kind):
            found[key(entry.event)].append(entry)
        return dict(found)

    def first(self, kind: type[E], key: Callable[[E], K]) -> dict[K, Entry[E]]:
        """The first event of one type about each thing."""
        return {about: entries[0] for about, entries in self.by(kind, key).items()}

    def beside_first(
        self, kind: type[E], key: Callable[[E], Hashable]
    ) -> Iterator[tuple[Entry[E], Entry[E]]]:
        """Each event of one type, behind the first one that is about the same."""
        first = self.first(kind, key)
        for entry in self.of(kind):
            yield first[key(entry.event)], entry

    # ---- the run ---------------------------------------------------------------

    @cached_property
    def steps(self) -> int:
        """How many steps the run is to have; 0 if nobody said so."""
        return max((one.event.steps for one in self.of(RunBegun)), default=0)

    @cached_property
    def finished(self) -> bool:
        """Whether a supervisor has said so."""
        return any(one.event.how == "finished" for one in self.of(RunEnded))

    # ---- lives -----------------------------------------------------------------

    @cached_property
    def lives(self) -> dict[str, list[Life]]:
        """The lives of every file that has an event."""
        found: dict[str, dict[Life, None]] = defaultdict(dict)
        for entry in self.entries:
            found[entry.file][entry.life] = None
        return {file: list(lives) for file, lives in found.items()}

    @cached_property
    def _dead(self) -> set[Life]:
        children = {one.event.child for one in self.of(PartDied)}
        last = {entry.life: entry.event.at for entry in self.entries}
        began = max((one.event.at for one in self.of(RunBegun)), default=0.0)
        return {
            life
            for lives in self.lives.values()
            for life in lives
            if life != lives[-1] or life.pid in children or last[life] < began
        }

    def died(self, life: Life) -> bool:
        """Whether a life has ended before the run: its file has a later one, the supervisor says
        so, or a later supervisor has begun after its last word."""
        return life in self._dead

    def lost(self, *types: type[Record]) -> int:
        """How many events of these types are known to be lost, at most."""
        tags = {str(kind.__struct_config__.tag) for kind in types}
        refused = sum(one.event.kind in tags for one in self.of(LineRefused))
        dropped = sum(one.event.count for one in self.of(LinesDropped))
        return refused + dropped + len(self.cut)
