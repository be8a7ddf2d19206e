"""What people see in a terminal, and in a file."""

import io
import os
import pty
import re
import threading
from pathlib import Path

import pytest
from rich.console import Console

from holdfast.views.drawing import draw, sparkline
from holdfast.views.picture import Picture
from holdfast.views.tail import look
from holdfast.views.terminal import Viewer
from patience import HANG_S

from .logs import House, picture_of, storm, told


def lines_of(folder: Path, since: float = 0.0) -> list[str]:
    """What a view of the run prints where there is no terminal."""
    out = io.StringIO()
    viewer = Viewer(folder, out=out, since=since)
    viewer.start()
    viewer.stop()
    return out.getvalue().splitlines()


def drawn(picture: Picture) -> str:
    """The picture as it is on a screen."""
    out = io.StringIO()
    Console(file=out, width=120, force_terminal=False).print(draw(picture))
    return out.getvalue()


def test_plain_lines(tmp_path: Path) -> None:
    """One line per step and per notable event; a death and its restart are one."""
    storm(tmp_path)
    lines = lines_of(tmp_path)
    assert lines[0] == "run demo: 30 steps, seed 7"
    assert "step  12/30  reward 0.42  exact 0.27  loss -0.042  (0.5 s)" in lines
    assert "replica-0 died (signal 9); started again after 0.3 s" in lines
    assert "chaos: kill trainer.rank1 in step 9 at trainer.save.kept" in lines
    assert "run demo: 30 steps, seed 7, goes on after step 17" in lines
    assert "eval   10  exact 0.16  reward 0.16  (64 held-out prompts)" in lines
    assert lines[-2].startswith("finished after step 30, weights 8a8042be")
    assert lines[-1] == "7 faults, 7 recoveries, 8.1 s lost"
    assert sum(line.startswith("step  ") for line in lines) == 30


def test_a_death_that_nothing_follows_is_told(tmp_path: Path) -> None:
    """A part that stays dead is a line of its own."""
    house = House(tmp_path)
    house.begin()
    house.kill("replica-1", back_s=3.0)
    house.train()
    lines = lines_of(tmp_path)
    assert "replica-1 died (signal 9)" in lines
    assert "replica-1 started again after 3.0 s" in lines


def test_a_run_that_goes_on_does_not_tell_its_past(tmp_path: Path) -> None:
    """Lines begin where the view was asked to begin; what is known is known all the same."""
    house = House(tmp_path)
    house.begin()
    house.train()
    house.wait(1.0)
    since = house.at
    house.begin(resumed=True)
    house.train()
    steps = [line for line in lines_of(tmp_path, since) if line.startswith(("run", "step"))]
    assert steps[0] == "run demo: 30 steps, seed 7, goes on after step 1"
    assert [line[:11] for line in steps[1:]] == ["step   2/30"]


def test_what_others_write_cannot_move_the_cursor() -> None:
    """Control characters and markup in events are shown as text."""
    evil = {"part": "x\x1b[2J[red]", "child": 3, "life": 1}
    shown = drawn(picture_of(told("part.started", 1.0, "super\x1b]0;visor", 2, **evil)))
    assert "\x1b" not in shown
    assert "[red]" in shown


def test_the_picture_has_everything(tmp_path: Path) -> None:
    """Step, curves, versions, members, queue, faults and events are on the screen; before the
    first event there is a picture too."""
    assert "waiting for its first event" in drawn(look(tmp_path / "not there yet"))
    storm(tmp_path, end=False)
    shown = drawn(look(tmp_path))
    for wanted in (
        "step 30/30",
        "reward",
        "▁",
        "█",
        "served by replica-0: 30, replica-1: 30",
        "trainer rank 1",
        "spares",
        "0 samples wait, 480 consumed",
        "faults 7, recovered 7, 8.1 s lost",
        "kill supervisor ×1 (2.6 s)",
        "step.trained",
    ):
        assert wanted in shown, wanted


def test_in_a_real_terminal(tmp_path: Path) -> None:
    """On a terminal the picture is drawn over and over, and ends with how it ended."""
    storm(tmp_path)
    master, slave = pty.openpty()
    said: list[bytes] = []

    def read() -> None:
        try:
            while data := os.read(master, 65536):
                said.append(data)
        except OSError:
            pass  # the other side has closed

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(slave, "w", encoding="utf-8") as out:
        viewer = Viewer(tmp_path, out=out)
        viewer.start()
        viewer.stop()
    reader.join(HANG_S)
    os.close(master)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", b"".join(said).decode())
    assert "step 30/30" in text
    assert "finished after step 30" in text


def test_a_reader_that_goes_away_hurts_nobody(tmp_path: Path) -> None:
    """When the output is closed the view falls silent, and still ends."""
    storm(tmp_path)
    inside, outside = os.pipe()
    os.close(inside)
    out = os.fdopen(outside, "w")
    viewer = Viewer(tmp_path, plain=True, out=out)
    viewer.start()
    viewer.stop()
    with pytest.raises(BrokenPipeError):
        out.close()


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([], ""),
        ([1.0], "▁"),
        ([0.0, 1.0], "▁█"),
        ([float("nan"), 0.0, 1.0], "▁█"),
        ([3.0, 3.0], "▁▁"),
    ],
)
def test_sparkline(values: list[float], line: str) -> None:
    """Low is low, high is high, and what is no number is left out."""
    assert sparkline(values) == line
    assert len(sparkline(values * 100, width=20)) in (0, 20)
