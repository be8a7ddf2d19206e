"""Advantages: pure functions of what a group earned."""

import numpy as np
import pytest

from holdfast.run.advantages import KINDS, advantages


def whole(*rewards: float, length: int = 3) -> "list[np.ndarray]":
    """Samples with one reward each."""
    return [np.full(length, reward) for reward in rewards]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("grpo", [1.0, -1.0, 1.0, -1.0]),
        ("dr_grpo", [0.5, -0.5, 0.5, -0.5]),
        ("rloo", [2 / 3, -2 / 3, 2 / 3, -2 / 3]),
    ],
)
def test_by_hand(kind: str, expected: list[float]) -> None:
    """Each kind gives what its paper says, to every token of a sample."""
    found = advantages(kind, whole(1.0, 0.0, 1.0, 0.0), per_token=False)
    for values, value in zip(found, expected, strict=True):
        assert values == pytest.approx(np.full(3, value), abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_no_difference_no_advantage(kind: str) -> None:
    """Samples that all earned the same teach nothing, whatever they earned."""
    found = advantages(kind, whole(0.7, 0.7, 0.7), per_token=False)
    assert np.concatenate(found) == pytest.approx(np.zeros(9), abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_per_token(kind: str) -> None:
    """A token is compared with the tokens of the others at its place, as far as they have one."""
    found = advantages(kind, [np.array([1.0, 0.0, 1.0]), np.array([1.0, 1.0])], per_token=True)
    assert [len(one) for one in found] == [3, 2]
    assert found[0][0] == found[1][0] == pytest.approx(0.0)
    assert found[0][1] < 0 < found[1][1]
    assert found[0][2] == pytest.approx(0.0)
