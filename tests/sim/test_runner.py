"""The simulator: it replays exactly, and does what it is told to."""

import subprocess
import sys

import pytest

from holdfast.ledger import election, records
from holdfast.sim import protocols
from holdfast.sim.faults import APPLIES, Fault, Table
from holdfast.sim.protocols import election as simulated
from holdfast.sim.runner import search
from holdfast.sim.world import World

TELL = """
import re, sys
from holdfast.sim.protocols import find
from holdfast.sim.world import World
world = World(find(sys.argv[1])(), int(sys.argv[2]), trace=True)
print(world.play())
for line in world.story:
    print(re.sub('"pid":[0-9]+', "", repr(line)))
print(sorted(world.files.tree().items()))
"""


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("election", 0),
        ("election", 7),
        ("election", 123456789),
        ("routes", 5),
        ("routes", 1538367380),
        ("run", 2),
        ("weights", 27),
    ],
)
def test_a_seed_is_the_same_story_in_every_process(name: str, seed: int) -> None:
    """Nothing but the seed decides: not the hash seed, not the memory layout, not time."""
    told = {
        subprocess.run(
            [sys.executable, "-c", TELL, name, str(seed)],
            env={"PYTHONHASHSEED": hash_seed, "PATH": ""},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for hash_seed in ("0", "1", "4242")
    }
    assert len(told) == 1
    assert len(told.pop().splitlines()) > 20


def test_the_simulation_runs_production_code() -> None:
    """Not a copy of it."""
    assert simulated.ElectionProtocol()._election is election.Election
    assert vars(simulated)["update"] is records.update


def test_a_fault_that_never_fired_is_found() -> None:
    """The table names every pair of fault and step that could have met and did not."""
    table = Table()
    table.steps["txn.sent"] = 10
    assert set(table.never_fired()) == {
        (kind, "txn.sent") for kind, steps in APPLIES.items() if "txn.sent" in steps
    }
    for kind in APPLIES:
        table.fired[kind, "txn.sent"] = 1
    assert table.never_fired() == []


@pytest.mark.long
def test_every_fault_fires_at_every_kind_of_step() -> None:
    """300 schedules are enough for each fault to meet each kind of step."""
    for summary in search(protocols.find("election"), range(300)):
        assert summary.failure is None
    assert summary.table.never_fired() == []


def test_planned_faults_happen_where_they_are_planned() -> None:
    """A list of faults is carried out as written, and nothing else."""
    fault = Fault("n2", 9, "pause", 70.0)
    world = World(protocols.find("election")(), 1, faults=[fault], trace=True)
    assert world.play() is None
    assert world.fired == [fault]
    assert [what for _, who, what in world.story if who == "FAULT"] == [
        next(what for _, who, what in world.story if "hangs for 70.0 s" in what)
    ]
