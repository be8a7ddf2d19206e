"""Logs in several files: bounded, whole and in order, whenever the writer is killed."""

import fcntl
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import events, rotation
from holdfast.chaos.runs import Tale
from holdfast.check.reading import read_run
from holdfast.check.rules.logs import seq
from holdfast.check.verdict import judge
from holdfast.errors import Mistake
from holdfast.events import Event
from holdfast.run.happenings import Trained
from holdfast.views.tail import Tail
from patience import HANG_S


class Said(events.Event, frozen=True, tag="test.said"):
    n: int


WRITER = """
import sys
from pathlib import Path
from holdfast import events
from holdfast.events import Event, EventLog

class Said(Event, frozen=True, tag="test.said"):
    n: int

log = EventLog(Path(sys.argv[1]), process="w", file_bytes=400, files=1 << 30)
for n in range(int(sys.argv[2]), 1 << 60):
    log.emit(Said(n=n))
"""


def said(path: Path) -> list[int]:
    return [one.n for one in events.read(path) if isinstance(one, Said)]


def write(path: Path, begin: int, end: int, **bounds: Any) -> None:
    log = events.EventLog(path, process="p", **{"file_bytes": 400, **bounds}, now=lambda: 1000.0)
    for n in range(begin, end):
        log.emit(Said(n=n))
    assert log.close() == 0


def test_a_log_goes_on_in_another_file(tmp_path: Path) -> None:
    """Nothing is lost or out of order, across files and lives; every file is its owner's alone."""
    path = tmp_path / "a.jsonl"
    write(path, 0, 50)
    write(path, 50, 100)
    assert said(path) == list(range(100))
    numbers = [number for number, _ in rotation.older(path)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) > 10
    for one in (path, *(old for _, old in rotation.older(path))):
        assert stat.S_IMODE(one.stat().st_mode) == 0o600
        assert one.stat().st_size < 600
        assert one.read_bytes().endswith(b"\n")
    assert not list(tmp_path.glob(".*")), "nothing is left over"


def test_a_log_is_bounded(tmp_path: Path) -> None:
    """Beyond so many files the oldest goes; what is left is the end, without a gap."""
    path = tmp_path / "a.jsonl"
    write(path, 0, 1000, files=3)
    assert len(rotation.older(path)) == 3
    left = said(path)
    assert left == list(range(left[0], 1000))
    assert sum(one.stat().st_size for one in tmp_path.iterdir()) < 4 * 600


@pytest.mark.parametrize("moment", ["open", "link", "rename", "no links"])
def test_a_kill_at_every_moment_of_the_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The reader reads each line once, before and after the next writer has come."""
    path = tmp_path / "events" / "a.jsonl"
    path.parent.mkdir()
    write(path, 0, 3, file_bytes=1 << 20)

    class Killed(BaseException):
        pass

    def die(*_: object, **__: object) -> None:
        raise Killed

    def no_links(*_: object, **__: object) -> None:
        raise OSError(1, "no hard links here")

    if moment == "open":
        monkeypatch.setattr(fcntl, "flock", die)
    elif moment == "no links":
        monkeypatch.setattr(os, "link", no_links)
        renames: Iterator[Any] = iter([Path.rename, die])
        monkeypatch.setattr(Path, "rename", lambda *given: next(renames)(*given))
    elif moment == "link":
        monkeypatch.setattr(os, "link", die)
    else:
        monkeypatch.setattr(Path, "rename", die)
    with pytest.raises(Killed):
        rotation.succeed(path, 1)
    monkeypatch.undo()
    tail = Tail(tmp_path)
    assert said(path) == [0, 1, 2]
    assert len(tail.look()) == 3
    assert len(read_run(tmp_path).entries) == 3
    write(path, 3, 50)
    assert said(path) == list(range(50))
    assert len(tail.look(everything=True)) == 47
    assert not list(path.parent.glob(".*"))


def test_a_writer_that_is_killed_again_and_again(tmp_path: Path) -> None:
    """SIGKILL at any moment: what was emitted before is there once, in order, for every reader."""
    path = tmp_path / "events" / "a.jsonl"
    path.parent.mkdir()
    script = tmp_path / "writer.py"
    script.write_text(WRITER)
    tail, following = Tail(tmp_path), 0
    seen: list[Event] = []
    for _ in range(5):
        before = len(rotation.older(path))
        writer = subprocess.Popen([sys.executable, str(script), str(path), str(following)])
        try:
            deadline = threading.Event()
            for _ in range(int(HANG_S / 0.01)):
                seen += tail.look()
                if len(rotation.older(path)) > before + 40:
                    break
                deadline.wait(0.01)
        finally:
            os.kill(writer.pid, signal.SIGKILL)
            writer.wait(HANG_S)
        assert len(rotation.older(path)) > before
        numbers = said(path)
        assert numbers == list(range(numbers[0], numbers[-1] + 1))
        following = numbers[-1] + 1
    seen += tail.look(everything=True)
    assert sorted(one.n for one in seen if isinstance(one, Said)) == list(range(following))
    assert not judge(seq, read_run(tmp_path)).findings


def test_a_log_has_one_writer_also_while_it_changes_files(tmp_path: Path) -> None:
    """Neither the file that is written nor one that got its number lets a second writer in."""
    path = tmp_path / "a.jsonl"
    log = events.EventLog(path, process="p", file_bytes=400)
    for n in range(20):
        log.emit(Said(n=n))
        with pytest.raises(Mistake, match="another process"):
            events.EventLog(path, process="q")
    log.close()


def test_without_room_for_another_file_the_log_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bound that cannot be kept costs no event."""

    def full(*_: object, **__: object) -> int:
        raise OSError(28, "no room")

    path = tmp_path / "a.jsonl"
    monkeypatch.setattr(rotation, "succeed", full)
    write(path, 0, 50)
    assert not rotation.older(path)
    assert said(path) == list(range(50))


def trained(step: int) -> Trained:
    numbers: dict[str, Any] = dict.fromkeys(
        ("loss", "grad_norm", "reward", "exact", "seconds"), 0.0
    )
    return Trained(step=step, version=step, content="", samples=1, lag=0, **numbers)


def test_readers_follow_a_log_into_its_next_file(tmp_path: Path) -> None:
    """Views and chaos give each event once, wherever it is when they come; and so does a check."""
    path = tmp_path / "events" / "orchestrator.jsonl"
    path.parent.mkdir()
    clock = [1000.0]
    tail, tale, seen = Tail(tmp_path, now=lambda: clock[0]), Tale(tmp_path), 0
    log = events.EventLog(path, process="p", file_bytes=400, now=lambda: clock[0] - 0.5)
    for n in range(60):
        log.emit(trained(n))
        clock[0] += 0.3
        if n % 7 == 0:
            seen += len(tail.look())
            tale.read()
    log.close()
    seen += len(tail.look(everything=True))
    tale.read()
    assert seen == 60
    assert [step for step, _ in tale.trained] == list(range(60))
    history = read_run(tmp_path)
    assert history.files == ("events/orchestrator.jsonl",)
    assert [one.line for one in history.entries] == list(range(1, 61))


def test_a_check_knows_that_a_log_lost_its_beginning(tmp_path: Path) -> None:
    """What was dropped is not taken for a gap, and not for a whole log either."""
    path = tmp_path / "events" / "a.jsonl"
    path.parent.mkdir()
    write(path, 0, 100)
    assert not read_run(tmp_path).lost()
    rotation.drop(path, 3)
    history = read_run(tmp_path)
    assert history.lost()
    assert not judge(seq, history).findings
    (_, middle), *_ = rotation.older(path)[1:]
    middle.unlink()
    assert judge(seq, read_run(tmp_path)).findings
