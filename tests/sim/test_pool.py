"""Schedules on several cores: the same result as one after the other, and nothing left over."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import broken
from holdfast.sim.pool import Pool
from holdfast.sim.runner import Summary


def _last(jobs: int, name: str, seeds: range) -> Summary:
    with Pool(broken.find, jobs) as pool:
        *_, last = pool.search(name, seeds)
    return last


@pytest.mark.parametrize(
    ("name", "seeds"), [("election", range(5, 65)), ("election-broken-guard", range(1000))]
)
def test_many_processes_tell_the_same_as_one(name: str, seeds: range) -> None:
    """The counts of a sound protocol, and of a broken one the failure with the lowest seed."""
    one, three = _last(1, name, seeds), _last(3, name, seeds)
    assert three.failure == one.failure
    if one.failure is None:
        assert (three.schedules, three.steps) == (one.schedules, one.steps) == (60, one.steps)
        assert three.table.fired == one.table.fired


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("children", [1, 2, 3])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_players_end_with_the_command(number: signal.Signals, children: int) -> None:
    """Ctrl-C and kill -9 leave nobody behind who plays on, also while the players are started."""
    command = subprocess.Popen(
        [sys.executable, "-m", "holdfast", "sim", "election", "--seeds", "100000", "--jobs", "2"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        limit = time.monotonic() + 30
        while len(players := _children(command.pid)) < children:  # a tracker, then the players
            assert time.monotonic() < limit
            assert command.poll() is None
            time.sleep(0.001)
        command.send_signal(number)
        _, said = command.communicate(timeout=30)
        assert number == signal.SIGKILL or b"Traceback" not in said
        while any(Path(f"/proc/{pid}").exists() for pid in players):
            assert time.monotonic() < limit
            time.sleep(0.05)
    finally:
        command.kill()
