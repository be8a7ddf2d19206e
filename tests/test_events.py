"""The event log: what was emitted is in the file, whole, in order, whatever happens."""

import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from descriptors import held_below
from holdfast import events
from holdfast.errors import Corrupt, Mistake, NotFound
from holdfast.events import Counters, Dropped, Event, EventLog, Refused, Unknown
from holdfast.proc import die_with_parent, spawn
from patience import HANG_S
from trainer.disks import full, small

SRC = str(Path(holdfast.__file__).parents[1])


class Step(Event, frozen=True, tag="test.step"):
    n: int
    text: str = ""


class Moved(Event, frozen=True, tag="test.moved"):
    labels: ClassVar[tuple[str, ...]] = ("where", "why")

    where: str
    why: str = "none"


def steps(path: Path) -> list[int]:
    return [event.n for event in events.read(path) if isinstance(event, Step)]


def account(path: Path) -> list[int]:
    """All sequence numbers that the file accounts for, dropped ones too."""
    numbers: list[int] = []
    for event in events.read(path):
        count = event.count if isinstance(event, Dropped) else 1
        numbers.extend(range(event.seq, event.seq + count))
    return numbers


@pytest.fixture(autouse=True)
def _unconfigured() -> Iterator[None]:
    yield
    events.unconfigure()


# ---- writing and reading -------------------------------------------------------------


def test_events_come_back_as_they_were(tmp_path: Path) -> None:
    """What is read equals what was emitted, stamped with time, process and a number."""
    path = tmp_path / "log.jsonl"
    with closing(EventLog(path, process="trainer", now=lambda: 12.5)) as log:
        log.emit(Step(1, "line\nbreak \u2028 ü"))
        log.emit(Moved("here"))
    mine: dict[str, Any] = {"at": 12.5, "process": "trainer", "pid": os.getpid()}
    assert list(events.read(path)) == [
        Step(1, "line\nbreak \u2028 ü", seq=1, **mine),
        Moved("here", seq=2, **mine),
    ]
    first = json.loads(path.read_bytes().splitlines()[0])
    assert (first["type"], first["n"], first["seq"]) == ("test.step", 1, 1)
    assert path.stat().st_mode & 0o777 == 0o600


def test_unknown_and_changed_types_are_read(tmp_path: Path) -> None:
    """Newer types come as `Unknown`, added fields are ignored, left out ones filled in."""
    path = tmp_path / "log"
    path.write_text(
        '{"type":"next.thing","at":1.5,"process":"p","pid":7,"seq":1,"x":[1,{"y":2}]}\n'
        '{"type":"test.step","n":3,"colour":"red","seq":2}\n'
        '{"type":"test.step","n":"three","seq":3}\n'
        '{"type":"test.step","seq":4}\n'
        '{"type":"next.thing","at":"noon"}\n'
    )
    first, second, third, fourth, fifth = events.read(path)
    stamp: dict[str, Any] = {"at": 1.5, "process": "p", "pid": 7, "seq": 1}
    fields = {**stamp, "x": [1, {"y": 2}]}
    assert first == Unknown(kind="next.thing", fields=fields, **stamp)
    assert second == Step(3, seq=2)
    assert isinstance(third, Unknown)
    assert (third.kind, third.seq, third.fields["n"]) == ("test.step", 3, "three")
    assert isinstance(fourth, Unknown)
    assert isinstance(fifth, Unknown)
    assert fifth.seq == 0


@given(st.integers(0, 10_000))
def test_a_file_cut_anywhere_gives_its_whole_lines(cut: int) -> None:
    """Cut at any byte, the file gives exactly the events that are whole before the cut."""
    lines = [f'{{"type":"test.step","n":{n},"text":"ü{n}"}}' for n in range(12)]
    data = "\n".join([*lines, ""]).encode()[:cut]
    fd = os.memfd_create("cut")
    try:
        os.write(fd, data)
        path = Path(f"/proc/self/fd/{fd}")
        whole = [n for n, line in enumerate(lines) if line in data.decode(errors="ignore")]
        assert steps(path) == whole
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    "bad",
    [
        b'{"type":"test.st',
        b"",
        b"\x00\x00\x00",
        b"[1]",
        b'{"n":1}',
        b'{"type":"test.step","n":1,"text":"\xff"}',
        b'{"type":"test.step","n":1}{"type":"test.step","n":2}',
        b'{"type":"test.step","n":1,"text":"' + b"x" * events.MAX_LINE_BYTES + b'"}',
    ],
)
def test_a_torn_line_in_the_middle_is_corrupt(tmp_path: Path, bad: bytes) -> None:
    """It is reported with its number, after what came before it."""
    path = tmp_path / "log"
    good = b'{"type":"test.step","n":0}\n'
    path.write_bytes(good + bad + b"\n" + good)
    reader = events.read(path)
    assert next(reader) == Step(0)
    with pytest.raises(Corrupt, match="line 2 "):
        next(reader)


def test_reading_nothing(tmp_path: Path) -> None:
    """An empty file has no events; a missing one is said to be missing."""
    (tmp_path / "empty").touch()
    assert list(events.read(tmp_path / "empty")) == []
    with pytest.raises(NotFound, match="missing"):
        next(events.read(tmp_path / "missing"))


# ---- opening -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "kept"),
    [
        (b'{"type":"test.step","n":0}\n', [0, 9]),
        (b'{"type":"test.step","n":0}\n{"type":"test.step","n"', [0, 9]),
        (b'{"type":"test.step","n":0}\n{"ty', [0, 9]),
        (b'{"type":"test.step","n":0}\n{"type":"test.step","n":1}', [0, 1, 9]),
        (b'{"type":"test', [9]),
    ],
)
def test_a_successor_heals_the_last_line(tmp_path: Path, left: bytes, kept: list[int]) -> None:
    """What a killed writer left torn at the end is completed or cut off, never built upon."""
    path = tmp_path / "log"
    path.write_bytes(left)
    with closing(EventLog(path, process="p")) as log:
        log.emit(Step(9))
    assert steps(path) == kept
    assert path.read_bytes().endswith(b"\n")


def test_somebody_elses_file_is_left_alone(tmp_path: Path) -> None:
    """A file that is no event log is refused, and not changed."""
    path = tmp_path / "thesis.txt"
    path.write_bytes(b"one\ntwo, without an end")
    with pytest.raises(Mistake, match="not end like an event log"):
        EventLog(path, process="p")
    assert path.read_bytes() == b"one\ntwo, without an end"


def test_bad_places_are_refused(tmp_path: Path) -> None:
    """No folder, a folder, a link, a pipe, a file in use, a bad name: one clear error each."""
    (tmp_path / "link").symlink_to(tmp_path / "target")
    os.mkfifo(tmp_path / "pipe")
    places = {"no/log": "create the folder", "": "directory", "link": "a link", "pipe": "plain"}
    for name, words in places.items():
        with pytest.raises(Mistake, match=words):
            EventLog(tmp_path / name, process="p")
    assert not (tmp_path / "target").exists()
    log = EventLog(tmp_path / "log", process="p")
    with closing(log), pytest.raises(Mistake, match="its own file"):
        EventLog(tmp_path / "log", process="q")
    assert held_below(tmp_path) == []
    for name in ("", "a\nb", "\udc80", "x" * 1000):
        with pytest.raises(Mistake, match="name of a process"):
            EventLog(tmp_path / "log", process=name)
    with pytest.raises(Mistake, match="buffer"):
        EventLog(tmp_path / "log", process="p", buffer=0)


# ---- the default log -----------------------------------------------------------------


def test_the_default_log(tmp_path: Path) -> None:
    """`emit` goes to the log that was configured last, and nowhere without one."""
    events.emit(Step(0))
    events.configure(tmp_path / "a", "p")
    events.emit(Step(1))
    events.configure(tmp_path / "b", "p")
    events.emit(Step(2))
    events.unconfigure()
    events.unconfigure()
    events.emit(Step(3))
    assert (steps(tmp_path / "a"), steps(tmp_path / "b")) == ([1], [2])


# ---- never raising -------------------------------------------------------------------


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    """Too large, not JSON, not an event, no tag: a line says so, and numbers stay whole."""

    class Odd(Event, frozen=True, tag="test.odd"):
        thing: Any

    class Bare(Event, frozen=True):
        pass

    with closing(EventLog(tmp_path / "log", process="p")) as log:
        log.emit(Step(1, "x" * events.MAX_LINE_BYTES))
        log.emit(Odd(object()))
        log.emit(Odd("\udc80"))
        log.emit("hello")  # type: ignore[arg-type]
        log.emit(Bare())
        log.emit(Step(2))
    *refused, last = events.read(tmp_path / "log")
    assert all(isinstance(event, Refused) for event in refused)
    kinds = [event.kind for event in refused if isinstance(event, Refused)]
    assert kinds == ["test.step", "test.odd", "test.odd", "str", "event"]
    assert isinstance(last, Step)
    assert account(tmp_path / "log") == [1, 2, 3, 4, 5, 6]


def test_a_sink_that_raises_does_no_harm(tmp_path: Path) -> None:
    """It is not called again; the file and the other sinks go on."""
    seen: list[Event] = []

    def bad(event: Event) -> None:
        raise RuntimeError("broken view")

    with closing(EventLog(tmp_path / "log", process="p", sinks=[bad, seen.append])) as log:
        log.emit(Step(1))
        log.emit(Step(2))
        assert [str(error) for error in log.broken_sinks] == ["broken view"]
    assert seen == list(events.read(tmp_path / "log"))


def test_threads_share_a_log(tmp_path: Path) -> None:
    """Numbers have no gap, and an event is written when emit returns, in every thread."""
    written: set[int] = set()
    early: list[int] = []

    def sink(event: Event) -> None:
        if isinstance(event, Step):
            written.add(event.n)

    with closing(EventLog(tmp_path / "log", process="p", sinks=[sink])) as log:

        def work(base: int) -> None:
            for n in range(base, base + 300):
                log.emit(Step(n))
                if n not in written:
                    early.append(n)

        threads = [threading.Thread(target=work, args=(k * 1000,)) for k in range(6)]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(HANG_S)
        finally:
            sys.setswitchinterval(interval)
    assert early == []
    assert account(tmp_path / "log") == list(range(1, 1801))
    for k in range(6):
        assert [n for n in steps(tmp_path / "log") if n // 1000 == k] == [
            k * 1000 + n for n in range(300)
        ]


@pytest.mark.parametrize("raising", [False, True])
def test_a_signal_in_the_middle_of_an_emit(tmp_path: Path, raising: bool) -> None:
    """A handler that emits, or raises as Ctrl-C does, tears, doubles and loses nothing."""
    path = tmp_path / "log"
    handled, n, inside = 0, 0, False
    log = EventLog(path, process="p")

    def handler(number: int, frame: object) -> None:
        nonlocal handled, inside
        if raising and inside:
            handled, inside = handled + 1, False
            raise KeyboardInterrupt
        if not raising:
            handled += 1
            log.emit(Step(-1))

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0003, 0.0003)
        deadline = time.monotonic() + 20
        while handled < 500 and time.monotonic() < deadline:
            try:
                inside = True
                log.emit(Step(n))
                inside = False
                n += 1
            except KeyboardInterrupt:
                continue
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert handled >= 500
    log.close()
    numbers = account(path)
    assert numbers == list(range(1, len(numbers) + 1))
    if not raising:
        assert steps(path).count(-1) == handled
        assert [k for k in steps(path) if k >= 0] == list(range(n))


def test_a_forked_child_leaves_its_parents_log_alone(tmp_path: Path) -> None:
    """The child neither writes to it nor keeps it locked; with its own log it can emit."""
    log = events.configure(tmp_path / "parent", "p")
    events.emit(Step(1))
    reader, writer = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            die_with_parent(parent)
            events.emit(Step(100))
            log.emit(Step(101))
            events.configure(tmp_path / "child", "c")
            events.emit(Step(102))
            os.write(writer, b".")
            code = 0
            signal.pause()  # lives on, like a worker whose parent was killed
        finally:
            os._exit(code)
    try:
        assert os.read(reader, 1) == b"."
        events.unconfigure()
        with closing(EventLog(tmp_path / "parent", process="successor")) as again:
            again.emit(Step(2))
        assert (steps(tmp_path / "parent"), steps(tmp_path / "child")) == ([1, 2], [102])
        assert [event.pid for event in events.read(tmp_path / "child")] == [child]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)


# ---- kill ----------------------------------------------------------------------------

_EMITTER = """
import os, sys
from pathlib import Path
from holdfast import events

class Step(events.Event, frozen=True, tag="test.step"):
    n: int
    text: str = ""

events.configure(Path(sys.argv[1]), "child")
n = 0
while True:
    events.emit(Step(n, "x" * (n * 37 % 3000)))
    os.write(1, n.to_bytes(4, "big"))
    n += 1
"""


@pytest.mark.parametrize("after", [1, 50, 1000])
def test_kill_9_takes_nothing_back(tmp_path: Path, after: int) -> None:
    """Every event that a killed process had emitted is in its file."""
    path = tmp_path / "log"
    child = spawn(
        [sys.executable, "-c", _EMITTER, str(path)],
        env={"PYTHONPATH": SRC},
        stdout=subprocess.PIPE,
    )
    with child:
        out = child.process.stdout
        assert out is not None
        told = b""
        deadline = time.monotonic() + 30
        while len(told) < 4 * after and time.monotonic() < deadline:
            if select.select([out], [], [], 1)[0]:
                told += os.read(out.fileno(), 65536)
        os.kill(child.pid, signal.SIGKILL)
        child.process.wait(HANG_S)
        told += out.read()
        out.close()
    reported = len(told) // 4
    assert reported >= after
    found = steps(path)
    assert found == list(range(len(found)))
    assert len(found) in (reported, reported + 1)
    assert account(path) == list(range(1, len(found) + 1))


# ---- a full disk ---------------------------------------------------------------------


Filled = Callable[[Path, int], AbstractContextManager[None]]
"""Leaves a log so many bytes of room, or none."""


@contextmanager
def limited(log: Path, room_bytes: int) -> Iterator[None]:
    """The limit on the size of files: refuses writes in the middle of a line, too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = log.stat().st_size + room_bytes
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(params=["tmpfs", "limit"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, Filled]]:
    """A log to write, and how to leave it no room: a real file system of 64 KiB, or a limit."""
    if request.param == "limit":
        yield tmp_path / "log", limited
        return
    with small(tmp_path / "small", 64 << 10) as folder:
        yield folder / "log", lambda log, _: full(log.parent)


@pytest.mark.parametrize("room_bytes", [0, 1, 40, 1000])
def test_a_full_disk_loses_nothing_within_the_buffer(
    disk: tuple[Path, Filled], room_bytes: int
) -> None:
    """While it is full nobody is hurt; the next emit with room writes all, in order."""
    path, filled = disk
    with closing(EventLog(path, process="p", buffer=500)) as log:
        for n in range(10):
            log.emit(Step(n))
        with filled(path, room_bytes):
            for n in range(10, 300):
                log.emit(Step(n, "x" * 30))
            assert log.unwritten > 100
            found = steps(path)  # what is whole can be read meanwhile
            assert found == list(range(len(found)))
            assert len(found) + log.unwritten == 300
        log.emit(Step(300))
        assert (log.unwritten, log.dropped) == (0, 0)
    assert steps(path) == list(range(301))
    assert account(path) == list(range(1, 302))


@pytest.mark.parametrize("room_bytes", [0, 40])
def test_a_full_buffer_drops_the_oldest_and_says_so(
    disk: tuple[Path, Filled], room_bytes: int
) -> None:
    """The newest `buffer` events survive; `events.dropped` accounts for every other."""
    path, filled = disk
    with closing(EventLog(path, process="p", buffer=50)) as log:
        for round_ in range(2):
            log.emit(Step(0))
            with filled(path, room_bytes):
                for n in range(1, 400):
                    log.emit(Step(n, "x" * 100))
                assert log.unwritten in (50, 51)
            log.emit(Step(400))
            assert log.unwritten == 0
            assert steps(path)[-51:] == list(range(350, 401))
            assert account(path) == list(range(1, 401 * (round_ + 1) + 1))
    notices = [event for event in events.read(path) if isinstance(event, Dropped)]
    assert len(notices) == 2
    assert sum(event.count for event in notices) == log.dropped


def test_closing_on_a_full_disk_says_what_is_lost(tmp_path: Path) -> None:
    """`close` tries once more and tells how many lines were not written."""
    log = EventLog(tmp_path / "log", process="p")
    log.emit(Step(0))
    with limited(log.path, 10):
        log.emit(Step(1))
        log.emit(Step(2))
        assert log.close() == 2
    assert steps(tmp_path / "log") == [0]
    assert EventLog(tmp_path / "log", process="p").close() == 0  # heals what is torn
    assert (tmp_path / "log").read_bytes().endswith(b"\n")


# ---- types and counters --------------------------------------------------------------


def test_types_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Doubled tags, odd tags and labels that are no fields are mistakes."""
    assert events.types()["test.step"] is Step
    for name, space, labels in [
        ("test.step", "Other", ()),
        ("test_step", "Odd", ()),
        ("Test.step", "Odd", ()),
        ("test.labels", "Odd", ("colour",)),
    ]:
        monkeypatch.setattr(events, "_fresh", [])
        make: Any = type(Event)
        make(space, (Event,), {"labels": labels}, frozen=True, tag=name)
        with pytest.raises(Mistake, match=name):
            events.types()
        with pytest.raises(Mistake, match=name):
            events.types()


def test_counters(tmp_path: Path) -> None:
    """Every event counts by type; classes with labels also by the values of these."""
    counters = Counters()
    with closing(EventLog(tmp_path / "log", process="p", sinks=[counters])) as log:
        for where in ("a", "b", "a"):
            log.emit(Moved(where))
        log.emit(Step(1))
    text = counters.expose().decode()
    assert 'holdfast_events_total{type="test.moved"} 3.0' in text
    assert 'holdfast_events_total{type="test.step"} 1.0' in text
    assert 'holdfast_test_moved_total{where="a",why="none"} 2.0' in text
    assert 'holdfast_test_moved_total{where="b",why="none"} 1.0' in text
    assert "holdfast_test_step" not in text
    again = Counters()
    for event in events.read(tmp_path / "log"):
        again(event)
    assert again.expose() == counters.expose()


def test_counters_are_bounded() -> None:
    """Beyond the limit, label sets and unknown types are counted as "other"."""
    counters = Counters(max_sets=5)
    for n in range(50):
        counters(Moved(f"place {n % 20}"))
        counters(Unknown(kind=f"next.{n}", fields={}))
    text = counters.expose().decode()
    assert text.count("holdfast_test_moved_total{") == 6
    assert 'holdfast_test_moved_total{where="other",why="other"} 35.0' in text
    assert 'holdfast_events_total{type="test.moved"} 50.0' in text
    assert 'holdfast_events_total{type="other"} 45.0' in text
    assert text.count("holdfast_events_total{") == 7
