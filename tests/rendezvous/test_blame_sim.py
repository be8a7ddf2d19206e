"""Blame in the simulation: protocols that leave it out are caught."""

import pytest

import broken
from holdfast.sim.runner import play


@pytest.mark.parametrize("name", ["blame", "reports", "mark"])
def test_every_broken_variant_is_caught(name: str) -> None:
    """About one schedule in forty shows the rarest of them."""
    make = broken.find(f"rendezvous-broken-{name}")
    assert any(play(make, seed)[0] for seed in range(400))
