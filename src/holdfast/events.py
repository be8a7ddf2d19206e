"""Typed events: what happened, as data, in one file per process.

Terminal, web page, report and Prometheus are views of these files. Invariants:

- **What was emitted survives the process.** A line is one `write` at emit time, so that
  SIGKILL takes nothing back. (Power loss may: nothing is synced.)
- **Emitting never raises.** Lines that a full disk refused are kept, `buffer` of them, and
  tried again with the next emit. When that is full, the oldest give way to one
  `events.dropped`; an event that cannot be written at all becomes `events.refused`.
- **Lines are whole and in order.** A line of which the disk took a part is completed first.
  `seq` counts from 1 without gaps; an `events.dropped` stands for `count` of them, the
  first of which is its own.
- **A log is bounded.** It goes on in a new file when `file_bytes` are written (`rotation.py`), and
  beyond `files` older ones the oldest is dropped. The default of 4 GiB is for what must be whole.
- **Versions mix.** A reader fills in what an older writer left out, ignores what a newer
  one added, and gives what it does not know as `Unknown`.

A part adds an event with `class LeaseLost(Event, frozen=True, tag="lease.lost")`. A log
belongs to the process that opened it: after a fork the child has none, until it opens its
own. An event emitted by a signal handler in the middle of an emit is written right after
that one. Not done here: deciding anything.
"""

import atexit
import contextlib
import fcntl
import os
import re
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily

from holdfast import rotation
from holdfast.errors import Corrupt, Exists, Mistake, NotFound
from holdfast.files import append_to

__all__ = [
    "Counters",
    "Dropped",
    "Event",
    "EventLog",
    "Refused",
    "Unknown",
    "configure",
    "emit",
    "read",
    "types",
    "unconfigure",
]

MAX_LINE_BYTES = 1 << 20
FILE_BYTES = 64 << 20
FILES = 63
_LABEL_CHARS = 100
_OTHER = "other"
_TYPE = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)+")
_BEGIN = b'{"type":"'

_fresh: "list[type[Event]]" = []
_types: "dict[str, type[Event]]" = {}
_registering = threading.Lock()


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="event"):
    """The base of all events. The log fills in these four fields when it is emitted.

    `at` is in wall-clock seconds. A class may name fields as `labels`: then it is also
    counted by their values (see `Counters`).
    """

    labels: ClassVar[tuple[str, ...]] = ()

    at: float = 0.0
    process: str = ""
    pid: int = 0
    seq: int = 0

    def __init_subclass__(cls) -> None:
        _fresh.append(cls)  # its tag is not known yet: `types` looks at it later


class Dropped(Event, frozen=True, tag="events.dropped"):
    """There was no room: the events `seq` to `seq + count - 1` are lost."""

    count: int


class Refused(Event, frozen=True, tag="events.refused"):
    """An event that could not be written: too large, or with values JSON does not have."""

    kind: str
    reason: str


class Unknown(Event, frozen=True, tag="events.unknown"):
    """An event of a type, or in a form, that this version does not know."""

    kind: str
    fields: dict[str, Any]


class _Stamp(msgspec.Struct):
    at: float = 0.0
    process: str = ""
    pid: int = 0
    seq: int = 0


class _Head(msgspec.Struct):
    type: str


_encoder = msgspec.json.Encoder()
_head = msgspec.json.Decoder(_Head)


def types() -> dict[str, type[Event]]:
    """Every event type declared so far. Raises `Mistake` for a bad or doubled name."""
    with _registering:
        known = {_metric(cls): cls for cls in _types.values()}
        for cls in _fresh:
            name, other = _name(cls), known.setdefault(_metric(cls), cls)
            if name == "event":
                continue  # a base for other events
            if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
                raise Mistake(f"{cls} and {other} have the same tag {name!r}: rename one")
            if not _TYPE.fullmatch(name) or not {*cls.__struct_fields__}.issuperset(cls.labels):
                raise Mistake(
                    f"{cls}: the tag {name!r} must be like 'lease.lost', and the labels "
                    f"{cls.labels} must be fields"
                )
        _types.update({_name(cls): cls for cls in _fresh if _name(cls) != "event"})
        _fresh.clear()
        return dict(_types)


def _name(cls: type[Event]) -> str:
    return str(cls.__struct_config__.tag)


def _metric(cls: type[Event]) -> str:
    return "holdfast_" + _name(cls).replace(".", "_")


class EventLog:
    """The event file of this process. Safe to use from several threads.

    `sinks` are called with every event as it was stamped; one that raises is not called
    again (`broken_sinks` has its error).
    """

    def __init__(
        self,
        path: Path,
        *,
        process: str,
        buffer: int = 10_000,
        sinks: Iterable[Callable[[Event], None]] = (),
        now: Callable[[], float] = time.time,
        file_bytes: int = FILE_BYTES,
        files: int = FILES,
    ) -> None:
        if min(buffer, file_bytes, files) < 1:
            raise Mistake(f"{buffer=}, {file_bytes=} and {files=} are at least 1")
        if not process or not process.isprintable() or len(process) > _LABEL_CHARS:
            raise Mistake(f"{process[:_LABEL_CHARS]!r} cannot be the name of a process")
        self.path = path
        self.process = process
        self.dropped = 0
        self.broken_sinks: list[Exception] = []
        self._sinks, self._now, self._buffer = list(sinks), now, buffer
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._busy = self._closing = False
        self._arrived: deque[Event] = deque()
        self._seq = 0
        self._lines: dict[int, bytes] = {}  # by seq: whole lines that wait
        self._gap = 0  # how many were dropped right before the first of them
        self._writing = False  # true if it is not known how much of `_rest` was written
        # `_rest` is what is left of the line that was begun; it goes before any other.
        self._fd, self._rest = _open(path)
        self._size = os.fstat(self._fd).st_size
        self._file_bytes, self._files = file_bytes, files
        self._number = max((number for number, _ in rotation.older(path)), default=0) + 1
        _open_logs.add(self)

    @property
    def unwritten(self) -> int:
        """How many lines wait for room."""
        return len(self._lines) + bool(self._rest)

    def emit(self, event: Event) -> None:
        """Write an event. Never raises; after `close`, or in a forked child, does nothing."""
        with self._lock:
            if self._fd < 0:
                return
            self._arrived.append(event)
            if self._busy:
                return  # the emit that was interrupted takes care of it
            self._busy = True
            try:
                while self._arrived:
                    self._take(self._arrived.popleft())
            finally:
                self._busy = False
                if self._closing:
                    self.close()

    def close(self) -> int:
        """Try once more to write what waits, and close. Returns how many lines are lost."""
        with self._lock:
            self._closing = True
            if self._fd >= 0 and not self._busy:
                self._flush()
                os.close(self._fd)
                self._fd = -1
            return self.unwritten

    # A signal handler may raise (Ctrl-C does) after any call below. What must change
    # together is therefore assigned without a call in between.

    def _take(self, event: Event) -> None:
        event, line = self._encode(event)
        self._lines[event.seq] = line
        self._seq = event.seq
        self._flush()
        while len(self._lines) > self._buffer:
            oldest = next(iter(self._lines))
            del self._lines[oldest]
            self._gap += 1
            self.dropped += 1
        for sink in tuple(self._sinks):
            try:
                sink(event)
            except Exception as error:  # noqa: BLE001 -- a view must not hurt who it looks at
                self._sinks.remove(sink)
                self.broken_sinks.append(error)

    def _stamp(self, event: Event, seq: int) -> Event:
        return msgspec.structs.replace(
            event, at=self._now(), process=self.process, pid=self._pid, seq=seq
        )

    def _encode(self, event: Event) -> tuple[Event, bytes]:
        kind, seq = type(event).__name__, self._seq + 1
        try:
            kind = _name(type(event))
            event = self._stamp(event, seq)
            line = _encoder.encode(event) + b"\n"
            reason = "" if kind != "event" else "its class has no tag"
            if len(line) > MAX_LINE_BYTES:
                reason = f"{len(line)} bytes are more than {MAX_LINE_BYTES}"
        except Exception as error:  # noqa: BLE001 -- the reason is written instead
            reason = ascii(f"{type(error).__name__}: {error}"[:200])
        if reason:
            event = self._stamp(Refused(kind=kind, reason=reason), seq)
            line = _encoder.encode(event) + b"\n"
        return event, line

    def _flush(self) -> None:
        try:
            while self._rest or self._gap or self._lines:
                if self._writing:
                    wrote = os.fstat(self._fd).st_size - self._size
                elif self._rest:
                    self._writing = True
                    wrote = os.write(self._fd, self._rest)
                else:
                    if self._size >= self._file_bytes:
                        self._rotate()
                    self._begin()
                    continue
                self._size += wrote
                self._rest = self._rest[wrote:]
                self._writing = False
        except OSError:
            self._writing = False  # no room, nothing written: it waits for the next emit

    def _rotate(self) -> None:
        """Go on in a new file, if there is room for one; else in this one."""
        following = self._number + 1
        try:
            fd = rotation.succeed(self.path, self._number)
        except FileExistsError:
            self._number = following
            return
        except OSError:
            return
        before = self._fd
        self._fd, self._size, self._number = fd, 0, following
        with contextlib.suppress(OSError):
            os.close(before)
            rotation.drop(self.path, self._files)

    def _begin(self) -> None:
        """Make the next line the one that is being written."""
        first = next(iter(self._lines), self._seq + 1)
        if self._gap:
            notice = self._stamp(Dropped(count=self._gap), first - self._gap)
            line = _encoder.encode(notice) + b"\n"
            self._rest = line
            self._gap = 0
        else:
            self._rest = self._lines[first]
            del self._lines[first]

    def _abandon(self) -> None:
        """Let go without a word: a forked child must not write or hold its parent's log."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
        self._lock = threading.RLock()


_open_logs: "weakref.WeakSet[EventLog]" = weakref.WeakSet()
_default: EventLog | None = None


def configure(
    path: Path,
    process: str,
    *,
    sinks: Iterable[Callable[[Event], None]] = (),
    file_bytes: int = FILE_BYTES,
    files: int = FILES,
) -> EventLog:
    """Make this the log that `emit` writes to, in place of the one before."""
    global _default
    if _default is not None and _default.path == path:
        unconfigure()  # a file has one writer, also within a process
    log = EventLog(path, process=process, sinks=sinks, file_bytes=file_bytes, files=files)
    before, _default = _default, log
    if before is not None:
        before.close()
    return log


def unconfigure() -> None:
    """Close the log that `emit` writes to, if there is one; from now on it keeps nothing."""
    global _default
    before, _default = _default, None
    if before is not None:
        before.close()


def emit(event: Event) -> None:
    """Write an event to the configured log; without one nothing happens."""
    log = _default
    if log is not None:
        log.emit(event)


def _after_fork() -> None:
    global _default, _registering
    _default, _registering = None, threading.Lock()
    for log in tuple(_open_logs):
        log._abandon()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(unconfigure)


def _open(path: Path) -> tuple[int, bytes]:
    """Open for appending, as the only writer; also returns what the last line lacks."""
    while True:
        fd = append_to(path, also_read=True)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if rotation.settle(path, fd):
                return fd, _heal(fd, path)
        except BlockingIOError:
            os.close(fd)
            raise Exists(
                f"{path} is being written by another process: give each its own file, "
                "for example with the process id in its name"
            ) from None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _heal(fd: int, path: Path) -> bytes:
    """Cut off a torn last line. Returns the end that it lacks if it is whole otherwise."""
    size = os.fstat(fd).st_size
    start = max(0, size - MAX_LINE_BYTES)
    end = os.pread(fd, size - start, start)
    last = end[end.rfind(b"\n") + 1 :]
    if not last.startswith(_BEGIN[: len(last)]):
        raise Mistake(f"{path} does not end like an event log: it was left as it is")
    if last and _decode(last) is not None:
        return b"\n"
    os.ftruncate(fd, size - len(last))
    return b""


def read(path: Path) -> Iterator[Event]:
    """Give the events of a log, of all its files, those that are whole; it may still be written.

    A torn last line is what a killed writer leaves, and ends the reading. A torn line
    anywhere else raises `Corrupt` with its number.
    """
    found = False
    for one, fd in rotation.in_order(path):
        found = True
        with open(fd, "rb", closefd=False) as file:
            yield from _events(one, file)
    if not found:
        raise NotFound(f"there is no event log {path}")


def _events(path: Path, file: BinaryIO) -> Iterator[Event]:
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        event = _decode(line)
        if event is not None:
            yield event
        elif line.endswith(b"\n") or len(line) > MAX_LINE_BYTES:
            raise Corrupt(f"{path}: line {number} is not a whole event")
        else:
            return  # its rest may come while we look: that would not be a line


def _decode(line: bytes) -> Event | None:
    """The event of a line, or None if the line is not a whole one."""
    try:
        kind = _head.decode(line).type
        if _fresh:
            types()
        if (cls := _types.get(kind)) is not None:
            try:
                return msgspec.json.decode(line, type=cls)
            except msgspec.ValidationError:
                pass  # written by a version with another idea of this type
        fields = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    try:
        stamp = msgspec.convert(fields, _Stamp)
    except msgspec.ValidationError:
        stamp = _Stamp()
    del fields["type"]
    return Unknown(kind=kind, fields=fields, **msgspec.structs.asdict(stamp))


class Counters:
    """A sink that counts events for Prometheus.

    `holdfast_events_total{type}` counts all of them; an event class with `labels` also has
    `holdfast_<type>_total{labels}`. A family has at most `max_sets` label sets (and as many
    types that this version does not know); the rest are counted as "other".
    """

    def __init__(self, *, max_sets: int = 100) -> None:
        self.registry = CollectorRegistry()
        self._max_sets = max_sets
        self._lock = threading.RLock()  # a signal handler may emit while we count
        self._families: dict[str, tuple[tuple[str, ...], dict[tuple[str, ...], int]]] = {}
        self._strange: set[str] = set()
        self.registry.register(self)

    def __call__(self, event: Event) -> None:
        """Count one event."""
        kind = _name(type(event))
        with self._lock:
            if isinstance(event, Unknown):
                kind = event.kind[:_LABEL_CHARS]
                if kind not in self._strange and len(self._strange) >= self._max_sets:
                    kind = _OTHER
                self._strange.add(kind)
            self._add("holdfast_events", ("type",), (kind,), limit=False)
            if labels := type(event).labels:
                values = tuple(str(getattr(event, name))[:_LABEL_CHARS] for name in labels)
                self._add(_metric(type(event)), labels, values, limit=True)

    def _add(
        self, family: str, labels: tuple[str, ...], values: tuple[str, ...], *, limit: bool
    ) -> None:
        counts = self._families.setdefault(family, (labels, {}))[1]
        if limit and values not in counts and len(counts) >= self._max_sets:
            values = (_OTHER,) * len(labels)
        counts[values] = counts.get(values, 0) + 1

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Give the families; prometheus_client calls this."""
        with self._lock:
            families = {name: (labels, dict(c)) for name, (labels, c) in self._families.items()}
        for name, (labels, counts) in sorted(families.items()):
            family = CounterMetricFamily(name, "events that were emitted", labels=labels)
            for values, count in counts.items():
                family.add_metric(values, count)
            yield family

    def expose(self) -> bytes:
        """The counters in Prometheus' text format."""
        return generate_latest(self.registry)
