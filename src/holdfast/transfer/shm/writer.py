"""Writing: the slots that a process owns, and appending batches to their segments.

A slot belongs to whoever holds the lock on its table. A process takes one at its first put,
the lowest that is free; the kernel frees it when the process ends, however it ends. Taking a
slot that had an owner *adopts* its segments: committed values stay, and what the dead owner
had not committed is wiped, because its number is going to be used again.

Order of a put: frames, dead-bytes, directory, header, row, and last the commit: one word on
the board. Until then nothing has happened; from then on all of it has.

While a segment is open for appending, its owner holds a shared lock on it. So whoever gets the
exclusive lock knows that nobody appends.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from holdfast import faults
from holdfast.errors import NoRoom
from holdfast.transfer.shm.catalog import Catalog
from holdfast.transfer.shm.layout import HEADER, Header, Ints, make_header, starts
from holdfast.transfer.shm.locks import Locks
from holdfast.transfer.shm.segment import Batch, Segment
from holdfast.transfer.shm.tables import SLOTS, Table

__all__ = ["Draft", "Writer"]

TAKEN = faults.declare("shm.adopt.locked", "a slot is taken, its segments are not looked at yet")
WIPED = faults.declare("shm.adopt.wiped", "what its last owner had not committed is wiped")
FRAMES = faults.declare("shm.put.frames", "the frames are in the segment, and nothing says so")
DIRECTORY = faults.declare("shm.put.directory", "the directory is there, the header is not")
HEADED = faults.declare("shm.put.headed", "the batch is whole, but not committed")
ROW = faults.declare("shm.put.row", "the row tells of the batch, which is not committed")
COMMITTED = faults.declare("shm.put.committed", "committed; replaced values are not buried")


@dataclass(slots=True)
class Draft:
    """A batch whose frames are in their places, and that is not committed."""

    segment: Segment
    keys: list[str]
    sizes: Ints
    directory: bytes
    generation: int
    stamp: int
    versions: tuple[Ints, Ints] | None
    starts: Ints = field(init=False)
    total: int = field(init=False)
    dead_at: int = field(init=False)

    def __post_init__(self) -> None:
        segment = self.segment
        self.starts = starts(segment.end, len(self.directory), self.sizes)
        self.total = int(self.starts[-1]) - segment.end
        self.dead_at = segment.low - len(self.keys)
        if segment.end + self.total > self.dead_at:
            raise AssertionError(f"{segment.name}: a batch does not fit: {self.total} bytes")


class Writer:
    """What a process owns of a store. Used under the mutex of its session."""

    def __init__(self, catalog: Catalog, locks: Locks) -> None:
        self._catalog = catalog
        self._locks = locks
        self.slots: dict[int, int] = {}
        self.open: Segment | None = None
        self._open_lock = -1
        self._dirty: Segment | None = None
        self._stamp = 0

    # Slots

    def begin(self) -> None:
        """Own a slot, if that is not so yet."""
        if self.slots:
            self._recover()
            return
        for slot in range(SLOTS):
            if self.take(slot):
                return
        raise NoRoom(f"{self._catalog.folder}: all {SLOTS} slots have a living writer")

    def take(self, slot: int) -> bool:
        """Own this slot and its segments, unless somebody lives who does."""
        fd = self._locks.take(f"w{slot}", exclusive=True, create=True)
        if fd is None:
            return False
        try:
            faults.point(TAKEN)
            self._adopt(slot)
        except BaseException:
            self._locks.drop(fd)
            raise
        self.slots[slot] = fd
        return True

    def _adopt(self, slot: int) -> None:
        catalog = self._catalog
        if slot not in catalog.tables:
            catalog.tables[slot] = Table(catalog.folder, slot, create=True)
        table = catalog.tables[slot]
        # A segment that was being made when its owner died, and that nobody knows of.
        (catalog.folder / f"s{slot}-{table.count}").unlink(missing_ok=True)
        catalog.scan(slot, catalog.board[slot])
        for segment in catalog.owned({slot}):
            self._wipe(segment)
        faults.point(WIPED)

    def _wipe(self, segment: Segment) -> None:
        """Let nothing that looks like a batch lie behind the last one that is committed."""
        if segment.end + HEADER <= segment.low and segment.memory[segment.end]:
            segment.memory[segment.end : segment.end + HEADER] = 0
        table, number = segment.table, segment.number
        torn = table.last(number) > self._catalog.board[segment.slot]
        if segment.batches or torn:  # without both it was given back, and keeps its number
            table.set_last(number, segment.last)

    def _recover(self) -> None:
        """After a put that was interrupted: was it committed or not? Its number is at stake."""
        if self._dirty is not None:
            self._catalog.read_again(self._dirty)
            self._catalog.scan(self._dirty.slot, self._catalog.board[self._dirty.slot])
            self._wipe(self._dirty)
            self._dirty = None

    # Segments

    def append_to(self, segment: Segment) -> bool:
        """Open a segment of ours for appending, unless somebody is about to empty it."""
        self.close_segment()
        fd = self._locks.take(segment.name, exclusive=False)
        if fd is None:
            return False
        if not segment.whole() or segment.table.life(segment.number) != segment.life:
            self._locks.drop(fd)
            return False
        self.open, self._open_lock = segment, fd
        segment.warm()
        return True

    def close_segment(self) -> None:
        """Append to no segment."""
        if self.open is not None:
            self._locks.drop(self._open_lock)
            self.open = None

    # Batches

    def stamp(self) -> int:
        """A time that no earlier put of this process has."""
        self._stamp = max(self._stamp + 1, time.time_ns())
        return self._stamp

    def fill(self, draft: Draft, write: Callable[[npt.NDArray[np.uint8], Ints], None]) -> None:
        """Write the frames, which nobody sees. Needs no mutex."""
        write(draft.segment.memory, draft.starts)
        faults.point(FRAMES)

    def commit(self, draft: Draft) -> Batch:
        """Make a batch true."""
        segment, board, slot = draft.segment, self._catalog.board, draft.segment.slot
        memory, at = segment.memory, segment.end
        self._dirty = segment
        memory[draft.dead_at : segment.low] = 0
        body = np.frombuffer(draft.directory, np.uint8)
        memory[at + HEADER : at + HEADER + len(body)] = body
        faults.point(DIRECTORY)
        header = Header(
            life=segment.life,
            seq=board[slot] + 1,
            at=at,
            slot=slot,
            segment=segment.number,
            count=len(draft.keys),
            directory=len(body),
            total=draft.total,
            dead_at=draft.dead_at,
            generation=draft.generation,
            stamp=draft.stamp,
            directory_sum=xxh3_64_intdigest(draft.directory),
        )
        memory[at : at + HEADER] = np.frombuffer(make_header(header), np.uint8)
        faults.point(HEADED)
        segment.table.set_last(segment.number, header.seq)
        faults.point(ROW)
        board.commit(slot, header.seq)
        batch = Batch(segment, header, draft.keys, draft.sizes, draft.versions)
        segment.append(batch, header)
        self._catalog.index.add(batch)
        self._dirty = None
        faults.point(COMMITTED)
        return batch
