"""Follows the event files of a run's folder, also those that appear later.

Events come in the order of their time, as well as it can be had: what was written while the
files were being read waits for the next look, so that nobody's later event overtakes an
earlier one of another file. A torn last line waits for its rest, or for the writer that
cuts it off; a line that is no event is left out. A file is known by its inode: when
its writer gives it a number and goes on in a new one (`x.jsonl.1`, `x.jsonl`), both are read to
the end. Links are not followed. Nothing is ever written.
"""

import math
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

from holdfast.events import Event, Unknown
from holdfast.timeouts import DEFAULTS
from holdfast.views.picture import Picture
from holdfast.views.told import known, parse

__all__ = ["Live", "Tail", "look"]

_FIND_S = 4 * DEFAULTS.show_s
"""Every so many looks at the files that are known, new ones are looked for."""
_LOOKS = 5
"""How often the last look begins again when files get numbers meanwhile."""
_RANK = re.compile(r"e\d+-c\d+-r\d+-(\d{1,9})")
_LOG = re.compile(r"(.*\.jsonl)(?:\.([0-9]+))?")
_CHUNK_BYTES = 1 << 22
_MAX_DEPTH = 7
_NOT_BELOW = frozenset({"base", "journal", "weights"})
"""Folders with many files and no event logs."""
_MAX_FOLDERS = 5000


class _File:
    def __init__(self, path: str) -> None:
        self.path = path
        self.offset = 0
        """Where the first line begins that was not whole yet."""
        self.state: tuple[int, ...] = ()


class Tail:
    """The events of a run's folder, a look at a time."""

    def __init__(self, folder: Path, *, now: Callable[[], float] = time.time) -> None:
        known()  # here: the thread that reads should not be the one that imports
        self.folder = folder
        self._now = now
        self._files: dict[tuple[int, int], _File] = {}
        """By device and inode."""
        self._found_at = float("-inf")
        self._held: list[Event] = []

    def look(self, *, everything: bool = False) -> list[Event]:
        """What is new, in order; `everything` if there will be no other look."""
        began = self._now()
        fresh: list[Event] = []
        for _ in range(_LOOKS if everything else 1):
            if everything or not 0.0 <= began - self._found_at < _FIND_S:
                self._find(began, fresh)
            for identity, file in self._files.items():
                while self._read(identity, file, fresh):
                    pass
            if self._found_at == began:
                break  # no file got its number meanwhile
        fresh.sort(key=lambda event: event.at)
        late = [] if everything else [event for event in fresh if event.at > began]
        ready = [*self._held, *fresh[: len(fresh) - len(late)]]
        self._held = late
        return sorted(ready, key=lambda event: event.at)

    def _find(self, now: float, into: list[Event]) -> None:
        """Look which files there are."""
        self._found_at = now
        before = self._files
        found: dict[tuple[int, int], _File] = {}
        there = _event_files(self.folder)
        for path, identity in sorted(there, key=lambda one: _age(one[0]), reverse=True):
            if identity in found:
                continue  # its writer was killed while it gave it a number: this is a second name
            known = before.get(identity)
            if known is not None and _LOG.sub(r"\1", path) == known.path:
                known.path = path  # it has got its number
            if known is None or known.path != path:
                known = _File(path)
                into += _silent(path)
            found[identity] = known
        self._files = dict(sorted(found.items(), key=lambda one: _age(one[1].path)))

    def _read(self, identity: tuple[int, int], file: _File, into: list[Event]) -> bool:
        """Read a piece of a file; whether there may be more."""
        try:
            fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return False
        try:
            about = os.fstat(fd)
            state = (about.st_ino, about.st_size, about.st_mtime_ns)
            if state == file.state:
                return False
            if (about.st_dev, about.st_ino) != identity:
                self._found_at = float("-inf")  # it has got a number, or another took its place
                return False
            if about.st_size < file.offset:
                file.offset = 0
            data = os.pread(fd, _CHUNK_BYTES, file.offset)
        except OSError:
            return False
        finally:
            os.close(fd)
        whole = data.rfind(b"\n") + 1
        more = len(data) == _CHUNK_BYTES
        if more and not whole:
            whole = len(data)  # no event is that long
        file.offset += whole
        file.state = (about.st_ino,) if more else state
        events = map(parse, data[:whole].splitlines())
        into += [event for event in events if event is not None]
        return more


def look(folder: Path) -> Picture:
    """The picture of a run as its files are now."""
    picture = Picture()
    for event in Tail(folder).look(everything=True):
        picture.take(event)
    return picture


class Live:
    """A picture that a thread keeps up to date. Hold `lock` while you look at it."""

    def __init__(
        self, folder: Path, *, tell: Callable[[Event, Picture], None] | None = None
    ) -> None:
        self.picture = Picture()
        self.lock = threading.Condition()
        self.stopped = False
        self._tell = tell
        self._tail = Tail(folder)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="views.tail", daemon=True)

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()

    def stop(self) -> None:
        """Read what is left, and end."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def wait(self, serial: int, limit_s: float) -> bool:
        """Wait until there is more than this; whether there is."""
        with self.lock:
            self.lock.wait_for(lambda: self.stopped or self.picture.serial > serial, limit_s)
            return self.picture.serial > serial

    def _run(self) -> None:
        while True:
            last = self._stop.is_set()
            fresh = self._tail.look(everything=last)
            if fresh or last:
                with self.lock:
                    for event in fresh:
                        self.picture.take(event)
                        if self._tell is not None:
                            self._tell(event, self.picture)
                    self.stopped = last
                    self.lock.notify_all()
            if last:
                return
            self._stop.wait(DEFAULTS.show_s)


def _silent(path: str) -> list[Event]:
    """A trainer's rank that may never say anything: its log's name tells that it lives."""
    match = _RANK.fullmatch(Path(path).stem)
    if match is None:
        return []
    try:
        about = Path(path).lstat()
    except OSError:
        return []
    if about.st_size:
        return []  # it speaks for itself
    process = " ".join((Path(path).parent.parent.name, match[0]))
    return [Unknown(kind="", fields={}, at=about.st_mtime, process=process, pid=int(match[1]))]


def _age(path: str) -> float:
    """The number of a log's older file; the one that is written comes last."""
    match = _LOG.fullmatch(path)
    return int(match[2]) if match and match[2] else math.inf


def _event_files(folder: Path) -> list[tuple[str, tuple[int, int]]]:
    """Every `events/*.jsonl`, or `.jsonl.N`, at or below the folder, with its identity."""
    found: list[tuple[str, tuple[int, int]]] = []
    todo, visited = [(str(folder), 0)], 0
    while todo and visited < _MAX_FOLDERS:
        path, depth = todo.pop(0)
        visited += 1
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        if depth < _MAX_DEPTH and entry.name not in _NOT_BELOW:
                            todo.append((entry.path, depth + 1))
                    elif (
                        _LOG.fullmatch(entry.name)
                        and Path(path).name == "events"
                        and entry.is_file(follow_symlinks=False)
                    ):
                        about = entry.stat(follow_symlinks=False)
                        found.append((entry.path, (about.st_dev, about.st_ino)))
        except OSError:
            continue  # it went away, or is not ours to read
    return found
