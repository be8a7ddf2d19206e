"""Locks of the kernel on the files of a store. A death frees them.

Every lock is a file opened for it alone, so that two threads exclude each other just as two
processes do, and closing it frees this lock and no other. A fork shares open files: the
child closes its copies (`abandon`), which frees nothing of its parent's.
"""

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from holdfast.errors import Unavailable
from holdfast.timeouts import DEFAULTS

__all__ = ["Locks"]

_FIRST_S = 0.0002
_MOST_S = 0.02
"""How far apart the looks at a lock are: at first hardly at all, because it is held for a moment.
They belong to the algorithm; the setting is `store_lock_s`, which says when to give up."""


class Locks:
    """The locks that one opened store holds."""

    def __init__(self, folder: Path, limit_s: float = DEFAULTS.store_lock_s) -> None:
        self._folder = str(folder)
        self._limit_s = limit_s
        self._held: set[int] = set()
        self._mutex = threading.Lock()

    def take(self, name: str, *, exclusive: bool, create: bool = False) -> int | None:
        """Lock a file, if nobody is in the way. The number is for `drop`."""
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
        fd = os.open(f"{self._folder}/{name}", flags, 0o600)
        try:
            fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise
        with self._mutex:
            self._held.add(fd)
        return fd

    def wait(self, name: str, *, exclusive: bool, create: bool = False) -> int:
        """Lock a file as soon as nobody is in the way. Raises `Unavailable`."""
        deadline = time.monotonic() + self._limit_s
        pause_s = _FIRST_S
        while (fd := self.take(name, exclusive=exclusive, create=create)) is None:
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"{self._folder}/{name} has been locked by another process for "
                    f"{self._limit_s:g} s: it may be stopped (see `stores()` or `fuser`)"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MOST_S)
        return fd

    def drop(self, fd: int) -> None:
        """Free a lock. One that a fork left behind is none of ours."""
        with self._mutex:
            if fd not in self._held:
                return
            self._held.remove(fd)
        os.close(fd)

    @contextlib.contextmanager
    def held(
        self, name: str, *, exclusive: bool, create: bool = False, wait: bool = True
    ) -> Iterator[bool]:
        """Hold a lock for a block. False if somebody is in the way who is not waited for."""
        lock = self.wait if wait else self.take
        fd = lock(name, exclusive=exclusive, create=create)
        try:
            yield fd is not None
        finally:
            if fd is not None:
                self.drop(fd)

    def abandon(self, *, keep: Collection[int] = ()) -> None:
        """Close everything: the end, or a child that must not keep its parent's locks.

        At the end, those of views that are still in use are kept: who has them drops them.
        """
        self._mutex = threading.Lock()  # after a fork, another thread may have held it
        held, self._held = self._held, self._held & set(keep)
        for fd in held - self._held:
            os.close(fd)
