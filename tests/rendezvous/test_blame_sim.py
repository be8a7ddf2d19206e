"""Blame in the simulation: protocols that leave it out are caught."""

import pytest

import broken
from holdfast.sim.runner import play


@pytest.mark.parametrize("name", ["blame", "reports", "mark"])
def test_every_broken_variant_is_caught(name: str) -> None:
    """Within a few schedules."""
    make = broken.find(f"rendezvous-broken-{name}")
    assert any(play(make, seed)[0] for seed in range(30))
