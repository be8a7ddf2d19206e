"""Where large contents lie: files that grow at their end, one folder per term.

    <folder>/journal/t<term>/<segment>.seg

- Only the process that holds the term writes below its folder, so a process that was stopped
  and wakes up spoils nothing of its successor's. A place exists once a transaction that
  compares the seat has recorded it; bytes that nobody recorded are never read.
- What is read is compared with its hash: torn or damaged bytes are `Corrupt`, never returned.
- Segments that no record refers to are removed: `sweep`.
"""

import contextlib
import os
import re
import shutil
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import xxhash

from holdfast import faults
from holdfast.errors import Corrupt, NoRoom
from holdfast.trainer.records import Content, Place

__all__ = ["INLINE_BYTES", "FileSegments", "Segments", "content_of", "read_content"]

INLINE_BYTES = 2 << 10
"""Contents up to this size lie in the ledger itself."""
SEGMENT_BYTES = 64 << 20
_FOLDER = re.compile(r"t([0-9]{1,12})")
_FILE = re.compile(r"([0-9]{1,12})\.seg")

WRITTEN = faults.declare("trainer.segment.written", "a content is in its file, in no record")


class Segments(Protocol):
    """What the journal needs of a place for large contents."""

    def append(self, data: bytes) -> Place:
        """Write some bytes; they last when this returns."""

    def read(self, place: Place) -> bytes:
        """The bytes that were written there, or `Corrupt`."""

    def sweep(self, needed: Iterable[Place]) -> int:
        """Remove segments of which nothing is needed; returns how many bytes that freed."""


def content_of(data: bytes, segments: Segments) -> Content:
    """Keep some bytes: here if they are few, elsewhere if they are many."""
    if len(data) <= INLINE_BYTES:
        return Content(inline=data)
    return Content(place=segments.append(data))


def read_content(content: Content, segments: Segments) -> bytes:
    """The bytes that `content_of` kept."""
    if content.inline is not None:
        return content.inline
    if content.place is None:
        raise Corrupt("a record of the journal has no content")
    return segments.read(content.place)


class FileSegments:
    """Segments as files. Its calls block, shortly."""

    def __init__(self, folder: Path, term: int, *, sync: bool = False) -> None:
        self._folder = folder / "journal"
        self._term = term
        self._sync = sync
        self._segment = 0
        self._length = 0
        self._fd = -1
        self._lock = threading.Lock()

    def append(self, data: bytes) -> Place:
        """Write at the end of our newest segment."""
        with self._lock:
            if self._fd < 0 or self._length >= SEGMENT_BYTES:
                self._next()
            place = Place(
                self._term,
                self._segment,
                self._length,
                len(data),
                xxhash.xxh3_128_hexdigest(data),
            )
            try:
                _write_all(self._fd, data)
                if self._sync:
                    os.fdatasync(self._fd)
            except OSError as error:
                # What was written of it lies beyond any recorded place.
                self._close()
                raise NoRoom(f"the journal cannot grow in {self._folder}: {error}") from error
            self._length += len(data)
        faults.point(WRITTEN)
        return place

    def _next(self) -> None:
        self._close()
        folder = self._folder / f"t{self._term}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._segment += 1
            path = folder / f"{self._segment}.seg"
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise NoRoom(f"the journal cannot be kept in {folder}: {error}") from error
        self._length = 0

    def read(self, place: Place) -> bytes:
        """Read, and compare."""
        path = self._path(place.term, place.segment)
        try:
            with path.open("rb") as file:
                file.seek(place.offset)
                data = file.read(place.length)
        except FileNotFoundError:
            raise Corrupt(
                f"{path} is missing, and the journal needs it: is the trainer's folder the one "
                "that its job was begun in?"
            ) from None
        if len(data) != place.length or xxhash.xxh3_128_hexdigest(data) != place.hash:
            raise Corrupt(f"{path} does not hold what was written there (at {place.offset})")
        return data

    def sweep(self, needed: Iterable[Place]) -> int:
        """Remove what nobody refers to, of this term and of those before it."""
        keep = {(place.term, place.segment) for place in needed}
        freed = 0
        with self._lock:
            writing = (self._term, self._segment) if self._fd >= 0 else None
            for folder in _list(self._folder):
                term = _FOLDER.fullmatch(folder.name)
                if term is None or int(term[1]) > self._term:
                    continue
                left = 0
                for path in _list(folder):
                    name = _FILE.fullmatch(path.name)
                    which = (int(term[1]), int(name[1]) if name else 0)
                    if name is None or which in keep or which == writing:
                        left += 1
                        continue
                    with contextlib.suppress(OSError):
                        freed += path.stat().st_size
                        path.unlink()
                if not left and int(term[1]) != self._term:
                    shutil.rmtree(folder, ignore_errors=True)
        return freed

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _path(self, term: int, segment: int) -> Path:
        return self._folder / f"t{term}" / f"{segment}.seg"


def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _list(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
