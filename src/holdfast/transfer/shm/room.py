"""Room for a batch: the cheapest that there is, within the budget.

In this order: the rest of a segment of ours; a segment of ours in which nothing lives, filled
anew while it is warm; a new segment, as long as the budget allows; the segments of dead owners;
memory of segments in which nothing lives, whoever owns them, given back to the system; and at
last compaction. Then there is none: `NoRoom`.

Empty segments stay warm only while there is work: `trim` gives back those of dead owners and
of this session when it ends, and anybody's that was empty at one `trim` and is untouched at
the next.

Files are never cut or removed, because others may have them mapped: the memory behind them
is given back, and reads as zeros from then on. The budget counts memory, not file sizes.

A new life begins, memory is given back and values are moved only under the exclusive lock
of the segment: not while a view lasts, a delete is under way, or its owner appends.

One segment of the budget is kept back for compaction, which needs somewhere to move to.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast import faults
from holdfast.errors import NoRoom, TooLarge
from holdfast.transfer.shm import burial
from holdfast.transfer.shm.catalog import Catalog
from holdfast.transfer.shm.compaction import mostly_dead, move
from holdfast.transfer.shm.folder import Config, is_segment
from holdfast.transfer.shm.layout import PAGE, page_up
from holdfast.transfer.shm.locks import Locks
from holdfast.transfer.shm.segment import Segment
from holdfast.transfer.shm.tables import ROWS
from holdfast.transfer.shm.writer import Writer

__all__ = ["Room"]

REUSE = faults.declare("shm.reuse.locked", "a segment is about to be filled anew")
REUSED = faults.declare("shm.reuse.life", "its new life has begun, nothing is in it")
CREATED = faults.declare("shm.grow.created", "the file of a new segment is there, empty")
ALLOCATED = faults.declare("shm.grow.allocated", "it has its memory; no row tells of it")
GROWN = faults.declare("shm.grow.row", "the row is there")
RELEASE = faults.declare("shm.release.locked", "memory of an empty segment is about to be freed")
RELEASED = faults.declare("shm.release.done", "it is freed")

_BUDGET = "budget.lock"
_COMPACT = "compact.lock"


class Room:
    """Finds room. Used under the mutexes of its session."""

    def __init__(self, catalog: Catalog, locks: Locks, writer: Writer, config: Config) -> None:
        self._catalog = catalog
        self._locks = locks
        self._writer = writer
        self._segment = config.segment + max(page_up(config.segment // 256), PAGE)
        self._budget = config.budget
        self._reserve = self._segment if config.budget >= 4 * self._segment else 0
        self._busy: set[str] = set()
        self._refused = ""
        self._idle: dict[str, tuple[int, int]] = {}
        """Segments that were empty at the last `trim`, with their life and newest batch."""

    def find(self, need: int) -> Segment:
        """A segment that is open and has at least `need` free bytes."""
        if page_up(need) > self._budget - self._reserve:
            raise TooLarge(
                f"{self._catalog.folder}: a value of {need} bytes can never fit: the budget is "
                f"{self._budget} bytes, {self._reserve} of them for compaction"
            )
        is_open = self._writer.open
        if is_open is not None and is_open.free() >= need and is_open.life > 0:
            return is_open
        self._writer.close_segment()
        self._busy, self._refused = set(), ""
        return (
            self._own(need)
            or self._grow(need)
            or self._cleared(need)
            or self._adopted(need)
            or self._released(need)
            or self._compacted(need)
            or self._none(need)
        )

    # What is ours

    def _own(self, need: int) -> Segment | None:
        """The rest of one of our segments, or one in which nothing lives."""
        mine = self._catalog.owned(self._writer.slots)
        for one in mine:
            if one.batches and one.free() >= need and one.living() and self._writer.append_to(one):
                return one
        for one in mine:
            if one.living() or not self._suits(one, need):
                continue
            if self.taken() > self._budget - self._reserve:
                self._release(one)  # compaction has used what is kept back for it
            elif self._anew(one):
                return one
        return None

    def _suits(self, segment: Segment, need: int) -> bool:
        """Whether it should be filled anew for this: pieces of equal size waste the least.

        The memory of others is given back when it is short, and taken in the usual size.
        """
        size = segment.table.size(segment.number)
        if need > self._segment:
            return need <= size <= need * 5 // 4
        return size == self._segment or (not self._reserve and need <= size < self._segment)

    def _anew(self, segment: Segment, size: int = 0) -> bool:
        """Begin a new life of a segment of ours and open it; with a size, give it memory."""
        with self._exclusive(segment) as alone:
            if not alone:
                return False
            faults.point(REUSE)
            table, number = segment.table, segment.number
            if segment.living() or (not size and segment.taken() < table.size(number)):
                return False
            table.next_life(number)
            faults.point(REUSED)
            self._catalog.void(segment, table.life(number))
            if size:
                segment.map()
                segment.give_back(0, segment.path.stat().st_size)
                table.set_size(number, size)
                if not self._allocate(segment.path, size):
                    return False
                segment.begin(segment.life)
                segment.map()
        return self._writer.append_to(segment)

    # Growing

    def taken(self) -> int:
        """Bytes of memory behind all segments."""
        with os.scandir(self._catalog.folder) as found:
            return sum(one.stat().st_blocks * 512 for one in found if is_segment(one.name))

    def _grow(self, need: int, *, smaller: bool = False, reserve: bool = False) -> Segment | None:
        """A new segment, or a new one in place of one whose memory was given back.

        It may be `smaller` than usual, and made of what is kept back (`reserve`).
        """
        kept = 0 if reserve else self._reserve
        size = max(self._segment, page_up(need))
        with self._locks.held(_BUDGET, exclusive=True, create=True):
            left = (self._budget - kept - self.taken()) // PAGE * PAGE
            if smaller and left < size == self._segment:
                size = left
            if left < size or size < need or size < PAGE:
                return None
            for one in self._catalog.owned(self._writer.slots):
                gone = not one.living() and one.taken() < one.table.size(one.number)
                if gone and self._anew(one, size):
                    return one
            for slot in self._writer.slots:
                table = self._catalog.tables[slot]
                if table.count < ROWS:
                    path = self._catalog.folder / f"s{slot}-{table.count}"
                    if not self._allocate(path, size):
                        return None
                    faults.point(ALLOCATED)
                    table.add(size)
                    faults.point(GROWN)
                    break
            else:
                return None
        self._catalog.scan(slot, self._catalog.board[slot])
        segment = self._catalog.segments[slot, table.count - 1]
        return segment if self._writer.append_to(segment) else None

    def _allocate(self, path: Path, size: int) -> bool:
        """Put memory behind a file. Later, what is missing would be a SIGBUS."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(path, flags, 0o600)
        try:
            faults.point(CREATED)
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            self._refused = f". The system refused {size} bytes ({error.strerror}): see /dev/shm"
            return False
        finally:
            os.close(fd)
        return True

    # What others leave

    def _cleared(self, need: int) -> Segment | None:
        """Bury everything that was replaced, and look again."""
        catalog = self._catalog
        catalog.refresh()
        for key in list(catalog.index.older):
            catalog.index.settle(key)
        burial.bury_losers(catalog, self._locks, burial.all_losers(catalog))
        burial.part_twins(catalog, self._locks)
        return self._own(need)

    def _adopted(self, need: int) -> Segment | None:
        """Take the slots of the dead."""
        more = False
        with os.scandir(self._catalog.folder) as found:
            slots = [int(one.name[1:]) for one in found if one.name[0] == "w"]
        for slot in sorted(set(slots) - set(self._writer.slots)):
            more |= self._writer.take(slot)
        return (self._own(need) or self._grow(need)) if more else None

    def _released(self, need: int) -> Segment | None:
        """Give back memory in which nothing lives, until there is room for a new segment."""
        wanted = max(self._segment, page_up(need))
        for one in list(self._catalog.segments.values()):
            if one.living() or one.taken() <= 2 * PAGE:
                continue
            wanted -= self._release(one)
            if wanted <= 0:
                break
        return self._grow(need) or self._grow(need, smaller=True)

    def _release(self, segment: Segment) -> int:
        with self._exclusive(segment) as alone:
            if not alone:
                return 0
            faults.point(RELEASE)
            # Its owner may have put something here since we last looked. Now nobody can.
            self._catalog.refresh()
            if segment.table.life(segment.number) != segment.life or segment.living():
                return 0
            # The dead-bytes stay: readers who still know these values must see them dead. Where
            # they begin is known to those who have read every batch.
            table, number = segment.table, segment.number
            if table.last(number) > self._catalog.board[segment.slot]:
                table.set_last(number, segment.last)  # its writer died before it was committed
            if segment.last != table.last(number):
                return 0
            freed = segment.give_back(0, segment.low // PAGE * PAGE)
            faults.point(RELEASED)
            return freed

    def trim(self, *, ending: bool = False) -> int:
        """Give back the memory of idle segments, or of all that nobody can want, at the end.

        Returns the bytes. A death at any point loses nothing: only what is dead is touched.
        """
        self._catalog.refresh()
        empty = {
            one: (one.life, one.last)
            for one in self._catalog.segments.values()
            if not one.living() and one.taken() > 2 * PAGE
        }
        if ending:
            ours = {slot: self._is_left(slot) for slot in {one.slot for one in empty}}
            chosen = [one for one in empty if ours[one.slot]]
        else:
            chosen = [one for one, seen in empty.items() if self._idle.get(one.name) == seen]
        self._idle = {one.name: seen for one, seen in empty.items()}
        if self._writer.open in chosen:
            self._writer.close_segment()
        return sum(map(self._release, chosen))

    def _is_left(self, slot: int) -> bool:
        """Whether a slot is ours or has no living owner."""
        if slot in self._writer.slots:
            return True
        with self._locks.held(f"w{slot}", exclusive=True, wait=False) as free:
            return free

    # Compaction

    def _compacted(self, need: int) -> Segment | None:
        """Move what lives in mostly dead segments together."""
        with self._locks.held(_COMPACT, exclusive=True, create=True, wait=False) as alone:
            if not alone:
                raise NoRoom(f"{self._catalog.folder}: another process is making room just now")
            for source in mostly_dead(self._catalog):
                with self._exclusive(source) as ours:
                    if not ours:
                        continue
                    moved = move(self._catalog, self._writer, source, self._place_for)
                self._writer.close_segment()
                if not moved:
                    continue
                mine = source.slot in self._writer.slots
                if not mine or self.taken() > self._budget - self._reserve:
                    self._release(source)
                if found := self._own(need) or self._released(need):
                    return found
            return None

    def _place_for(self, need: int, source: Segment) -> Segment | None:
        """Where the values of `source` can be moved to."""
        for one in self._catalog.owned(self._writer.slots):
            if one is source:
                continue
            if one.living():
                usable = one.free() >= need and self._writer.append_to(one)
            else:
                usable = self._suits(one, need) and self._anew(one)
            if usable:
                return one
        return self._grow(need, smaller=True, reserve=True)

    @contextmanager
    def _exclusive(self, segment: Segment) -> Iterator[bool]:
        with self._locks.held(segment.name, exclusive=True, wait=False) as alone:
            if not alone:
                self._busy.add(segment.name)
            yield alone

    def _none(self, need: int) -> Segment:
        segments = self._catalog.segments.values()
        values = sum(one.living() for one in segments)
        nbytes = sum(one.living_bytes() for one in segments)
        held = ", ".join(sorted(self._busy)[:10])
        raise NoRoom(
            f"{self._catalog.folder}: no room for {need} bytes: {self.taken()} of "
            f"{self._budget} bytes are taken, by {values} living values of {nbytes} bytes"
            + (f"; these segments are in use by a view or a writer: {held}" if held else "")
            + self._refused
            + ". Delete what is no longer needed, or make a store with a larger budget"
        )
