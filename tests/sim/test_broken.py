"""Protocols with one mistake each are caught, and the story of each is as short as can be."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import broken
from broken.variant import Make
from holdfast.sim import protocols
from holdfast.sim.runner import Failure, play, search, shortest
from holdfast.sim.world import World

RARE = "run-broken-old-news"
"""Shows only when somebody sleeps for just as long as it takes."""
RUNS = [
    pytest.param(name, marks=[pytest.mark.long, pytest.mark.timeout(600)] if name == RARE else [])
    for name in broken.names("run")
]


def _caught(make: Make) -> Failure:
    """The failure of the first seed of 1,000 that breaks it; its seed replays it exactly."""
    failure = next((one.failure for one in search(make, range(1000)) if one.failure), None)
    assert failure is not None, "not caught within 1,000 seeds"
    again, _ = play(make, failure.seed)
    assert again is not None
    assert again.violation == failure.violation
    return failure


@pytest.mark.parametrize("protocol", protocols.names())
def test_every_protocol_has_at_least_five(protocol: str) -> None:
    """And each says in one sentence what is wrong with it."""
    names = broken.names(protocol)
    assert len(names) >= 5
    assert all(broken.about(name).endswith(".") for name in names)


@pytest.mark.parametrize("name", RUNS)
def test_every_mistake_in_the_run_is_caught(name: str) -> None:
    """Those of the other protocols: `python -m broken`, some in every `make test`."""
    _caught(broken.find(name))


@pytest.mark.parametrize("variant", ["sync", "parent"])
def test_a_missing_sync_shows_when_the_power_is_lost(variant: str) -> None:
    """No other fault tells what was synced from what was not."""
    make = broken.find(f"weights-broken-{variant}")
    short = shortest(make, _caught(make))
    assert "power" in {fault.kind for fault in short.faults}


@pytest.mark.long
@pytest.mark.parametrize("name", [*broken.names("election"), "run-broken-numbers"])
def test_of_the_faults_of_a_failure_none_can_be_left_out(name: str) -> None:
    make = broken.find(name)
    failure = _caught(make)
    short = shortest(make, failure)
    assert short.story[-1][2].startswith("BROKEN")
    for fault in short.faults:
        fewer = [other for other in short.faults if other is not fault]
        world = World(make(), failure.seed, faults=fewer)
        assert world.play() is None, f"{fault} could have been left out"


@pytest.mark.parametrize("variant", ["", "-lease", "-optimist"])
def test_without_faults_nothing_goes_wrong_where_it_takes_one(variant: str) -> None:
    """The violation comes from the fault, not from the simulation: no fault, no failure."""
    for seed in range(20):
        world = World(broken.find(f"election-broken{variant}")(), seed, faults=[])
        assert world.play() is None


@pytest.mark.long
def test_the_command_tells_a_story_and_how_to_replay_it() -> None:
    """Exit 1 for one variant that breaks, exit 0 when all that were played are caught."""

    def run(*words: str, code: int) -> list[str]:
        env = {**os.environ, "PYTHONPATH": str(Path(broken.__file__).parents[1])}
        command = [sys.executable, "-m", "broken", *words]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == code, done
        return done.stdout.splitlines()

    story = run("election-broken", code=1)
    assert "BROKEN" in story[0]
    replay = story[-1].removeprefix("Replay it: python -m broken ").split()
    assert run(*replay, code=1)[-2] in story
    caught = run("election", "--variants", "2", code=0)
    assert len(caught) == 3
    assert caught[-1] == "0 problems"
