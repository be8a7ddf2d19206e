"""The trainer is killed at a named point: the client only waits, and the end is the same.

Which points there are is asked of the catalogue, so that a new one cannot be forgotten. At
which of its hits a point kills is drawn from a seed, out of those of an undisturbed run.
"""

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from holdfast import faults
from trainer.kills.conftest import Reference, survive
from trainer.kills.story import STEPS, fired, trainer

SEED = 20
QUICK_STEPS = 6
QUICK = ("trainer.compute.after", "weights.publish.marked")
EARLY = 4
"""Hits are counted per process, and a life may be short."""
ELSEWHERE = ("rollout.", "run.", "shm.", "test.")
"""What other processes pass, not a trainer."""
NEVER = ("weights.acknowledge.before", "weights.acknowledge.after", "weights.pin.staged")
"""A trainer reads what it kept itself: it stages and acknowledges nothing."""
POINTS = [
    name for name in faults.catalogue() if not name.startswith(ELSEWHERE) and name not in NEVER
]


def _plan(
    points: Sequence[str], reference: Reference, steps: int, most: int = sys.maxsize
) -> list[str]:
    """A kill for each point, at a hit (of at `most` so many) in the first part of a run."""
    hits = reference(steps).hits
    missing = [name for name in points if not hits[name]]
    assert not missing, f"a trainer never passes {missing}"
    clauses = []
    for name in points:
        drawn = random.Random(f"{SEED} {name}").randrange(max(1, min(most, hits[name] * 3 // 4)))
        clauses.append(f"{name}:kill@{1 + drawn}!")
    return clauses


def _die(
    folder: Path, clauses: list[str], reference: Reference, steps: int, **policy: Any
) -> None:
    plan, log = ";".join(clauses), folder / "faults"
    print(f"seed {SEED}: {plan}")
    flags = (*trainer(plan, log), "--max-restarts", str(10 + len(clauses)))
    limit_s = 60.0 + 20.0 * len(clauses)
    _, epochs = survive(reference, folder, *flags, steps=steps, limit_s=limit_s, **policy)
    died = [f"{one.point}:{one.action}@{one.hit}!" for one in fired(log)]
    assert sorted(died) == sorted(clauses), "not every point was hit"
    assert epochs == 1 + len(clauses), "each kill ends one trainer, and nothing else does"


@pytest.mark.timeout(240)
def test_two_points(tmp_path: Path, reference: Reference) -> None:
    """One run, killed twice: done and not told, half published."""
    _die(tmp_path, _plan(QUICK, reference, QUICK_STEPS, EARLY), reference, QUICK_STEPS)


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("point", POINTS)
def test_a_point(tmp_path: Path, reference: Reference, point: str) -> None:
    """A kill at any one of all points changes nothing."""
    _die(tmp_path, _plan([point], reference, STEPS), reference, STEPS)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_all_points_in_one_run(tmp_path: Path, reference: Reference) -> None:
    """A run that dies at every point there is, recoveries too, comes to the same."""
    # Lives are short, so it is the first hit; and many die of the same operation.
    clauses = _plan(POINTS, reference, STEPS, most=1)
    _die(tmp_path, clauses, reference, STEPS, poison_deaths=100)


@pytest.mark.long
@pytest.mark.timeout(240)
def test_ranks_that_die_while_models_are_swapped(tmp_path: Path, reference: Reference) -> None:
    """Two ranks put models aside and bring them back in one order, killed or not: the same."""
    log = tmp_path / "faults"
    flag, command = trainer("trainer.aside.kept:kill@2!;trainer.restored:kill@4!", log)
    survive(reference, tmp_path, flag, command + " --ranks 2")
    assert fired(log)


def test_points_that_are_left_out_exist() -> None:
    """A point that was renamed is not left out unseen."""
    assert set(NEVER) < set(faults.catalogue())
