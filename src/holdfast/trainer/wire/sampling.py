"""Sampling and futures: `asample`, sampling sessions, and how results are asked for.

The number of a sample counts the requests of one client of a sampling session, from 0; a
client that was copied into another process counts from a block of its own, so numbers may be
anything below 2**63.
"""

from typing import Annotated

import msgspec
from msgspec import field

from holdfast.errors import Mistake, TooLarge
from holdfast.trainer.ops import Cells, Sample
from holdfast.trainer.wire.arrays import Budget, TensorData, cells_from_lists
from holdfast.trainer.wire.body import DEFAULT_LIMITS, Id, Index, Limits, Path, decode
from holdfast.trainer.wire.data import ModelInput, tokens_of

__all__ = [
    "MultiPoll",
    "NewSampler",
    "OfSampler",
    "Poll",
    "Sampling",
    "Target",
    "asample",
    "create_sampling_session",
    "retrieve_futures",
]

_MAX_RETRIEVED = 65536
_MAX_STOP_CHARS = 1024

_AS_THEY_ARE = ("max_tokens", "seed", "temperature", "top_k", "top_p")
"""Parameters that an operation calls as the protocol does."""

_Big = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """A sample of a sampling session (with its number there), or of weights, or of a base."""

    session: str | None = None
    seq: int | None = None
    path: str | None = None
    base: str | None = None
    op: Sample


class NewSampler(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling session number `sampler_seq` of a session: of weights, or of a base."""

    session: Id = field(name="session_id")
    sampler_seq: Index = field(name="sampling_session_seq_id")
    path: Path | None = field(name="model_path", default=None)
    base: Id | None = field(name="base_model", default=None)


class Poll(msgspec.Struct, frozen=True):
    """A question for one result; large ones may be announced first."""

    request: Id = field(name="request_id")
    metadata_only: bool = field(name="allow_metadata_only", default=False)


class Target(msgspec.Struct, frozen=True):
    """Whose results are asked for: those of a client of a sampling session, or of a copy of it."""

    session: Id = field(name="sampling_session_id")
    clone: _Big = field(name="cloned_sampler_id", default=0)
    type: str = "sampling_session"


class MultiPoll(msgspec.Struct, frozen=True):
    """A question for all of a sampler's results after `cursor`; `retrieved` ones may go."""

    target: Target
    cursor: _Big = field(name="prev_cursor", default=0)
    timeout_s: Annotated[float, msgspec.Meta(ge=0)] | None = field(name="timeout", default=None)
    retrieved: list[Id] = field(name="retrieved_request_ids", default_factory=list)


class _Params(msgspec.Struct):
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str | int] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] = -1
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0


class _Sample(msgspec.Struct):
    prompt: ModelInput
    sampling_params: _Params
    num_samples: Annotated[int, msgspec.Meta(ge=1)] = 1
    base_model: Id | None = None
    model_path: Path | None = None
    sampling_session_id: Id | None = None
    seq_id: _Big | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, msgspec.Meta(ge=0)] = 0
    topk_sample_logprobs: Annotated[int, msgspec.Meta(ge=0)] = 0
    prompt_logprobs_last_n: Annotated[int, msgspec.Meta(ge=1)] | None = None
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: Annotated[int, msgspec.Meta(ge=0)] = 0
    record_stability_info: bool | None = None


class OfSampler(msgspec.Struct):
    """`join_sampling_session`."""

    sampling_session_id: Id


def create_sampling_session(body: bytes) -> NewSampler:
    """A request to `create_sampling_session`."""
    ask = decode(body, NewSampler)
    if ask.path is None and ask.base is None:
        raise Mistake("one of `model_path` and `base_model` is needed")
    return ask


def asample(body: bytes, limits: Limits = DEFAULT_LIMITS) -> Sampling:
    """A request to `asample`."""
    ask = decode(body, _Sample)
    if ask.sampling_session_id is not None:
        if ask.seq_id is None:
            raise Mistake("`seq_id` is missing; it belongs to `sampling_session_id`")
    elif ask.model_path is None and ask.base_model is None:
        raise Mistake("one of `sampling_session_id`, `model_path` and `base_model` is needed")
    return Sampling(
        session=ask.sampling_session_id,
        seq=ask.seq_id,
        path=ask.model_path,
        base=ask.base_model,
        op=_sample(ask, limits),
    )


def _sample(ask: _Sample, limits: Limits) -> Sample:
    if ask.num_samples > limits.samples:
        raise TooLarge(f"`num_samples` is {ask.num_samples}; {limits.samples} are allowed")
    if max(ask.topk_prompt_logprobs, ask.topk_sample_logprobs) > limits.topk:
        raise TooLarge(f"the likeliest {limits.topk} tokens can be asked for, not more")
    if ask.prompt_alt_tokens_k > limits.topk:
        raise TooLarge(f"`prompt_alt_tokens_k` is at most {limits.topk}")
    if ask.record_stability_info:
        raise Mistake("`record_stability_info` serves stable_reinforce, which is not supported")
    prompt = tokens_of(ask.prompt)
    length = len(prompt) // 4
    if not 0 < length <= limits.tokens:
        raise Mistake(f"`prompt` has {length} tokens; 1 to {limits.tokens} are allowed")
    last = ask.prompt_logprobs_last_n
    if last is not None and not (ask.prompt_logprobs and last < length):
        raise Mistake(
            "`prompt_logprobs_last_n` needs `prompt_logprobs`, and a prompt that is longer"
        )
    targets = None
    if ask.target_prompt_logprobs is not None:
        targets = _targets(ask.target_prompt_logprobs, length, limits)
    params = ask.sampling_params
    if params.top_k == 0:
        raise Mistake("`top_k` is a number of tokens, or -1 for all of them")
    strings, tokens = _stops(params.stop, limits)
    return Sample(
        prompt=prompt,
        num_samples=ask.num_samples,
        **{name: getattr(params, name) for name in _AS_THEY_ARE},
        stop_strings=strings,
        stop_tokens=tokens,
        prompt_logprobs=bool(ask.prompt_logprobs),
        prompt_logprobs_last_n=last,
        topk_prompt_logprobs=ask.topk_prompt_logprobs,
        topk_sample_logprobs=ask.topk_sample_logprobs,
        target_prompt=targets,
        prompt_alternatives=ask.prompt_alt_tokens_k,
    )


def _targets(given: TensorData, length: int, limits: Limits) -> Cells:
    """The tokens to score at the places of a prompt: [length - 1, K], -1 for none."""
    if given.dtype != "int64":
        raise Mistake("`target_prompt_logprobs` has token ids: its dtype is int64")
    try:
        cells = cells_from_lists(given, Budget(limits))
    except Mistake as error:
        raise Mistake(f"`target_prompt_logprobs`: {error}") from error
    if cells.shape[0] != length - 1 or cells.shape[1] > limits.topk:
        raise Mistake(
            f"`target_prompt_logprobs` has shape {list(cells.shape)}: for a prompt of {length} "
            f"tokens it has {length - 1} rows, and at most {limits.topk} columns"
        )
    if all(token == -1 for token in given.data):
        raise Mistake("`target_prompt_logprobs` names no token")
    return cells


def _stops(
    given: str | list[str | int] | None, limits: Limits
) -> tuple[list[str] | None, list[int] | None]:
    """Strings, or tokens; no list at all is not the same as an empty one."""
    if given is None:
        return None, None
    stops = [given] if isinstance(given, str) else given
    if len(stops) > limits.stops:
        raise TooLarge(f"`stop` has {len(stops)} entries; {limits.stops} are allowed")
    strings = [one for one in stops if isinstance(one, str)]
    tokens = [one for one in stops if isinstance(one, int)]
    if strings and tokens:
        raise Mistake("`stop` has strings or tokens, not both")
    if any(not 0 < len(one) <= _MAX_STOP_CHARS for one in strings):
        raise Mistake(f"a string of `stop` has 1 to {_MAX_STOP_CHARS} characters")
    if any(not 0 <= one < 2**31 for one in tokens):
        raise Mistake("`stop` has a number that is not a token")
    return (strings, None) if strings else (None, tokens)


# ---- futures ----------------------------------------------------------------------


def retrieve_futures(body: bytes) -> MultiPoll:
    """A request to `retrieve_futures`."""
    ask = decode(body, MultiPoll)
    if ask.target.type != "sampling_session":
        raise Mistake(f"futures of a {ask.target.type[:40]!r} are not known")
    if len(ask.retrieved) > _MAX_RETRIEVED:
        raise TooLarge(f"`retrieved_request_ids` has more than {_MAX_RETRIEVED} entries")
    return ask
