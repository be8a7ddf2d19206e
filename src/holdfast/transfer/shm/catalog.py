"""The picture that one process has of a store, and how it is kept up to date.

`refresh` compares the board with what it was; where a word differs, the table of that slot
says in which segments, and of those only what is new is read. Nothing is locked.
"""

from pathlib import Path

import numpy as np

from holdfast.transfer.shm.index import Index
from holdfast.transfer.shm.layout import PAGE
from holdfast.transfer.shm.segment import Segment
from holdfast.transfer.shm.tables import Board, Table

__all__ = ["Catalog"]


class Catalog:
    """Board, tables, segments and index. Used under the mutex of its session."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.board = Board(folder)
        self.index = Index()
        self.tables: dict[int, Table] = {}
        self.segments: dict[tuple[int, int], Segment] = {}
        self._seen = bytes(PAGE)

    def refresh(self) -> bool:
        """Read what has been committed since. False if there is nothing."""
        now = self.board.copy()
        if now == self._seen:
            return False
        words = np.frombuffer(now, np.int64)
        changed = np.flatnonzero(words != np.frombuffer(self._seen, np.int64))
        for slot in changed.tolist():
            self.scan(slot, int(words[slot]))
        self._seen = now
        return True

    def scan(self, slot: int, committed: int) -> None:
        """Read what is new in a slot."""
        table = self.tables.get(slot)
        if table is None:
            table = self.tables[slot] = Table(self.folder, slot)
        for number, (life, last) in enumerate(table.rows().tolist()):
            segment = self.segments.get((slot, number))
            if segment is None:
                segment = self.segments[slot, number] = Segment(self.folder, table, number)
            if segment.life != life:
                self.void(segment, life)
            if segment.last != last:
                self._read(segment, committed)

    def _read(self, segment: Segment, committed: int) -> None:
        try:
            while (batch := segment.read(committed)) is not None:
                self.index.add(batch)
        except BaseException:  # a KeyboardInterrupt may have left a batch half taken in
            self.read_again(segment)
            raise

    def read_again(self, segment: Segment) -> None:
        """Forget a segment, so that the next scan reads all of it."""
        self.void(segment, 0)

    def void(self, segment: Segment, life: int) -> None:
        """A new life has begun: forget the old one."""
        self.index.drop(segment)
        segment.begin(life)

    def owned(self, slots: "set[int] | dict[int, int]") -> list[Segment]:
        """The segments of these slots."""
        return [one for (slot, _), one in self.segments.items() if slot in slots]
