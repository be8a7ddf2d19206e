"""The board and the tables: what every process looks at to see what is there.

The *board* is one page with a word for each slot: the number of the slot's last committed
batch. Storing that word *is* the commit; there is no moment at which some processes see a
value as put and others do not. The *table* of a slot has a row for each of its segments:

    life    which filling this is; one more makes everything from before void, at once
    last    number of the newest batch in it: tells readers where to look. A hint
    size    bytes that may be used

Words are stored and read whole (eight bytes, aligned). Each has one writer: who holds the lock
of the slot. What was stored before a commit is seen by whoever sees the commit (`_fence`).
"""

import mmap
import os
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt

from holdfast.errors import Corrupt, NoRoom
from holdfast.transfer.shm.layout import PAGE

__all__ = ["ROWS", "SLOTS", "Board", "Table"]

SLOTS = PAGE // 8
ROWS = 1023
_WORDS = 4
_LIFE, _LAST, _SIZE = range(3)
_TABLE_BYTES = (ROWS + 1) * _WORDS * 8
_MAGIC = int.from_bytes(b"HFtable1", "little")

_fences = threading.local()


def _fence() -> None:
    """Keep what is stored or read before this before what comes after it.

    On x86 the processor does so by itself; elsewhere giving a lock back and taking it does.
    """
    try:
        lock = _fences.lock
    except AttributeError:
        lock = _fences.lock = threading.Lock()
    for _ in range(2):
        with lock:
            pass


def _map(path: str, size: int, create: bool) -> mmap.mmap:
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
    fd = os.open(path, flags, 0o600)
    try:
        if create:
            try:
                os.posix_fallocate(fd, 0, size)  # memory that is missing later is a SIGBUS
            except OSError as error:
                raise NoRoom(f"{path}: {error.strerror}") from error
        if os.fstat(fd).st_size < size:
            raise Corrupt(f"{path} has been cut short")
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)


class Board:
    """The page that says how far each slot has committed."""

    def __init__(self, folder: Path) -> None:
        self._map = _map(f"{folder}/board", PAGE, create=True)
        self._words = memoryview(self._map).cast("Q")

    def copy(self) -> bytes:
        """All words, to be compared with those of before."""
        words = self._map[:]
        _fence()
        return words

    def __getitem__(self, slot: int) -> int:
        return self._words[slot]

    def commit(self, slot: int, seq: int) -> None:
        """Make every batch of the slot up to this number true."""
        _fence()
        self._words[slot] = seq
        _fence()


class Table:
    """The rows of a slot."""

    def __init__(self, folder: Path, slot: int, *, create: bool = False) -> None:
        self.slot = slot
        self._map = _map(f"{folder}/w{slot}", _TABLE_BYTES, create=create)
        self._words = memoryview(self._map).cast("Q")
        self._rows = np.frombuffer(self._map, np.int64).reshape(ROWS + 1, _WORDS)[1:]
        if create and not self._words[0]:
            self._words[0] = _MAGIC
        if self._words[0] != _MAGIC:
            raise Corrupt(f"{folder}/w{slot} is not a table of Holdfast")

    @property
    def count(self) -> int:
        """How many segments there are."""
        return min(self._words[1], ROWS)

    def add(self, size: int) -> int:
        """Add a segment; returns its number."""
        number = self.count
        at = (number + 1) * _WORDS
        self._words[at + _SIZE] = size
        self._words[at + _LAST] = 0
        self._words[at + _LIFE] = 1
        self._words[1] = number + 1
        return number

    def rows(self) -> npt.NDArray[np.int64]:
        """A copy of (life, last) of all segments."""
        return self._rows[: self.count, :2].copy()

    def life(self, number: int) -> int:
        """Which filling of the segment is the current one."""
        return self._words[(number + 1) * _WORDS + _LIFE]

    def last(self, number: int) -> int:
        """The newest batch of the segment, or one that never was committed."""
        return self._words[(number + 1) * _WORDS + _LAST]

    def size(self, number: int) -> int:
        """The bytes of the segment that may be used."""
        return self._words[(number + 1) * _WORDS + _SIZE]

    def set_last(self, number: int, seq: int) -> None:
        """Tell where the newest batch is."""
        self._words[(number + 1) * _WORDS + _LAST] = seq

    def set_size(self, number: int, size: int) -> None:
        """Change how much may be used: only between two lives."""
        self._words[(number + 1) * _WORDS + _SIZE] = size

    def next_life(self, number: int) -> None:
        """Make everything in the segment void."""
        at = (number + 1) * _WORDS
        self._words[at + _LAST] = 0
        self._words[at + _LIFE] += 1
