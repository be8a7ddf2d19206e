"""Clipping, thresholds, and tokens that do not count.

Values and gradients of all losses are compared with plain PyTorch in `sdk/test_reference.py`.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.trainer.losses import merge_metrics, token_losses

LENGTH = 12
CONFIG = {
    "ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3},
    "cispo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3},
    "gspo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
}


def drawn(seed: int, length: int = LENGTH) -> tuple[Tensor, dict[str, Tensor]]:
    """Log probabilities near the sampler's, so that some ratios are clipped and some not."""
    source = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(length, generator=source, dtype=torch.float64)

    sampler = -normal().abs()
    mask = (torch.rand(length, generator=source) < 0.7).double()
    mask[0] = 1.0
    inputs = {
        "logprobs": sampler,
        "advantages": normal() * mask,
        "sequence_ratio_mask": mask,
    }
    return sampler + 0.3 * normal(), inputs


def loss(name: str, now: Tensor, inputs: Any, config: Any) -> tuple[Tensor, dict[str, float]]:
    """The loss of all tokens together."""
    tokens, metrics = token_losses(name, now, inputs, config)
    assert tokens.shape == now.shape
    return tokens.sum(), metrics


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ["ppo", "cispo", "gspo"])
def test_tokens_out_of_bounds_are_counted(name: str, seed: int) -> None:
    """Those with an advantage whose ratio, or whose sequence's, is not between the thresholds."""
    now, inputs = drawn(seed)
    difference = now - inputs["logprobs"]
    if name == "gspo":
        difference[:] = difference[inputs["sequence_ratio_mask"] != 0].mean()
    low, high = CONFIG[name].values()
    outside = (difference.exp() < low) | (difference.exp() > high)
    _, metrics = loss(name, now, inputs, CONFIG[name])
    assert metrics["clipped_tokens:sum"] == float((outside & (inputs["advantages"] != 0)).sum())


@pytest.mark.parametrize("name", ["ppo", "cispo", "gspo"])
def test_thresholds_per_token_win(name: str) -> None:
    """Constant ones are the configuration's; one number serves the whole datum."""
    now, inputs = drawn(3)
    want, metrics = loss(name, now, inputs, CONFIG[name])
    low, high = CONFIG[name].values()
    for shape in ((LENGTH,), (1,), ()):
        clips = {
            "clip_low_threshold": torch.full(shape, low).double(),
            "clip_high_threshold": torch.full(shape, high).double(),
        }
        total, same = loss(name, now, inputs | clips, {"clip_low_threshold": 5.0})
        assert float(total) == pytest.approx(float(want), rel=1e-6)
        assert same["clipped_tokens:sum"] == metrics["clipped_tokens:sum"]
    wide = {
        "clip_high_threshold": torch.full((LENGTH,), 1e9),
        "clip_low_threshold": torch.zeros(1),
    }
    assert loss(name, now, inputs | wide, CONFIG[name])[1]["clipped_tokens:sum"] == 0


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "gspo"])
def test_tokens_that_do_not_count_cannot_spoil_the_sum(name: str) -> None:
    """A ratio that overflows where the advantage is 0 leaves loss and gradient finite."""
    now = torch.tensor([-0.5, -0.5], requires_grad=True)
    inputs = {
        "logprobs": torch.tensor([-1000.0, -0.5]),
        "advantages": torch.tensor([0.0, 1.0]),
        "sequence_ratio_mask": torch.tensor([0.0, 1.0]),
    }
    total, _ = loss(name, now, inputs, {})
    (gradient,) = torch.autograd.grad(total, now)
    assert math.isfinite(float(total.detach()))
    assert gradient.tolist() == [0.0, -1.0]


def test_metrics_of_many() -> None:
    """Exact sums, in any order."""
    parts = [{"a:sum": 1.0, "b:sum": 1.0}, {"a:sum": 1e100}, {"a:sum": 2.0}, {"a:sum": -1e100}]
    assert merge_metrics(parts) == merge_metrics(parts[::-1]) == {"a:sum": 3.0, "b:sum": 1.0}
