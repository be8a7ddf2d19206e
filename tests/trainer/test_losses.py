"""The losses against their formulas, written down again in float64 and tried out."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.trainer.losses import LOSSES, merge_metrics, token_losses

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


def reference(name: str, now: Any, given: dict[str, Any], config: Any) -> float:
    """The formulas of the documentation, token by token, in plain Python."""
    low, high = config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2)
    total = 0.0
    marked = [t for t in range(len(now)) if given["sequence_ratio_mask"][t]]
    whole = math.exp(sum(now[t] - given["logprobs"][t] for t in marked) / max(1, len(marked)))
    for t, p in enumerate(now):
        old, advantage = given["logprobs"][t], given["advantages"][t]
        ratio = whole if name == "gspo" else math.exp(p - old)
        clipped = min(max(ratio, low), high)
        total += {
            "cross_entropy": p * given["weights"][t],
            "importance_sampling": ratio * advantage,
            "ppo": min(ratio * advantage, clipped * advantage),
            "gspo": min(ratio * advantage, clipped * advantage),
            "cispo": clipped * p * advantage,
            "dro": p * advantage - 0.5 * config.get("beta", 0) * (p - old) ** 2,
        }[name]
    return -total


def loss(name: str, now: Tensor, inputs: Any, config: Any) -> tuple[Tensor, dict[str, float]]:
    """The loss of all tokens together."""
    tokens, metrics = token_losses(name, now, inputs, config)
    assert tokens.shape == now.shape
    return tokens.sum(), metrics


def needed(name: str, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"weights": inputs["weights"]} if name == "cross_entropy" else inputs


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", LOSSES)
def test_the_value_is_that_of_the_formula(name: str, seed: int) -> None:
    """In float64 to twelve digits, and in float32 as far as that goes."""
    now, inputs = drawn(seed)
    lists = {key: value.tolist() for key, value in inputs.items()}
    want = reference(name, now.tolist(), lists, CONFIG[name])
    total, metrics = loss(name, now, needed(name, inputs), CONFIG[name])
    assert float(total) == pytest.approx(want, rel=1e-12)
    assert metrics["loss:sum"] == float(total)
    total, _ = loss(name, now.float(), needed(name, inputs), CONFIG[name])
    assert total.dtype == torch.float32
    assert float(total) == pytest.approx(want, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling", "ppo", "dro"])
def test_gradients_by_finite_differences(name: str, seed: int) -> None:
    """The gradient is the slope of the value, for losses that stop no gradient."""
    now, inputs = drawn(seed)
    now.requires_grad_(True)
    total, _ = loss(name, now, needed(name, inputs), CONFIG[name])
    (gradient,) = torch.autograd.grad(total, now)
    step = 1e-6
    for at in range(LENGTH):
        ends = []
        for sign in (1, -1):
            moved = now.detach().clone()
            moved[at] += sign * step
            ends.append(float(loss(name, moved, needed(name, inputs), CONFIG[name])[0]))
        slope = (ends[0] - ends[1]) / (2 * step)
        assert float(gradient[at]) == pytest.approx(slope, abs=1e-6), (seed, at)


@pytest.mark.parametrize("seed", range(5))
def test_cispos_gradient(seed: int) -> None:
    """-clip(r) * A at every token, also where the ratio is clipped."""
    now, inputs = drawn(seed)
    now.requires_grad_(True)
    total, metrics = loss("cispo", now, inputs, CONFIG["cispo"])
    (gradient,) = torch.autograd.grad(total, now)
    ratio = torch.exp(now.detach() - inputs["logprobs"])
    torch.testing.assert_close(gradient, -ratio.clamp(0.9, 1.3) * inputs["advantages"])
    outside = ((ratio < 0.9) | (ratio > 1.3)) & (inputs["advantages"] != 0)
    assert metrics["clipped_tokens:sum"] == float(outside.sum())


@pytest.mark.parametrize("seed", range(5))
def test_gspos_gradient(seed: int) -> None:
    """-s * A at every token for itself, unless the bound holds for the sign of its A."""
    now, inputs = drawn(seed)
    now.requires_grad_(True)
    total, metrics = loss("gspo", now, inputs, CONFIG["gspo"])
    (gradient,) = torch.autograd.grad(total, now)
    marked = inputs["sequence_ratio_mask"] != 0
    ratio = float(torch.exp((now.detach() - inputs["logprobs"])[marked].mean()))
    advantages = inputs["advantages"]
    bound = (advantages > 0) if ratio > 1.1 else (advantages < 0)
    stopped = bound if not 0.9 <= ratio <= 1.1 else torch.zeros(LENGTH, dtype=torch.bool)
    want = torch.where(stopped, torch.zeros(()).double(), -ratio * advantages)
    torch.testing.assert_close(gradient, want)
    clipped = int((advantages != 0).sum()) if not 0.9 <= ratio <= 1.1 else 0
    assert metrics["clipped_tokens:sum"] == clipped


def test_gspo_with_a_mask_of_one_token_is_ppo_there() -> None:
    """A sequence of one token has that token's ratio."""
    now, inputs = drawn(1, 1)
    inputs["sequence_ratio_mask"] = torch.ones(1).double()
    assert float(loss("gspo", now, inputs, {})[0]) == float(loss("ppo", now, inputs, {})[0])


@pytest.mark.parametrize("name", ["ppo", "cispo", "gspo"])
def test_thresholds_per_token_win(name: str) -> None:
    """Constant ones are the configuration's; one number serves the whole datum."""
    now, inputs = drawn(3)
    want, metrics = loss(name, now, inputs, CONFIG[name])
    low, high = (float(CONFIG[name][f"clip_{end}_threshold"]) for end in ("low", "high"))
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
    """Each by the reduction in its name, in any order."""
    parts = [
        {"a:sum": 1.0, "b:mean": 1.0, "c:max": 1.0, "d:min": 1.0},
        {"a:sum": 1e100},
        {"a:sum": 2.0, "b:mean": 2.0, "c:max": 3.0, "d:min": -1.0},
        {"a:sum": -1e100},
    ]
    want = {"a:sum": 3.0, "b:mean": 1.5, "c:max": 3.0, "d:min": -1.0}
    assert merge_metrics(parts) == merge_metrics(parts[::-1]) == want
