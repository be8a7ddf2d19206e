"""What is told about a prompt: log probabilities of its tokens and of others at each place.

One pass over the prompt answers all of it, and none of it changes what is sampled. Place 0 is
never scored: nothing comes before it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from holdfast.engine.base import Tenant
from holdfast.engine.sampling import Shape, Stream, draw, top_logprobs
from holdfast.engine.scoring import token_logprobs

if TYPE_CHECKING:
    from holdfast.engine.generate import Settings

__all__ = ["ABSENT", "About", "TopK", "about_prompt", "blank"]

ABSENT = -99999.0
"""The log probability in a `TopK` where there is none; the token is 0. As in Tinker's SDK."""
_DRAWN = -1
"""The stream of random numbers for alternatives: continuations count theirs from 0."""

Floats = npt.NDArray[np.float32]


class TopK(msgspec.Struct, frozen=True):
    """Some tokens at each place: int32 and float32, both [places, k]."""

    tokens: npt.NDArray[np.int32]
    logprobs: Floats


class About(msgspec.Struct, frozen=True):
    """What was asked about a prompt.

    `logprobs` is float32 [prompt], NaN where a token was not scored. `targets` has one number for
    each target, in their order. `alternatives` begins with place 1: [prompt - 1, k].
    """

    logprobs: Floats | None = None
    topk: TopK | None = None
    targets: Floats | None = None
    alternatives: TopK | None = None


def about_prompt(tenant: Tenant, prompt: Sequence[int], asked: "Settings", seed: int) -> About:
    """Answer what is asked about a prompt; see `Settings`."""
    k, targets, count = asked.topk_prompt_logprobs, asked.targets, asked.alternatives
    if not (asked.prompt_logprobs or k or targets is not None or count):
        return About()
    tokens = torch.tensor([list(prompt)])
    # Row i of the logits is about place i + 1.
    logits = torch.empty(0, 1)
    if len(prompt) > 1:
        logits = tenant.logits(tokens, torch.ones_like(tokens))[0, :-1].float().cpu()
    scored = topk = None
    if asked.prompt_logprobs or k:
        scored, topk = _scored(logits, tokens[0], asked.prompt_logprobs_last_n, k)
    return About(
        scored,
        topk if k else None,
        None if targets is None else _told(logits, targets),
        _drawn(logits, count, asked.temperature, seed) if count else None,
    )


def _scored(
    logits: torch.Tensor, tokens: torch.Tensor, last_n: int | None, k: int
) -> tuple[Floats, TopK]:
    length = len(tokens)
    logprobs = np.full(length, np.nan, np.float32)
    topk = blank(length, k)
    first = max(1, 0 if last_n is None else length - last_n)
    if first < length:
        wanted = logits[first - 1 :]
        logprobs[first:] = token_logprobs(wanted, tokens[first:]).numpy()
        if k:
            likeliest, values = top_logprobs(torch.log_softmax(wanted, dim=-1), k)
            topk.tokens[first:, : likeliest.shape[1]] = likeliest.numpy()
            topk.logprobs[first:, : values.shape[1]] = values.numpy()
    return logprobs, topk


def _told(logits: torch.Tensor, targets: npt.NDArray[np.int64]) -> Floats:
    places, tokens = torch.from_numpy(targets).unbind(-1)
    found: Floats = torch.log_softmax(logits, dim=-1)[places - 1, tokens].numpy()
    return found


def _drawn(logits: torch.Tensor, count: int, temperature: float, seed: int) -> TopK:
    """Draws with replacement from the distribution at each place."""
    found = blank(len(logits), count)
    stream, shape = Stream(seed, _DRAWN), Shape(temperature=temperature)
    for place, row in enumerate(logits):
        numbers = torch.tensor([stream.next() for _ in range(count)], dtype=torch.float64)
        chosen = draw(row.expand(count, -1), numbers, shape)
        found.tokens[place] = chosen.numpy()
        found.logprobs[place] = torch.log_softmax(row, dim=-1)[chosen].numpy()
    return found


def blank(places: int, k: int) -> TopK:
    """Places without tokens."""
    return TopK(np.zeros((places, k), np.int32), np.full((places, k), ABSENT, np.float32))
