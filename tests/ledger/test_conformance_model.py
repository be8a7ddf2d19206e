"""Every back end behaves like the naive model, call by call."""

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from .conformance import Conformance


def _run(url: str, examples: int, steps: int, *, fixed: bool) -> None:
    run_state_machine_as_test(
        lambda: Conformance(url),  # type: ignore[arg-type]  # anything that makes a machine
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=fixed,
            database=None,
            print_blob=True,
            # Making a failure small takes minutes; the long test has them.
            phases=[Phase.generate] if fixed else [Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_random_calls_are_answered_like_the_model(ledger_url: str) -> None:
    """Reads, old reads, pages, transactions, leases, watches and compaction: as the model."""
    _run(ledger_url, 12 if ledger_url.startswith("etcd") else 25, 40, fixed=True)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_many_more_random_calls_are_answered_like_the_model(ledger_url: str) -> None:
    """The same with new random calls every time."""
    _run(ledger_url, 150 if ledger_url.startswith("etcd") else 600, 60, fixed=False)
