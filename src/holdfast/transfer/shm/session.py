"""A session: a store as one process has it open, with everything that a fork must not share.

`mutex` guards the picture of the store, `writing` makes one put at a time; whoever needs both
takes `writing` first. Frames are copied in without `mutex`, so that a large put does not hold
up the gets of other threads.
"""

import os
import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from holdfast import faults
from holdfast.errors import Corrupt, Gone, NoRoom, TooLarge
from holdfast.transfer.backend import Bytes, Frame
from holdfast.transfer.frame import ALIGN
from holdfast.transfer.rows import RowFrames
from holdfast.transfer.shm import burial
from holdfast.transfer.shm.catalog import Catalog
from holdfast.transfer.shm.folder import open_folder
from holdfast.transfer.shm.layout import MAX_BATCH, OVERHEAD, Ints, costs, make_directory
from holdfast.transfer.shm.room import Room
from holdfast.transfer.shm.segment import Batch
from holdfast.transfer.shm.writer import Draft, Writer

__all__ = ["Found", "Session"]

REPLACED = faults.declare("shm.put.replaced", "what was replaced is buried; not answered yet")

SMALL = 16 << 10
"""Frames up to here, on average, are joined before they are copied in."""
_JOIN = 1 << 20
_REFUSALS = 8
_ROUNDS = 100
_PADS = [bytes(size) for size in range(ALIGN)]

Found = tuple[Batch, Ints, Ints]
"""Values of one batch: their positions in it, and in what was asked for."""


class Session:
    """A store that is open in this process."""

    def __init__(self, name: str, segment: int | None, budget: int | None, limit_s: float) -> None:
        self.mutex = threading.RLock()
        self.viewing: set[int] = set()
        """The locks of the views that are open."""
        self.writing = threading.RLock()
        self.folder, self.locks, self.config = open_folder(name, segment, budget, limit_s)
        try:
            self.catalog = Catalog(self.folder)
            self._board = f"{self.folder}/board"
            self._inode = Path(self._board).stat().st_ino
        except BaseException:
            self.locks.abandon()
            raise
        self.writer = Writer(self.catalog, self.locks)
        self.room = Room(self.catalog, self.locks, self.writer, self.config)

    def check(self) -> None:
        """Raise `Gone` when the store was removed under this session."""
        try:
            if os.stat(self._board).st_ino == self._inode:  # noqa: PTH116 -- for every call
                return
        except FileNotFoundError:
            pass
        raise Gone(
            f"{self.folder}: the store was removed while this process had it open, and its "
            "values with it (`holdfast transfer rm --force`?): connect again"
        )

    # Reading

    def look_up(self, keys: list[str]) -> tuple[list[Found], list[int]]:
        """What is there under these keys, and under which of them nothing is."""
        with self.mutex:
            self.catalog.refresh()
            if not self.writer.slots:
                self.catalog.index.losers.clear()  # writers see to them
            found, absent = self.catalog.index.look_up(keys)
            missing = []
            for which in absent:
                batch, position = self._settle(keys[which])
                if batch is None:
                    missing.append(which)
                else:
                    found.append((batch, np.array([position]), np.array([which])))
            return found, missing

    def _settle(self, key: str) -> tuple[Batch | None, int]:
        """What is there under a key, looked at again as long as it moves about."""
        index = self.catalog.index
        for _ in range(_ROUNDS):
            changed = self.catalog.refresh()
            name = index.settle(key)
            if name is not None:
                return index.place(name)
            if not changed:
                break
        return None, 0

    # Writing

    def put(self, frames: Mapping[str, Frame]) -> dict[str, Exception | None]:
        """Store frames, in as many batches as it takes."""
        answer: dict[str, Exception | None] = dict.fromkeys(frames)
        items = RowItems(frames) if isinstance(frames, RowFrames) else FrameItems(frames)
        keys, sizes = list(frames), items.sizes
        each = costs(keys, sizes, True)
        ends = np.cumsum(each)
        at, refusals, too_much = 0, 0, 1 << 62
        with self.writing:
            while at < len(keys):
                cost = int(each[at])
                if cost >= too_much or refusals == _REFUSALS:
                    answer[keys[at]] = NoRoom(f"no room for its {sizes[at]} bytes")
                    at += 1
                    continue
                try:
                    at = self._put_some(keys, items, sizes, ends, at)
                except (NoRoom, TooLarge) as error:
                    answer[keys[at]] = type(error)(str(error))  # one without a traceback
                    too_much, refusals, at = min(too_much, cost), refusals + 1, at + 1
            with self.mutex:
                self.catalog.refresh()
                losers, self.catalog.index.losers = self.catalog.index.losers, []
                burial.bury_losers(self.catalog, self.locks, losers)
            faults.point(REPLACED)
        return answer

    def _put_some(
        self, keys: list[str], items: "FrameItems | RowItems", sizes: Ints, ends: Ints, at: int
    ) -> int:
        """Put as many values, from the one at `at` on, as one segment has room for."""
        before = int(ends[at - 1]) if at else 0
        with self.mutex:
            self.writer.begin()
            segment = self.room.find(OVERHEAD + int(ends[at]) - before)
            limit = before + segment.free() - OVERHEAD
            to = min(int(np.searchsorted(ends, limit, side="right")), at + MAX_BATCH)
            names, lengths = keys[at:to], sizes[at:to]
            generations = items.generations[at:to]
            generation, stamp = int(generations[0]), self.writer.stamp()
            versions = None
            if (generations != generation).any():
                generation, versions = 0, (generations, np.full(to - at, stamp))
            directory = make_directory(names, lengths, versions)
            draft = Draft(segment, names, lengths, directory, generation, stamp, versions)
        self.writer.fill(draft, lambda memory, starts: items.copy_in(memory, starts, at, to))
        with self.mutex:
            self.writer.commit(draft)
        return to

    def trim(self) -> int:
        """Give back memory that has been empty since the last time. Returns the bytes."""
        with self.writing, self.mutex:
            return self.room.trim()

    def close(self) -> None:
        """Let go of empty memory and of all locks. Maps go when nobody uses them any more."""
        with self.writing, self.mutex:
            self.writer.close_segment()
            try:
                if self.catalog.segments:  # otherwise this session has never looked
                    self.room.trim(ending=True)
            except (OSError, Corrupt):
                pass  # the store was removed, or is broken: there is nothing to save
            finally:
                self.locks.abandon(keep=self.viewing)


class FrameItems:
    """Frames that lie anywhere."""

    def __init__(self, frames: Mapping[str, Frame]) -> None:
        self._frames = list(frames.values())
        refs = [one.ref for one in self._frames]
        self.sizes: Ints = np.fromiter((ref.nbytes for ref in refs), np.int64, len(refs))
        self.generations: Ints = np.fromiter((ref.generation for ref in refs), np.int64, len(refs))

    def copy_in(self, memory: Bytes, starts: Ints, at: int, to: int) -> None:
        """Copy some of them to where they belong."""
        copy_in(memory, starts, self._frames[at:to])


class RowItems:
    """Frames that are the rows of a matrix, one behind the other as they are to lie."""

    def __init__(self, frames: RowFrames) -> None:
        self._block = frames.block
        self.sizes: Ints = np.full(len(frames), frames.size, np.int64)
        self.generations: Ints = np.full(len(frames), frames.generation, np.int64)

    def copy_in(self, memory: Bytes, starts: Ints, at: int, to: int) -> None:
        """Copy some of them to where they belong."""
        memory[starts[0] : starts[-1]].reshape(to - at, -1)[:] = self._block[at:to]


def copy_in(memory: Bytes, starts: Ints, frames: list[Frame]) -> None:
    """Copy frames to where they belong."""
    places = starts.tolist()
    if places[-1] - places[0] <= SMALL * len(frames):
        _join_in(memory, places, frames)
        return
    for place, frame in zip(places, frames, strict=False):
        at = place
        for part in (frame.head, *frame.parts):
            data = np.frombuffer(part, np.uint8)
            memory[at : at + len(data)] = data
            at += len(data)


def _join_in(memory: Bytes, places: list[int], frames: list[Frame]) -> None:
    """Copy many small frames, some at a time as one piece."""
    parts: list[bytes | bytearray | memoryview] = []
    begin = places[0]
    for at, frame in enumerate(frames):
        parts.append(frame.head)
        parts += frame.parts
        rest = -frame.ref.nbytes % ALIGN
        if rest:
            parts.append(_PADS[rest])
        end = places[at + 1]
        if end - begin >= _JOIN or at + 1 == len(frames):
            memory[begin:end] = np.frombuffer(b"".join(parts), np.uint8)
            parts.clear()
            begin = end
