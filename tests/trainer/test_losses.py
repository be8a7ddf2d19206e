"""The losses against their formulas, as a page of plain PyTorch has them (`sdk/reference.py`)."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.trainer.losses import LOSSES, merge_metrics, token_losses
from trainer.sdk import reference

LENGTH = 12
CONFIG: dict[str, dict[str, float | str]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3},
    "cispo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3},
    "dro": {"beta": 0.3},
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
        "weights": normal(),
    }
    return sampler + 0.3 * normal(), inputs


def loss(name: str, now: Tensor, inputs: Any, config: Any) -> tuple[Tensor, dict[str, float]]:
    """The loss of all tokens together."""
    tokens, metrics = token_losses(name, now, inputs, config)
    assert tokens.shape == now.shape
    return tokens.sum(), metrics


def numbers(name: str) -> dict[str, float]:
    return {key: float(value) for key, value in CONFIG[name].items()}


def needed(name: str, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"weights": inputs["weights"]} if name == "cross_entropy" else inputs


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient_are_those_of_the_formula(name: str, seed: int) -> None:
    """In float64 to twelve digits, and in float32 as far as that goes."""
    now, inputs = drawn(seed)
    mine, theirs = (now.clone().requires_grad_(True) for _ in range(2))
    want = reference.loss(name, theirs, inputs, numbers(name))
    total, metrics = loss(name, mine, needed(name, inputs), CONFIG[name])
    (gradient,), (wanted,) = torch.autograd.grad(total, mine), torch.autograd.grad(want, theirs)
    torch.testing.assert_close(gradient, wanted)
    assert total.item() == pytest.approx(want.item(), rel=1e-12)
    assert metrics["loss:sum"] == total.item()
    total, _ = loss(name, now.float(), needed(name, inputs), CONFIG[name])
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(want.item(), rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ["ppo", "cispo", "gspo"])
def test_tokens_out_of_bounds_are_counted(name: str, seed: int) -> None:
    """Those with an advantage whose ratio, or whose sequence's, is not between the thresholds."""
    now, inputs = drawn(seed)
    difference = now - inputs["logprobs"]
    if name == "gspo":
        difference[:] = difference[inputs["sequence_ratio_mask"] != 0].mean()
    low, high = numbers(name).values()
    outside = (difference.exp() < low) | (difference.exp() > high)
    _, metrics = loss(name, now, inputs, CONFIG[name])
    assert metrics["clipped_tokens:sum"] == float((outside & (inputs["advantages"] != 0)).sum())


@pytest.mark.parametrize("name", ["ppo", "cispo", "gspo"])
def test_thresholds_per_token_win(name: str) -> None:
    """Constant ones are the configuration's; one number serves the whole datum."""
    now, inputs = drawn(3)
    want, metrics = loss(name, now, inputs, CONFIG[name])
    low, high = numbers(name).values()
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


def test_candidates_for_every_position() -> None:
    """[N, K] targets: the weighted sum over all of them, which custom losses are made of."""
    now = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    now.requires_grad_(True)
    total, _ = loss("cross_entropy", now, {"weights": weights}, {})
    (gradient,) = torch.autograd.grad(total, now)
    torch.testing.assert_close(gradient, -weights)
    plain, _ = loss("cross_entropy", now.detach(), {}, {})
    assert float(plain) == pytest.approx(-float(now.detach().sum()))


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
