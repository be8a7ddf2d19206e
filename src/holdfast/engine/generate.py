"""Continuations of one prompt: one batch of a fixed shape, with a key-value cache.

- The prompt is read once and its cache repeated. Then each step reads one token of every
  sequence. All are of one length, so there is no padding and no mask.
- A sequence that is over keeps its place until all are. So the shapes, and with them the bits of
  every other sequence, do not depend on when it ended.
- The same tenant's weights, prompt, settings, number of samples and seed give the same bits, in
  this process and in the next. Another number of samples is another shape: the numbers drawn
  for sample i are the same, the logits only about.
- Asking for log probabilities of the prompt does not change what is sampled: they come from a
  pass of their own, the one that scores.
- It ends at `max_tokens` or at the model's context length, whichever comes first: "length".

What the log probabilities are: see `sampling`. What stops, and what of it is kept: `stopping`.
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from holdfast.engine.base import Tenant
from holdfast.engine.prompt import ABSENT, About, TopK, about_prompt, blank
from holdfast.engine.sampling import Shape, Stream, draw, top_logprobs
from holdfast.engine.scoring import token_logprobs
from holdfast.engine.stopping import Stop
from holdfast.errors import Mistake

__all__ = ["ABSENT", "About", "Continuation", "Generation", "Settings", "TopK", "generate"]

MAX_SAMPLES = 4096
MAX_TOP = 1024


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How to continue, and what to tell about it.

    `prompt_logprobs_last_n` limits `prompt_logprobs` and their top k to the last n tokens. The
    top k come with the log probabilities of the prompt's own tokens, asked for or not.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    stop_strings: Sequence[str] | None = None
    stop_tokens: Sequence[int] | None = None
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    targets: npt.NDArray[np.int64] | None = None
    """[n, 2]: at which place of the prompt (from 1) the log probability of which token to tell."""
    alternatives: int = 0
    """How many tokens to draw, at `temperature`, for every place of the prompt but the first."""

    def __post_init__(self) -> None:
        for name, least, most in (
            ("max_tokens", 0, None),
            ("prompt_logprobs_last_n", 0, None),
            ("topk_prompt_logprobs", 0, MAX_TOP),
            ("topk_sample_logprobs", 0, MAX_TOP),
            ("alternatives", 0, MAX_TOP),
        ):
            value = getattr(self, name)
            if value is not None and (value < least or (most is not None and value > most)):
                limit = f"at least {least}" + (f" and at most {most}" if most else "")
                raise Mistake(f"{name}={value}: {limit}")
        self.shape()

    def shape(self) -> Shape:
        """The part that says what is drawn from."""
        return Shape(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)


class Continuation(msgspec.Struct, frozen=True):
    """One sequence: its new tokens, int32, and the model's log probability of each, float32."""

    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    stop_reason: Literal["stop", "length"]
    topk: TopK | None = None


class Generation(msgspec.Struct, frozen=True):
    """All the continuations, in order, and what was asked about the prompt."""

    continuations: list[Continuation]
    about: About = About()


def generate(
    tenant: Tenant, prompt: Sequence[int], settings: Settings, *, num_samples: int, seed: int
) -> Generation:
    """Continue the prompt `num_samples` times."""
    base = tenant.base
    if not 1 <= num_samples <= MAX_SAMPLES:
        raise Mistake(f"num_samples={num_samples}: between 1 and {MAX_SAMPLES}")
    if not prompt:
        raise Mistake("a prompt has at least one token: begin with the tokenizer's first token")
    base.check_tokens(prompt)
    if settings.targets is not None:
        base.check_tokens(settings.targets[:, 1].tolist())
    room = base.context_length - len(prompt)
    most = room if settings.max_tokens is None else min(settings.max_tokens, room)
    if room < 0 or (room == 0 and settings.max_tokens != 0):
        raise Mistake(
            f"a prompt of {len(prompt)} tokens leaves no room in the {base.context_length} that "
            f"{base.name} can take: shorten it"
        )
    stop = Stop(base, strings=settings.stop_strings, tokens=settings.stop_tokens)
    with torch.no_grad():
        continuations = _continue(tenant, prompt, settings, stop, most, num_samples, seed)
        return Generation(continuations, about_prompt(tenant, prompt, settings, seed))


class _Row:
    """What one sequence has so far."""

    def __init__(self, seed: int, index: int) -> None:
        self.stream = Stream(seed, index)
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.top: list[tuple[Any, Any]] = []
        self.stopped = False

    def result(self, k: int) -> Continuation:
        topk = None
        if k:
            topk = blank(len(self.top), k)
            for place, (tokens, logprobs) in enumerate(self.top):
                topk.tokens[place, : len(tokens)] = tokens
                topk.logprobs[place, : len(tokens)] = logprobs
        return Continuation(
            np.array(self.tokens, np.int32),
            np.array(self.logprobs, np.float32),
            "stop" if self.stopped else "length",
            topk,
        )


def _continue(
    tenant: Tenant,
    prompt: Sequence[int],
    settings: Settings,
    stop: Stop,
    most: int,
    num_samples: int,
    seed: int,
) -> list[Continuation]:
    rows = [_Row(seed, index) for index in range(num_samples)]
    shape, k = settings.shape(), settings.topk_sample_logprobs
    if most > 0:
        logits, cache = tenant.advance(torch.tensor([list(prompt)]))
        logits = logits.expand(num_samples, -1)
        _repeat(cache, num_samples, tenant)
    for step in range(most):
        # Every row draws, over or not: what a row draws is its own affair, and the shape stays.
        numbers = torch.tensor([row.stream.next() for row in rows], dtype=torch.float64)
        chosen = draw(logits, numbers, shape)
        scored = logits.float().cpu()
        logprobs = token_logprobs(scored, chosen)
        top = top_logprobs(torch.log_softmax(scored, dim=-1), k) if k else None
        for index, row in enumerate(rows):
            if row.stopped:
                continue
            row.tokens.append(int(chosen[index]))
            row.logprobs.append(float(logprobs[index]))
            if top is not None:
                row.top.append((top[0][index].numpy(), top[1][index].numpy()))
            row.stopped = stop.after(row.tokens)
        if step + 1 == most or all(row.stopped for row in rows):
            break
        logits, cache = tenant.advance(chosen.unsqueeze(-1), cache)
    return [row.result(k) for row in rows]


def _repeat(cache: Any, times: int, tenant: Tenant) -> None:
    if not hasattr(cache, "batch_repeat_interleave"):
        raise Mistake(
            f"{tenant.base.architecture} keeps no cache of keys and values: it can be trained and "
            "scored, but not sampled from here"
        )
    cache.batch_repeat_interleave(times)
