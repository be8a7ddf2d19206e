"""Segments as one process sees them: a mapped file, and the batches that were read from it.

Invariant: whatever is read may change under the reader, because its owner may begin a new
life at any moment that nobody holds a lock. So a batch is copied before it is checked, and
its life is looked at again afterwards; `Batch.void` is asked before anything is answered.
"""

import mmap
import os
from dataclasses import InitVar, dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from holdfast.errors import Corrupt
from holdfast.transfer.shm.layout import HEADER, Header, Ints, read_directory, read_header, starts
from holdfast.transfer.shm.tables import Table

__all__ = ["Batch", "Segment"]


@dataclass(slots=True, eq=False)
class Batch:
    """A committed batch: where its values are, and which of them are dead."""

    segment: "Segment"
    header: InitVar[Header]
    keys: list[str]
    sizes: Ints
    versions: tuple[Ints, Ints] | None
    number: int = field(init=False, default=0)
    """Given by the index."""
    life: int = field(init=False)
    count: int = field(init=False)
    dead_at: int = field(init=False)
    generation: int = field(init=False)
    stamp: int = field(init=False)
    starts: Ints = field(init=False)

    def __post_init__(self, header: Header) -> None:
        self.life, self.count, self.dead_at = header.life, header.count, header.dead_at
        self.generation, self.stamp = header.generation, header.stamp
        self.starts = starts(header.at, header.directory, self.sizes)

    def void(self) -> bool:
        """Whether the segment has been filled anew since."""
        return self.segment.table.life(self.segment.number) != self.life

    def dead(self) -> npt.NDArray[np.uint8]:
        """The dead-bytes, where they lie: writing a 1 kills a value."""
        return self.segment.memory[self.dead_at : self.dead_at + self.count]

    def version(self, position: int) -> tuple[int, int]:
        """Generation and stamp of a value."""
        if self.versions is None:
            return self.generation, self.stamp
        return int(self.versions[0][position]), int(self.versions[1][position])

    def newest(self) -> int:
        """The highest generation in it."""
        return self.generation if self.versions is None else int(self.versions[0].max())

    def all_versions(self) -> tuple[Ints, Ints]:
        """Generations and stamps of all values."""
        if self.versions is not None:
            return self.versions
        return np.full(self.count, self.generation), np.full(self.count, self.stamp)

    def generations(self, positions: Ints) -> Ints:
        """The generations of some values."""
        if self.versions is None:
            return np.full(len(positions), self.generation, np.int64)
        return self.versions[0][positions]


class Segment:
    """A segment of any slot."""

    def __init__(self, folder: Path, table: Table, number: int) -> None:
        self.table = table
        self.slot = table.slot
        self.number = number
        self.name = f"s{table.slot}-{number}"
        self.path = folder / self.name
        self.life = 0
        self.last = 0
        """Number of the last batch that was read."""
        self.end = 0
        """Where the next batch begins."""
        self.low = 0
        """Where the dead-bytes begin, if there are any."""
        self.batches: list[Batch] = []
        self._warm = 0
        self.memory: npt.NDArray[np.uint8]
        self.view: memoryview
        self.map()

    def warm(self) -> None:
        """Map what may be used of it with all its pages, so that writing meets no fault."""
        size = self.table.size(self.number)
        if self._warm < size:
            self.map(size)
            self._warm = size

    def map(self, size: int = 0) -> None:
        """Map the file, or so much of it, with all its pages at once.

        Mapped again when it has grown. Maps that are in use stay until they are not.
        """
        self._warm = 0
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if size else 0)
            self._map = mmap.mmap(fd, size, flags)
        finally:
            os.close(fd)
        self.memory = np.frombuffer(self._map, np.uint8)
        self.view = memoryview(self._map).toreadonly()

    def begin(self, life: int) -> None:
        """Forget what was read of an earlier life."""
        self.life = life  # 0: to be read again
        self.last = self.end = 0
        self.low = self.table.size(self.number)
        self.batches = []

    def read(self, committed: int) -> Batch | None:
        """The next batch, if it is committed and still there."""
        data = self._bytes(self.end, HEADER)
        header = None if data is None else read_header(data)
        if (
            header is None
            or (header.life, header.at) != (self.life, self.end)
            or (header.slot, header.segment) != (self.slot, self.number)
            or not self.last < header.seq <= committed
        ):
            return None
        data = self._bytes(self.end + HEADER, header.directory)
        if data is None or self._bytes(header.dead_at + header.count - 1, 1) is None:
            return None
        found = read_directory(header, data)
        if found is None or self.table.life(self.number) != self.life:
            return None  # filled anew while we read
        batch = Batch(self, header, *found)
        self.append(batch, header)
        return batch

    def append(self, batch: Batch, header: Header) -> None:
        """Count a batch in."""
        self.batches.append(batch)
        self.last = header.seq
        self.end += header.total
        self.low = header.dead_at

    def _bytes(self, at: int, size: int) -> bytes | None:
        if at + size > len(self._map):
            if at + size > self.path.stat().st_size:
                return None
            self.map()
        return self._map[at : at + size]

    def free(self) -> int:
        """Bytes between the last batch and the dead-bytes."""
        return self.low - self.end

    def living(self) -> int:
        """How many values are not dead, of those that were read."""
        if not self.batches or self.table.life(self.number) != self.life:
            return 0  # reading memory that was given back would take it again
        top = self.batches[0].dead_at + self.batches[0].count
        return top - self.low - int(np.count_nonzero(self.memory[self.low : top]))

    def living_bytes(self) -> int:
        """What they take."""
        if not self.living():
            return 0
        return sum(int(one.sizes[one.dead() == 0].sum()) for one in self.batches)

    def taken(self) -> int:
        """Bytes of memory behind the file."""
        return self.path.stat().st_blocks * 512

    def whole(self) -> bool:
        """Whether there is memory behind every byte, and the batches that should be there."""
        if self.batches and read_header(self._map[:HEADER]) is None:
            return False
        expected = self.table.last(self.number)
        return self.taken() >= self.table.size(self.number) and expected in (0, self.last)

    def give_back(self, start: int, end: int) -> int:
        """Free the memory behind a range of whole pages; it reads as zeros from then on."""
        before = self.taken()
        end = min(end, len(self._map))
        if end > start:
            try:
                self._map.madvise(mmap.MADV_REMOVE, start, end - start)
            except OSError as error:
                raise Corrupt(f"{self.path}: memory cannot be given back: {error}") from error
        return before - self.taken()
