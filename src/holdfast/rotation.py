"""A log in several files: `x.jsonl`, and before it `x.jsonl.1`, `x.jsonl.2`, …, in this order.

The file without a number is the one that is written. When it is large enough it gets the next
number, which never changes again, and a new file takes its name. Invariants:

- **A kill loses nothing.** A file gets its number as a second name, and then the new file takes
  the first one, in one step. In between one file has two names: readers read it once, and the next
  writer takes the number back. (Where there are no hard links, the name is free for a moment.)
- **Readers miss nothing.** A reader first opens the file that is being written and then lists the
  others: a file that gets its number meanwhile is among them.
- The lowest number is 1 unless the oldest files were dropped: so a reader can tell.
"""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["drop", "in_order", "older", "settle", "succeed"]

_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def older(path: Path) -> list[tuple[int, Path]]:
    """The numbered files of a log, the oldest first."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(path.parent):  # noqa: PTH208 -- names are enough
            number = name.removeprefix(f"{path.name}.")
            if number != name and number.isdecimal() and number.isascii():
                found.append((int(number), path.with_name(name)))
    return sorted(found)


def succeed(path: Path, number: int) -> int:
    """Give the file at `path` its number, and its name to a new one; returns that, locked.

    Only for the file's writer, which holds its lock. Raises `FileExistsError` when the number is
    taken, and any `OSError` when there is no room: then nothing has changed.
    """
    new = path.with_name(f".{path.name}.next")
    with contextlib.suppress(FileNotFoundError):
        new.unlink()  # of a writer that was killed here
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    fd = os.open(new, flags, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        old = path.with_name(f"{path.name}.{number}")
        try:
            os.link(path, old)
        except OSError as error:
            if error.errno not in _NO_LINKS or old.exists():
                raise
            path.rename(old)
        new.rename(path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def settle(path: Path, fd: int) -> bool:
    """Whether this, opened and locked, is the file to write; what a kill left is put right."""
    about = os.fstat(fd)
    try:
        if not os.path.samestat(about, path.stat()):
            return False  # it got its number just now
    except FileNotFoundError:
        return False
    if about.st_nlink > 1:
        for _, one in older(path):
            if os.path.samestat(about, one.lstat()):
                one.unlink()
    return True


def drop(path: Path, most: int) -> None:
    """Remove the oldest files beyond so many."""
    there = older(path)
    for _, one in there[: max(0, len(there) - most)]:
        one.unlink(missing_ok=True)


def in_order(path: Path) -> Iterator[tuple[Path, int]]:
    """Each file of a log, opened for reading, the oldest first. Each is closed after its turn."""
    try:
        newest = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        newest = -1
    try:
        about = os.fstat(newest) if newest >= 0 else None
        for _, one in older(path):
            try:
                fd = os.open(one, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue  # dropped meanwhile
            try:
                if about is not None and os.path.samestat(about, os.fstat(fd)):
                    about = None
                yield one, fd
            finally:
                os.close(fd)
        if about is not None:
            yield path, newest
    finally:
        if newest >= 0:
            os.close(newest)
