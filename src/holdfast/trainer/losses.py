"""The losses, over the log probabilities of the target tokens of one datum.

The loss of an operation is the sum over its datums and their tokens; `token_losses` keeps the
tokens apart. With `p` the log probabilities now, `q` those of the sampler (`logprobs`), `A` the
`advantages`, r = exp(p - q), and [low, high] the `clip_low_threshold` and `clip_high_threshold`:

    cross_entropy        -sum(weights * p)             targets and weights may be [N, K]
    importance_sampling  -sum(r * A)
    ppo                  -sum(min(r * A, clip(r) * A))
    cispo                -sum(sg(clip(r)) * p * A)
    dro                  -sum(p * A - beta / 2 * (p - q)^2)
    gspo                 -sum(min(s * A, clip(s) * A))

`sg` stops gradients. GSPO is its token form, as Tinker has it: s has at every token the value
of the ratio of the whole sequence, exp(mean of p - q over the tokens that
`sequence_ratio_mask` marks), and the gradient of that token's own p:
s_t = sg(ratio) * exp(p_t - sg(p_t)).

Sources: https://tinker-docs.thinkingmachines.ai/tinker/losses for all of them, arXiv 2507.18071
for GSPO. Thresholds bound the ratio itself, and are 0.8 and 1.2 unless given; that these are
GSPO's as well is our choice (its paper uses bounds a thousand times closer to 1: give them).
They come from the configuration, or per token among the inputs, which then win.

Where an advantage is 0 the ratio is taken as 1. The loss is the same, but a ratio that
overflows at a token that does not count (a prompt's) cannot make the sum NaN.
"""

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from holdfast.trainer.loss_inputs import CLIP_HIGH, CLIP_LOW, unsupported, validate
from holdfast.trainer.ops import Datum

__all__ = ["LOSSES", "inputs_of", "merge_metrics", "token_losses", "validate"]

Inputs = Mapping[str, Tensor]
Config = Mapping[str, float | str]
Metrics = dict[str, float]


def token_losses(
    name: str, logprobs: Tensor, inputs: Inputs, config: Config
) -> tuple[Tensor, Metrics]:
    """The loss of every token of a datum, differentiable in `logprobs`, and their metrics.

    `logprobs` has the shape of the datum's `target_tokens`; `inputs` and `config` have passed
    `validate`. Metrics are named `name:reduction`: `loss:sum` always, and for the losses that
    clip `clipped_tokens:sum`, the tokens with an advantage whose ratio is out of bounds.
    """
    if name not in LOSSES:
        raise unsupported(name)
    given = {key: value.to(logprobs) for key, value in inputs.items() if key != "target_tokens"}
    tokens, metrics = LOSSES[name](logprobs, given, config)
    return tokens, {"loss:sum": float(tokens.detach().sum()), **metrics}


def inputs_of(datum: Datum) -> dict[str, Tensor]:
    """The inputs of a datum as tensors of their own; numbers are float32, integers int64."""
    inputs = datum.inputs.items()
    return {name: torch.from_numpy(given.array().copy()) for name, given in inputs}


def merge_metrics(parts: Iterable[Mapping[str, float]]) -> Metrics:
    """The metrics of several datums as those of all. Losses have sums only.

    These do not depend on the order, so that ranks may finish in any.
    """
    lists: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            lists.setdefault(name, []).append(value)
    return {name: math.fsum(values) for name, values in lists.items()}


# ---- the losses -------------------------------------------------------------------


def _cross_entropy(now: Tensor, given: Inputs, _: Config) -> tuple[Tensor, Metrics]:
    weights = given.get("weights")
    return -(now if weights is None else now * weights), {}


def _importance_sampling(now: Tensor, given: Inputs, _: Config) -> tuple[Tensor, Metrics]:
    return -(_ratio(now, given) * given["advantages"]), {}


def _ppo(now: Tensor, given: Inputs, config: Config) -> tuple[Tensor, Metrics]:
    return _clipped_surrogate(_ratio(now, given), given, config)


def _cispo(now: Tensor, given: Inputs, config: Config) -> tuple[Tensor, Metrics]:
    ratio = _ratio(now, given).detach()
    clipped, metrics = _clip(ratio, given, config)
    return -(clipped * now * given["advantages"]), metrics


def _dro(now: Tensor, given: Inputs, config: Config) -> tuple[Tensor, Metrics]:
    penalty = 0.5 * float(config["beta"]) * (now - given["logprobs"]) ** 2
    return -(now * given["advantages"] - penalty), {}


def _gspo(now: Tensor, given: Inputs, config: Config) -> tuple[Tensor, Metrics]:
    marked = given["sequence_ratio_mask"] != 0
    fixed = now.detach()
    # Nothing marked and nothing to gain (`validate` has seen to that): any ratio will do.
    whole = (fixed - given["logprobs"])[marked].mean() if bool(marked.any()) else 0.0
    return _clipped_surrogate(_exp(whole + (now - fixed), given), given, config)


def _ratio(now: Tensor, given: Inputs) -> Tensor:
    return _exp(now - given["logprobs"], given)


def _exp(difference: Tensor, given: Inputs) -> Tensor:
    return torch.exp(torch.where(given["advantages"] == 0, 0.0, difference))


def _clipped_surrogate(ratio: Tensor, given: Inputs, config: Config) -> tuple[Tensor, Metrics]:
    advantages = given["advantages"]
    clipped, metrics = _clip(ratio, given, config)
    return -torch.minimum(ratio * advantages, clipped * advantages), metrics


def _clip(ratio: Tensor, given: Inputs, config: Config) -> tuple[Tensor, Metrics]:
    low = _threshold("clip_low_threshold", CLIP_LOW, ratio, given, config)
    high = _threshold("clip_high_threshold", CLIP_HIGH, ratio, given, config)
    outside = ((ratio < low) | (ratio > high)) & (given["advantages"] != 0)
    return torch.clamp(ratio, low, high), {"clipped_tokens:sum": float(outside.sum())}


def _threshold(name: str, default: float, ratio: Tensor, given: Inputs, config: Config) -> Tensor:
    if name in given:
        return given[name].expand_as(ratio)
    return torch.full_like(ratio, float(config.get(name, default)))


LOSSES: dict[str, Callable[[Tensor, Inputs, Config], tuple[Tensor, Metrics]]] = {
    "cross_entropy": _cross_entropy,
    "importance_sampling": _importance_sampling,
    "ppo": _ppo,
    "cispo": _cispo,
    "dro": _dro,
    "gspo": _gspo,
}
