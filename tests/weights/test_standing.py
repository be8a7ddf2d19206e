"""Where a replica stands: what it serves, and what its loading does next, as tables."""

from typing import Any

import pytest

from holdfast.contrib.fleets.standing import Standing, Step
from holdfast.weights.records import Target

IDLE = Target(phase="idle", allowed=(4,))
STAGING = Target(phase="staging", staging=5, allowed=(4,))
HOLDING = Target(phase="holding", staging=5, allowed=(4,))
SERVES: dict[str, Any] = {"acknowledged": 4, "loaded": 4, "open": True, "counts": True}


@pytest.mark.parametrize(
    ("target", "standing", "step"),
    [
        (Target(), {}, None),
        (IDLE, SERVES, None),
        (IDLE, {}, Step.STAGE),
        (IDLE, SERVES | {"loaded": None}, Step.STAGE),
        (IDLE, {"aside": 4}, Step.SWITCH),
        (IDLE, SERVES | {"aside": 5}, Step.DROP),
        (IDLE, {"aside": 4, "whole": False}, Step.DROP),
        (IDLE, SERVES | {"failed": 5}, Step.FORGIVE),
        (IDLE, {"failed": 4}, Step.STAGE),
        (STAGING, SERVES, Step.STAGE),
        (STAGING, SERVES | {"aside": 5}, None),
        (HOLDING, SERVES | {"aside": 5}, None),
        (HOLDING, SERVES, Step.STAGE),
    ],
)
def test_what_loading_does_next(target: Target, standing: Any, step: Step | None) -> None:
    """It stages what a round brings, and switches only to what may be served."""
    assert Standing(**standing).loading(target) is step


@pytest.mark.parametrize(
    "change",
    [{"open": False}, {"counts": False}, {"loaded": None}, {"loaded": 3}, {"acknowledged": None}],
)
def test_only_what_is_acknowledged_loaded_and_allowed_is_served(change: Any) -> None:
    """Each of the conditions alone shuts the door."""
    assert Standing(**SERVES).serving(IDLE) == 4
    assert Standing(**SERVES | change).serving(IDLE) is None
    assert Standing(**SERVES).serving(HOLDING) is None
    assert Standing(**SERVES).must_shut(HOLDING)


@pytest.mark.parametrize("change", [{"paused": True}, {"loaded": 3}])
def test_impossible_places_are_seen(change: Any) -> None:
    """An open door before a paused engine, or before one that holds something else."""
    Standing(**SERVES).validate()
    with pytest.raises(AssertionError):
        Standing(**SERVES | change).validate()
