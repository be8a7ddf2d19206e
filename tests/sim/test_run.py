"""The simulated run: production code against a straight line."""

from holdfast.run.orchestrator import Orchestrator
from holdfast.run.pool import Pool
from holdfast.run.steps import Steps
from holdfast.sim.protocols.run.model import RunProtocol, _config
from holdfast.sim.protocols.run.parts import SimClient, SimPool, SimReplica
from holdfast.sim.protocols.run.reference import Reference
from holdfast.sim.protocols.run.toy import FLAKY
from holdfast.sim.world import World


def test_a_calm_run_is_the_straight_line() -> None:
    """Without any fault, too, everything that is recorded is what the reference says."""
    for seed in range(0, 9, 2):
        protocol = RunProtocol()
        assert World(protocol, seed, faults=[]).play() is None
        assert len(protocol._reference.contents) == protocol._config.steps + 1
        assert f"done/{protocol._config.steps:08}" in protocol._witness.records


def test_damaged_values_are_made_again() -> None:
    """Values of committed steps flip bits; groups are made again, and the bits are the same."""
    repaired = 0
    for seed in range(40):
        protocol = RunProtocol()
        world = World(protocol, seed, trace=True)
        assert world.play() is None
        flipped = any("flips a bit" in what for _, _, what in world.story)
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
    assert RunProtocol()._orchestrator is Orchestrator
    assert SimPool.make is Pool.make
    assert "submit" not in vars(SimClient)
    assert "_poll" not in vars(SimClient)
    assert "_repair" not in vars(SimReplica)
