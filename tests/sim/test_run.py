"""The simulated run: production code against a straight line."""

import re
import subprocess
import sys

import pytest

import broken
from holdfast.run.orchestrator import Orchestrator
from holdfast.run.pool import Pool
from holdfast.run.steps import Steps
from holdfast.sim import protocols
from holdfast.sim.protocols.run.model import RunProtocol, SimOrchestrator, _config
from holdfast.sim.protocols.run.parts import SimClient, SimPool, SimReplica
from holdfast.sim.protocols.run.reference import Reference
from holdfast.sim.protocols.run.toy import FLAKY
from holdfast.sim.runner import search, shortest
from holdfast.sim.world import World

TELL = """
import re, sys
from holdfast.sim.protocols import find
from holdfast.sim.world import World
world = World(find("run")(), int(sys.argv[1]), trace=True)
print(world.play())
for line in world.story:
    print(re.sub('"pid":[0-9]+', "", repr(line)))
"""


def test_the_sound_protocol_holds() -> None:
    """Some schedules here; hundreds in `make test`, thousands in `make test-long`."""
    for summary in search(protocols.find("run"), range(12)):
        assert summary.failure is None, summary.failure
    assert summary.steps > 12 * 1000


def test_a_calm_run_is_the_straight_line() -> None:
    """Without any fault, too, everything that is recorded is what the reference says."""
    for seed in range(0, 9, 2):
        protocol = RunProtocol()
        assert World(protocol, seed, faults=[]).play() is None
        assert len(protocol._reference.contents) == protocol._config.steps + 1
        assert f"done/{protocol._config.steps:08}" in protocol._witness.records


@pytest.mark.long
def test_a_failure_is_told_with_the_faults_that_it_takes() -> None:
    """New numbers for an old step take a successor, and so a fault: the story has few of them."""
    make = broken.find("run-broken-numbers")
    failure = next(one.failure for one in search(make, range(1000)) if one.failure)
    short = shortest(make, failure)
    assert len(short.faults) <= len(failure.faults)
    assert short.story[-1][2].startswith("BROKEN")


def test_a_seed_is_the_same_story_in_every_process() -> None:
    """Nothing but the seed decides: not the hash seed, not the memory layout, not time."""
    told = {
        subprocess.run(
            [sys.executable, "-c", TELL, "2"],
            env={"PYTHONHASHSEED": hash_seed, "PATH": ""},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for hash_seed in ("0", "4242")
    }
    assert len(told) == 1
    assert len(told.pop().splitlines()) > 100


def test_damaged_values_are_made_again() -> None:
    """Values of committed steps flip bits; groups are made again, and the bits are the same."""
    repaired = 0
    for seed in range(40):
        protocol = RunProtocol()
        world = World(protocol, seed, trace=True)
        assert world.play() is None
        flipped = any(re.search("flips a bit", what) for _, _, what in world.story)
        repaired += bool(flipped and protocol._repaired)
        if repaired:
            break
    assert repaired


def test_the_reference_depends_on_everything() -> None:
    """Other seeds, other versions and other groups are other weights, from there on for ever."""

    def contents(seed: int, lag: int, dropped: dict[int, tuple[int, ...]]) -> list[str]:
        reference = Reference(_config(seed, 4, lag))
        for step in range(1, 5):
            reference.step(step, dropped.get(step, ()))
        return reference.contents

    one = contents(0, 0, {})
    assert contents(0, 0, {}) == one
    assert contents(1, 0, {})[1:] != one[1:]
    lagging = contents(0, 1, {})
    assert [a == b for a, b in zip(one, lagging, strict=True)] == [True, True, False, False, False]
    assert contents(0, 0, {1: (0,), 2: (0,)}) == one, "group 0 never fails: nobody may drop it"
    seed, step = next(
        (seed, step)
        for seed in range(20)
        for step in range(1, 5)
        if Reference(_config(seed, 4, 0)).luck(step, 1) == FLAKY
    )
    assert contents(seed, 0, {step: (1,)})[step:] != contents(seed, 0, {})[step:]


def test_the_simulation_runs_production_code() -> None:
    """What decides is the run's own; only how bytes travel, and clocks, are others."""
    assert RunProtocol()._records is Steps
    for name in ("_run", "_group", "_claim", "_train", "_commit", "_data", "_learn", "_publish"):
        assert getattr(SimOrchestrator, name) is getattr(Orchestrator, name)
    assert SimPool.make is Pool.make
    assert "submit" not in vars(SimClient)
    assert "_poll" not in vars(SimClient)
    assert "_repair" not in vars(SimReplica)
