"""Which token comes next: pure functions on logits, with the random numbers given to them.

The distribution that is drawn from: logits divided by the temperature; then only the `top_k`
likeliest; then of these only the fewest likeliest that together have at least `top_p` of what
is left; then scaled to 1. Temperature 0 takes the likeliest token and needs no number. Among
equals the lower token number counts as the likelier.

**The log probability that is returned with a token** is the model's own, of the untouched
logits: temperature 1, nothing cut off. That is what Tinker gives, what vLLM gives unless told
otherwise, and what the trainer computes for the same token, so at temperature 1 without
cutting the ratio of the two is the importance weight. With another temperature or with
cutting it is not the log probability of the draw, and no importance weight follows from it.

One number in [0, 1) decides one draw, on the CPU and in float64. Each sequence has a stream of
them, seeded by the hash of (seed, index of the sample): torch's generator would keep 32 bits of
the seed only.
"""

import math

import msgspec
import numpy as np
import torch

from holdfast.engine.noise import seed_of
from holdfast.errors import Mistake

__all__ = ["Shape", "Stream", "distribution", "draw", "top_logprobs"]

MAX_TEMPERATURE = 100.0


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What is done to the model's distribution. `top_k` -1 (or 0) and `top_p` 1: nothing."""

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= MAX_TEMPERATURE:  # false for NaN
            raise Mistake(f"temperature={self.temperature}: between 0 and {MAX_TEMPERATURE}")
        if not 0.0 < self.top_p <= 1.0:
            raise Mistake(f"top_p={self.top_p}: more than 0, at most 1")
        if self.top_k < -1:
            raise Mistake(f"top_k={self.top_k}: at least 1, or -1 for all")


class Stream:
    """The random numbers of one sequence: the same for the same seed and index, everywhere."""

    def __init__(self, seed: int, index: int) -> None:
        words = [seed_of("sample", half, seed, index) for half in (0, 1)]
        self._bits = np.random.PCG64(words)

    def next(self) -> float:
        """The next number in [0, 1)."""
        return float(int(self._bits.random_raw()) >> 11) * 2.0**-53


def distribution(logits: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Logits [B, V] to the probabilities [B, V], float64, that tokens are drawn with."""
    logits = _usable(logits)
    if shape.temperature == 0.0:
        best = torch.from_numpy(np.argmax(logits.numpy(), axis=-1))
        return torch.nn.functional.one_hot(best, logits.shape[-1]).double()
    scaled = (logits - logits.amax(-1, keepdim=True)) / shape.temperature
    weights = torch.softmax(scaled, dim=-1)
    size = logits.shape[-1]
    k = shape.top_k if 0 < shape.top_k < size else size
    if k == size and shape.top_p == 1.0:
        return weights
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    ordered[:, k:] = 0.0
    if shape.top_p < 1.0:
        # A token stays if those before it do not have enough together; so the first stays.
        before = torch.nn.functional.pad(ordered.cumsum(-1)[:, :-1], (1, 0))
        ordered[before >= shape.top_p * ordered.sum(-1, keepdim=True)] = 0.0
    kept = torch.zeros_like(weights).scatter_(-1, order, ordered)
    return kept / kept.sum(-1, keepdim=True)


def draw(logits: torch.Tensor, numbers: torch.Tensor, shape: Shape) -> torch.Tensor:
    """One token per row of logits [B, V]: numbers [B] in [0, 1), float64, decide. int64 [B]."""
    probabilities = distribution(logits, shape)
    rising = probabilities.cumsum(-1)
    # Scaled to what the sum came to, which no number below 1 reaches, even when rounded.
    # `right`: a token without probability is never the answer.
    points = numbers.unsqueeze(-1) * rising[:, -1:]
    return torch.searchsorted(rising, points, right=True).squeeze(-1)


def top_logprobs(logprobs: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `k` likeliest of log probabilities [..., V]: tokens and values [..., k], in order."""
    values, tokens = logprobs.sort(dim=-1, descending=True, stable=True)
    return tokens[..., :k], values[..., :k]


def _usable(logits: torch.Tensor) -> torch.Tensor:
    """As float64 on the CPU. A model that has diverged is told, not sampled from."""
    logits = logits.detach().double().cpu()
    best = logits.amax(-1)
    if not math.isfinite(float(best.sum())):
        raise Mistake(
            "the model's logits are not finite numbers: its weights have diverged. Load an "
            "earlier version, and train with a lower learning rate"
        )
    return logits
