"""What an undisturbed run comes to: once for all tests of a worker."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from holdfast import faults
from trainer.house import house
from trainer.kills.story import POLICY, STEPS, Audit, Meanwhile, Told, fired, tell, trainer

Reference = Callable[[int], "Undisturbed"]


@dataclass(frozen=True)
class Undisturbed:
    """A run that nothing happened to."""

    told: Told
    hits: Counter[str]
    """How often it passed each fault point."""


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """What so many steps come to."""

    @cache
    def run(steps: int) -> Undisturbed:
        folder = tmp_path_factory.mktemp("reference")
        log = folder / "hits"
        points = [name for name in faults.catalogue() if not name.startswith("test.")]
        plan = ";".join(f"{name}:delay=0@1+" for name in points)
        with house(folder, *trainer(plan, log), policy=POLICY) as there, Audit(there) as audit:
            told = tell(there, audit, steps=steps)
        assert told.terms == 1
        return Undisturbed(told, Counter(one.point for one in fired(log)))

    return run


def survive(
    reference: Reference,
    folder: Path,
    *flags: str,
    meanwhile: Meanwhile = lambda *_: None,
    url: str = "",
    steps: int = STEPS,
    limit_s: float = 120.0,
    **policy: Any,
) -> tuple[int, int]:
    """Have the work done while something happens to its trainer: it must come to the same.

    Returns how many trainers took the seat, and how many were started.
    """
    expected = reference(steps).told
    with (
        house(folder, *flags, policy=POLICY | policy, ledger=url or None) as there,
        Audit(there, url) as audit,
    ):
        told = tell(there, audit, meanwhile, steps=steps, limit_s=limit_s)
        epochs = there.epoch()
    told.check(expected)
    return told.terms, epochs
