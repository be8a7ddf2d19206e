"""Signs of life from training code, for whoever started it. Costs well under 2 µs.

    from holdfast import progress
    for step in range(steps):
        ...
        progress.beat(step)
        with progress.section("checkpoint", limit_s=600):
            save()

Does nothing where HOLDFAST_BEAT is not set, that is, outside `holdfast launch`. It names a
small file in memory that the launcher reads without a lock.

Invariants: every field is one aligned word, stored at once, so that none is ever read torn; an
even and unchanged `_SEQ` says that fields read together belong together. A writer that is
stopped in the middle of a beat is read all the same, as half of this beat and half of the last.
One thread of a process beats and enters sections; the last beat counts. Nothing here raises
because of the launcher's file: if it cannot be opened, one line says so, and beats go nowhere.

Time is CLOCK_MONOTONIC, the same for all processes of a machine, and does not run while
the machine is suspended. Imports nothing of Holdfast. Not done here: judging (launch.hang).
"""

import contextlib
import mmap
import os
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["SIZE", "VARIABLE", "Beat", "Section", "beat", "read", "section"]

VARIABLE = "HOLDFAST_BEAT"
SIZE = 4096
NO_STEP = -1
MAX_NAME_BYTES = 64

_MAGIC = 0x31_4B_42_48  # its last byte is the version of the layout
_WORDS = 8
_READS = 1000
_MOST_READS = 200_000
(_FORMAT, _SEQ, _STEP, _AT, _COUNT, _LONGEST, _SINCE, _LIMIT) = range(_WORDS)
_NAME = slice(_WORDS * 8, _WORDS * 8 + MAX_NAME_BYTES)


class Section(NamedTuple):
    """A part of the work with a time limit of its own."""

    name: str
    limit_s: float
    since_s: float


class Beat(NamedTuple):
    """The last sign of life. `step` is -1 if none was given; times are monotonic.

    `longest_s` is the longest time between two beats so far, sections not counted.
    """

    step: int
    at_s: float
    beats: int
    longest_s: float
    section: Section | None = None


_now = time.monotonic_ns
_words: "memoryview[int] | None" = None
_bytes: "memoryview[int] | None" = None
_looked = False
_stack: list[tuple[bytes, int, int]] = []  # name, limit, since, of the sections we are in


def beat(step: int = NO_STEP) -> None:
    """Say that the work goes on, and at which step it is."""
    words = _words
    if words is None and (words := _open()) is None:
        return
    now = _now()
    words[_SEQ] += 1
    if (waited := now - words[_AT]) > words[_LONGEST] and words[_COUNT] and not _stack:
        words[_LONGEST] = waited
    words[_STEP] = step
    words[_AT] = now
    words[_COUNT] += 1
    words[_SEQ] += 1


@contextlib.contextmanager
def section(name: str, limit_s: float) -> Iterator[None]:
    """Do something that may take `limit_s`, however often beats come otherwise.

    Sections may be nested: the innermost one counts, and its time is not held against the
    others. Leaving the outermost one is a sign of life.
    """
    if not limit_s > 0:
        raise ValueError(f"the limit of a section is more than 0 seconds, not {limit_s}")
    if _words is None and _open() is None:
        yield
        return
    entered = _now()
    encoded = name.encode("utf-8", "replace")[:MAX_NAME_BYTES]
    _stack.append((encoded, min(int(limit_s * 1e9), (1 << 63) - 1), entered))
    _show()
    try:
        yield
    finally:
        _stack.pop()
        if _stack:
            outer, limit, since = _stack[-1]
            _stack[-1] = (outer, limit, since + _now() - entered)
        _show()


def _show() -> None:
    """Write the innermost section, or none."""
    words, names = _words, _bytes
    if words is None or names is None:
        return
    name, limit, since = _stack[-1] if _stack else (b"", 0, 0)
    words[_SEQ] += 1
    names[_NAME] = name.ljust(MAX_NAME_BYTES, b"\0")
    words[_LIMIT] = limit
    words[_SINCE] = since
    if not _stack and words[_COUNT]:
        words[_AT] = _now()
    words[_SEQ] += 1


def _open() -> "memoryview[int] | None":
    global _looked, _words, _bytes
    if _looked:
        return None
    _looked = True
    path = os.environ.get(VARIABLE)
    if not path:
        return None
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            shared = mmap.mmap(fd, SIZE)
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"holdfast: {VARIABLE}={path} cannot be used ({error}): no beats\n")
        return None
    _bytes = memoryview(shared)
    _words = _bytes[: _WORDS * 8].cast("q")
    _words[_FORMAT] = _MAGIC
    _words[_SEQ] &= ~1  # whoever beat before us may have died in the middle of it
    return _words


def read(buffer: "mmap.mmap | memoryview[int]") -> Beat | None:
    """What such a file says, or None if nothing has beaten yet. For the launcher."""
    memory = memoryview(buffer)[: _NAME.stop]
    words = memory[: _WORDS * 8].cast("q")
    kept, tries = b"", 0
    # A writer that was stopped in the middle must not hold us up; one that never rests must not
    # either, but it leaves moments between two beats.
    while tries < _READS or (not kept and tries < _MOST_READS):
        tries += 1
        before, copy = words[_SEQ], memory.tobytes()
        if words[_SEQ] == before:
            kept = copy  # of one beat, or of half of it: nobody wrote meanwhile
            if before % 2 == 0:
                break
    copy = kept or copy
    values, name = memoryview(copy)[: _WORDS * 8].cast("q"), copy[_NAME]
    if values[_FORMAT] != _MAGIC or not (values[_COUNT] or values[_SINCE]):
        return None
    inside = None
    if values[_SINCE]:
        text = name.rstrip(b"\0").decode("utf-8", "replace")
        inside = Section(text, values[_LIMIT] / 1e9, values[_SINCE] / 1e9)
    return Beat(
        values[_STEP] if values[_COUNT] else NO_STEP,
        values[_AT] / 1e9,
        values[_COUNT],
        values[_LONGEST] / 1e9,
        inside,
    )
