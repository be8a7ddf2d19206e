"""Bells: how a commit in one process wakes the watches of another, by prefix.

Every watched prefix of every client is a named pipe in a folder beside the ledger's file;
its name holds the prefix. After a commit the writer writes one byte into the pipes whose
prefix it touched. A pipe that nobody reads any more (its process died) is removed by the
next writer that comes across it.

A bell only says "look now". It may ring for nothing, and if a writer dies between commit
and ring it does not ring at all; so watches also look by themselves now and then (the
back stop). What a watch delivers comes from the ledger's history, never from here.
"""

import asyncio
import base64
import bisect
import contextlib
import errno
import os
import secrets
import time
from collections.abc import Iterable
from pathlib import Path

__all__ = ["Bell", "Ringer", "bell_folder"]

# File names have 255 bytes. A longer prefix is cut: then it rings more often than needed.
_PREFIX_BYTES = 120
# A folder's time stamp has the kernel's tick (up to 10 ms): a listing as young as that may
# already be out of date although the time stamp is the same.
_TICK_NS = 20_000_000


def bell_folder(path: Path) -> Path:
    """The folder that holds the bells of the ledger at `path`."""
    return path.with_name(path.name + "-bells")


class Bell:
    """The reading end: wakes everything in this event loop that waits for one prefix."""

    def __init__(self, folder: Path, prefix: str) -> None:
        self.listeners: set[asyncio.Event] = set()
        cut = base64.urlsafe_b64encode(prefix.encode()[:_PREFIX_BYTES]).decode()
        self._path = folder / f"{secrets.token_hex(8)}.{cut}"
        folder.mkdir(exist_ok=True, mode=0o700)
        # Opened under a name that writers skip, so that they never see it without a reader.
        new = folder / f".{self._path.name}"
        os.mkfifo(new, 0o600)
        try:
            # Also a writer itself: without one it would poll as readable for ever.
            self._fd = os.open(new, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            new.unlink(missing_ok=True)
            raise
        new.rename(self._path)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._on_ring)

    def _on_ring(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, 65536)
        for event in self.listeners:
            event.set()

    def close(self) -> None:
        """Remove the bell."""
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        self._path.unlink(missing_ok=True)


class Ringer:
    """The writing end: rings the bells whose prefix a commit has touched."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stamp = (-1, 0)
        self._bells: list[tuple[bytes, Path]] = []
        self._remove_dead()

    def _remove_dead(self) -> None:
        """Remove the bells of dead processes, also those that nobody would ring again."""
        with contextlib.suppress(OSError):
            for name in os.listdir(self._folder):  # noqa: PTH208 -- names are enough
                if not name.startswith("."):
                    fd = _touch(self._folder / name)
                    if fd is not None:
                        os.close(fd)

    def ring(self, keys: Iterable[str]) -> None:
        """Wake the watches of these keys. Never raises: the commit has already happened."""
        with contextlib.suppress(OSError):
            self._refresh()
            if not self._bells:
                return
            raw = sorted(key.encode() for key in keys)
            for prefix, path in self._bells:
                first = bisect.bisect_left(raw, prefix)
                if first < len(raw) and raw[first].startswith(prefix):
                    _ring(path)

    def _refresh(self) -> None:
        try:
            changed = self._folder.stat().st_mtime_ns
        except FileNotFoundError:
            self._bells = []
            return
        seen, looked = self._stamp
        if changed == seen and looked - changed > _TICK_NS:
            return
        self._stamp = (changed, time.time_ns())
        self._bells = []
        for name in os.listdir(self._folder):  # noqa: PTH208 -- names are enough, and faster
            if name.startswith(".") or "." not in name:
                continue
            with contextlib.suppress(ValueError):  # a file of somebody else: no bell
                prefix = base64.urlsafe_b64decode(name.partition(".")[2])
                self._bells.append((prefix, self._folder / name))


def _touch(path: Path) -> int | None:
    """Open a bell for ringing; remove it when nobody listens any more."""
    try:
        return os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENXIO:  # nobody reads it: its owner is dead
            path.unlink(missing_ok=True)
        return None


def _ring(path: Path) -> None:
    fd = _touch(path)
    if fd is None:
        return
    try:
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # full: it has been rung
            os.write(fd, b"\0")
    finally:
        os.close(fd)
