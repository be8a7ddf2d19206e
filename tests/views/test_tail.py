"""Following files: new ones, growing ones, torn ones, in the order of time."""

import json
from pathlib import Path

import pytest

from holdfast.events import Event
from holdfast.views.tail import Tail
from holdfast.views.told import kind_of

from .logs import House, picture_of


def line(at: float, kind: str = "a.b", **fields: object) -> bytes:
    return (
        json.dumps({"type": kind, "at": at, "process": "p", "pid": 7, **fields}).encode() + b"\n"
    )


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log of a run, which is not there yet."""
    (tmp_path / "events").mkdir()
    return tmp_path / "events" / "a.jsonl"


def add(log: Path, *lines: bytes) -> None:
    with log.open("ab") as file:
        file.writelines(lines)


def kinds(events: list[Event]) -> list[str]:
    return [kind_of(event) for event in events]


def test_files_that_appear_and_grow(log: Path, tmp_path: Path) -> None:
    """Events are given once, whichever file they are in and whenever it appears."""
    clock = [100.0]
    tail = Tail(tmp_path, now=lambda: clock[0])
    assert tail.look() == []
    add(log, line(1, "a.one"))
    clock[0] += 2
    assert kinds(tail.look()) == ["a.one"]
    deep = tmp_path / "trainers" / "acct" / "job" / "events" / "r.jsonl"
    deep.parent.mkdir(parents=True)
    add(deep, line(3, "a.three"))
    add(log, line(2, "a.two"))
    clock[0] += 2
    assert kinds(tail.look()) == ["a.two", "a.three"]
    clock[0] += 2
    assert tail.look() == []


def test_a_torn_line_waits_for_its_rest(log: Path, tmp_path: Path) -> None:
    """Half a line is not an event, and is one when its other half has come. What a killed writer
    left half done never mixes with what its successor writes there."""
    whole = line(2, "a.two")
    add(log, line(1, "a.one"), whole[:20])
    tail = Tail(tmp_path)
    assert kinds(tail.look()) == ["a.one"]
    add(log, whole[20:], line(3, "a.torn")[:-9])
    assert kinds(tail.look()) == ["a.two"]
    rest = line(4, "a.four", text="longer than what was there")
    log.write_bytes(line(1, "a.one") + whole + rest)
    assert kinds(tail.look()) == ["a.four"]


def test_lines_that_are_no_events_are_left_out(log: Path, tmp_path: Path) -> None:
    """Rubbish in a log costs the rubbish."""
    add(log, b"\xff\xfe\n[1]\n{}\n", line(1))
    assert kinds(Tail(tmp_path).look()) == ["a.b"]


def test_links_are_not_followed(tmp_path: Path) -> None:
    """A link in a run's folder does not show files from elsewhere."""
    (tmp_path / "secret.jsonl").write_bytes(line(1))
    run = tmp_path / "run"
    (run / "events").mkdir(parents=True)
    (run / "events" / "a.jsonl").symlink_to(tmp_path / "secret.jsonl")
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "b.jsonl").write_bytes(line(1))
    (run / "elsewhere").symlink_to(tmp_path)
    (run / "deep").mkdir()
    (run / "deep" / "events").symlink_to(tmp_path / "events")
    assert Tail(run).look(everything=True) == []


def test_later_events_do_not_overtake(log: Path, tmp_path: Path) -> None:
    """What is written while the files are being read waits for the next look."""
    clock = [10.0]
    other = log.with_name("b.jsonl")
    add(log, line(10.5, "a.x"))
    add(other, line(9.0, "b.x"))
    tail = Tail(tmp_path, now=lambda: clock[0])
    assert kinds(tail.look()) == ["b.x"]
    add(other, line(10.2, "b.y"))
    clock[0] = 10.7
    assert kinds(tail.look()) == ["b.y", "a.x"]


def test_a_silent_rank_is_a_member(tmp_path: Path) -> None:
    """A rank that never writes an event is known by its log, and leaves with its crew."""
    house = House(tmp_path)
    house.begin()
    path = tmp_path / "trainers" / "acct" / "train" / "events" / "e1-c1-r7-4242.jsonl"
    path.touch()
    tail = Tail(tmp_path)
    picture = picture_of(*tail.look(everything=True))
    assert picture.members.known["trainer rank 7"].lives[0].pid == 4242
    house.at = path.stat().st_mtime + 5
    house.kill_rank(1)
    for event in tail.look(everything=True):
        picture.take(event)
    assert picture.members.known["trainer rank 7"].lives[0].how == "stopped"
