"""Following files: new ones, growing ones, torn ones, in the order of time."""

import json
import threading
from pathlib import Path

from holdfast.events import Event
from holdfast.views.picture import Picture
from holdfast.views.tail import Live, Tail
from holdfast.views.told import kind_of
from patience import HANG_S

from .logs import House

LIMIT_S = HANG_S


def line(at: float, kind: str = "a.b", **fields: object) -> bytes:
    return (
        json.dumps({"type": kind, "at": at, "process": "p", "pid": 7, **fields}).encode() + b"\n"
    )


def kinds(events: list[Event]) -> list[str]:
    return [kind_of(event) for event in events]


def test_files_that_appear_and_grow(tmp_path: Path) -> None:
    """Events are given once, whichever file they are in and whenever it appears."""
    clock = [100.0]
    tail = Tail(tmp_path, now=lambda: clock[0])
    assert tail.look() == []
    first = tmp_path / "events" / "a.jsonl"
    first.parent.mkdir()
    first.write_bytes(line(1, "a.one"))
    clock[0] += 2
    assert kinds(tail.look()) == ["a.one"]
    deep = tmp_path / "trainers" / "acct" / "job" / "events" / "r.jsonl"
    deep.parent.mkdir(parents=True)
    deep.write_bytes(line(3, "a.three"))
    with first.open("ab") as file:
        file.write(line(2, "a.two"))
    clock[0] += 2
    assert kinds(tail.look()) == ["a.two", "a.three"]
    clock[0] += 2
    assert tail.look() == []


def test_a_torn_line_waits_for_its_rest(tmp_path: Path) -> None:
    """Half a line is not an event, and is one when its other half has come."""
    path = tmp_path / "events" / "a.jsonl"
    path.parent.mkdir()
    whole = line(2, "a.two")
    path.write_bytes(line(1, "a.one") + whole[:20])
    tail = Tail(tmp_path)
    assert kinds(tail.look()) == ["a.one"]
    with path.open("ab") as file:
        file.write(whole[20:])
    assert kinds(tail.look()) == ["a.two"]
    assert tail.strange == 0


def test_a_torn_line_that_the_next_life_cuts_off(tmp_path: Path) -> None:
    """What a killed writer left half done never mixes with what its successor writes there."""
    path = tmp_path / "events" / "a.jsonl"
    path.parent.mkdir()
    path.write_bytes(line(1, "a.one") + line(2, "a.torn")[:-9])
    tail = Tail(tmp_path)
    assert kinds(tail.look()) == ["a.one"]
    path.write_bytes(line(1, "a.one") + line(3, "a.three", text="longer than what was there"))
    assert kinds(tail.look()) == ["a.three"]
    assert tail.strange == 0


def test_lines_that_are_no_events_are_counted(tmp_path: Path) -> None:
    """Rubbish in a log costs the rubbish."""
    path = tmp_path / "events" / "a.jsonl"
    path.parent.mkdir()
    path.write_bytes(b"\xff\xfe\n[1]\n{}\n" + line(1))
    tail = Tail(tmp_path)
    assert kinds(tail.look()) == ["a.b"]
    assert tail.strange == 3


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


def test_later_events_do_not_overtake(tmp_path: Path) -> None:
    """What is written while the files are being read waits for the next look."""
    clock = [10.0]
    for name, at in (("a", 10.5), ("b", 9.0)):
        path = tmp_path / "events" / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(line(at, f"{name}.x"))
    tail = Tail(tmp_path, now=lambda: clock[0])
    assert kinds(tail.look()) == ["b.x"]
    with (tmp_path / "events" / "b.jsonl").open("ab") as file:
        file.write(line(10.2, "b.y"))
    clock[0] = 10.7
    assert kinds(tail.look()) == ["b.y", "a.x"]


def test_a_silent_rank_is_a_member(tmp_path: Path) -> None:
    """A rank that never writes an event is known by its log, and leaves with its crew."""
    house = House(tmp_path)
    house.begin()
    path = tmp_path / "trainers" / "acct" / "train" / "events" / "e1-c1-r7-4242.jsonl"
    path.touch()
    picture = Picture()
    tail = Tail(tmp_path)
    for event in tail.look(everything=True):
        picture.take(event)
    assert picture.members.known["trainer rank 7"].lives[0].pid == 4242
    house.write.at = path.stat().st_mtime + 5
    house.kill_rank(1)
    for event in tail.look(everything=True):
        picture.take(event)
    assert picture.members.known["trainer rank 7"].lives[0].how == "stopped"


def test_live_follows_and_reads_the_rest(tmp_path: Path) -> None:
    """A live picture wakes who waits for it, and at the end has everything."""
    house = House(tmp_path)
    live = Live(tmp_path)
    live.start()
    try:
        house.begin()
        house.write.at = 1.0
        house.train()
        assert live.wait(0, LIMIT_S)
    finally:
        house.train()
        live.stop()
    assert live.picture.step == 2
    assert live.stopped
    assert not any(thread.name == "views.tail" for thread in threading.enumerate())
