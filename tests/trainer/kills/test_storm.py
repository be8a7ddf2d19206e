"""kill -9 from outside, at seeded moments, again and again: the client only waits."""

import random
import time
from pathlib import Path

import pytest

from patience import until
from trainer.house import House
from trainer.kills.conftest import Reference, survive
from trainer.kills.story import Audit

SEED = 5
DELAY_S = 0.15
START_S = 4.0
TWICE = 0.2
"""How likely a trainer that has just been started is killed as well."""


def _kill(there: House) -> None:
    until(lambda: bool(there.service.processes("holdfast.trainer")), "there is a trainer", 30)
    there.kill_trainer()


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("kills", "steps"), [(5, 6), (50, 30)])
def test_kills(tmp_path: Path, reference: Reference, kills: int, steps: int) -> None:
    """A run that dies five times, and a longer one that dies fifty times: same results, same
    weights, nothing done twice."""
    rng = random.Random(SEED)
    expected = reference(steps).told
    results = sorted(rng.sample(range(1, len(expected.kinds) - 3), kills))
    limit_s = 60.0 + 15.0 * kills
    print(f"seed {SEED}: after results {results}")
    done: list[int] = []

    def meanwhile(there: House, audit: Audit) -> None:
        for count in results:
            seen = audit.wait(count)
            time.sleep(rng.uniform(0.0, DELAY_S))
            _kill(there)
            done.append(seen)
            if rng.random() < TWICE and len(done) < kills:
                time.sleep(rng.uniform(0.0, START_S))
                _kill(there)
                done.append(seen)
            if len(done) >= kills:
                return

    flags = ("--max-restarts", str(10 + kills))
    terms, epochs = survive(
        reference, tmp_path, *flags, meanwhile=meanwhile, steps=steps, limit_s=limit_s
    )
    print(f"killed after {done} results; {terms} of {epochs} trainers took the seat")
    assert len(done) == kills
    assert epochs == 1 + kills
