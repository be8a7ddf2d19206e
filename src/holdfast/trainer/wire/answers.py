"""Outcomes → answers, in whichever form the asker reads.

- `ForwardBackwardOutput` and `SampleResponse` are protobuf where the request accepts it
  (Tinker's client reads nothing else) and JSON otherwise; everything else is JSON.
- The bytes are a function of the outcome alone: a successor answers like its predecessor.
- JSON has no word for NaN and infinity. A metric that is one is left out; in an array it is
  null, which for the log probabilities of a prompt means "not scored".
- What went wrong *with an operation* is an outcome (200, with a category); `refusal` is for
  requests that never became one. The client tries again on 408, 409, 429 and 5xx only, so
  nothing that will stay wrong is answered with one of those.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from holdfast.errors import (
    Denied,
    Fenced,
    Gone,
    HoldfastError,
    Mistake,
    NotFound,
    Retriable,
    TooLarge,
    UnknownOutcome,
)
from holdfast.trainer.ops import (
    Created,
    Done,
    Failed,
    Loaded,
    Lora,
    Outcome,
    Output,
    Published,
    Sampled,
    SamplerSaved,
    Saved,
    Stepped,
)
from holdfast.trainer.wire import payloads
from holdfast.trainer.wire.body import JSON, PROTOBUF

__all__ = [
    "INLINE_BYTES",
    "Answer",
    "Offer",
    "accepts_protobuf",
    "capabilities",
    "completions",
    "info",
    "pending",
    "plain",
    "problem",
    "promise",
    "refusal",
    "result",
    "sampler_info",
    "typed",
    "weights_info",
]

INLINE_BYTES = 1 << 20
"""Results larger than this are announced first, to clients that allow it."""

QueueState = Literal["active", "paused_capacity", "paused_rate_limit"]


class Answer(msgspec.Struct, frozen=True):
    """An HTTP answer."""

    status: int
    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


class Offer(msgspec.Struct, frozen=True):
    """A model that can be trained and sampled here."""

    name: str
    context_length: int


def plain(value: Mapping[str, Any], status: int = 200, **headers: str) -> Answer:
    """An answer in JSON. `_` in the name of a header stands for `-`."""
    named = tuple((name.replace("_", "-"), text) for name, text in headers.items())
    return Answer(status, JSON, msgspec.json.encode(value), named)


def typed(kind: str, **fields: Any) -> Answer:
    """One of the many small answers: `typed("create_session", session_id=...)`."""
    return plain({"type": kind, **fields})


def accepts_protobuf(accept: str) -> bool:
    """Whether an `Accept` header asks for protobuf by name."""
    return any(part.partition(";")[0].strip().lower() == PROTOBUF for part in accept.split(","))


# ---- results ----------------------------------------------------------------------


def result(
    outcome: Outcome,
    *,
    accept: str = "",
    metadata_only: bool = False,
    inline_bytes: int = INLINE_BYTES,
) -> Answer:
    """What `retrieve_future` says of an operation that is done."""
    answer = _whole(outcome, protobuf=accepts_protobuf(accept))
    if metadata_only and len(answer.body) > inline_bytes:
        return plain({"status": "complete_metadata", "response_payload_size": len(answer.body)})
    return answer


def _whole(outcome: Outcome, *, protobuf: bool) -> Answer:
    match outcome:
        case Failed():
            return plain({"error": outcome.error, "category": outcome.category})
        case Output() if protobuf:
            return Answer(200, PROTOBUF, payloads.output_message(outcome))
        case Output():
            return plain(payloads.output_json(outcome) | {"metrics": _finite(outcome.metrics)})
        case Sampled() if protobuf:
            return Answer(200, PROTOBUF, payloads.sample_message(outcome))
        case Sampled():
            return plain(payloads.sample_json(outcome))
        case Created():
            if outcome.path:  # whoever asked to load something wants to hear of that
                return typed("load_weights", path=outcome.path, model_id=outcome.model)
            return typed("create_model", model_id=outcome.model)
        case Stepped():
            return typed("optim_step", metrics=_finite(outcome.metrics))
        case Saved():
            return typed("save_weights", path=outcome.path)
        case Loaded() if outcome.adapter_of:
            model = outcome.adapter_of
            return typed("load_adapter", model_id=model, adapter_path=outcome.path)
        case Loaded():
            return typed("load_weights", path=outcome.path)
        case SamplerSaved():
            session = outcome.sampling_session
            return typed(
                "save_weights_for_sampler", path=outcome.path, sampling_session_id=session
            )
        case Published():
            return typed("publish_weights", **msgspec.structs.asdict(outcome))
        case Done():
            return typed(outcome.what, model_id=outcome.model)


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


# ---- futures ----------------------------------------------------------------------


def promise(
    request: str, *, model: str | None = None, sequences: Sequence[str] | None = None
) -> Answer:
    """An operation has been taken on. Promises of samples name the sequences to come."""
    said: dict[str, Any] = {"request_id": request}
    if model is not None:
        said["model_id"] = model
    if sequences is not None:
        said["sample_sequence_ids"] = list(sequences)
    return plain(said)


def pending(request: str, state: QueueState = "active", reason: str | None = None) -> Answer:
    """Not done yet. The client asks again at once, so hold the request before this."""
    said = {"type": "try_again", "request_id": request, "queue_state": state}
    if reason is not None:
        said["queue_state_reason"] = reason
    return plain(said, 408)


def completions(done: Sequence[tuple[str, int | None]], cursor: int) -> Answer:
    """What `retrieve_futures` says: requests that are done and how large their payloads are.

    A size of None is a request that failed.
    """
    said: list[dict[str, Any]] = []
    for request, size in done:
        said.append({"state": "failed" if size is None else "finished", "request_id": request})
        if size is not None:
            said[-1]["response_payload_uncompressed_size"] = size
    return plain({"completions": said, "cursor": cursor})


# ---- what there is ----------------------------------------------------------------


def capabilities(offers: Sequence[Offer], *, probe: str | None = None) -> Answer:
    """What `get_server_capabilities` says; `probe` is the path of one that really computes."""
    models = [
        {
            "model_name": offer.name,
            "max_context_length": offer.context_length,
            "trainable": True,
            "sampleable": True,
        }
        for offer in offers
    ]
    return plain({"supported_models": models} | ({} if probe is None else {"probe": probe}))


def info(
    model: str, base: str, *, arch: str, tokenizer: str, lora_rank: int | None = None
) -> Answer:
    """What `get_info` says of a model; without a rank, all of its weights are trained."""
    return plain(
        {
            "type": "get_info",
            "model_id": model,
            "model_name": base,
            "model_data": {"arch": arch, "model_name": base, "tokenizer_id": tokenizer},
            "is_lora": lora_rank is not None,
            "lora_rank": lora_rank,
            "optimizer_config": {"type": "adamw"},
        }
    )


def sampler_info(sampler: str, base: str, path: str | None) -> Answer:
    """What `samplers/{id}` says."""
    return plain({"sampler_id": sampler, "base_model": base, "model_path": path})


def weights_info(base: str, lora: Lora | None) -> Answer:
    """What `weights_info` says of saved weights.

    The client asks for a model of the rank that it is told here: 0 stands for all the weights.
    """
    parts = ("train_attn", "train_mlp", "train_unembed")
    trained = {} if lora is None else {part: getattr(lora, part) for part in parts}
    said = {"base_model": base, "is_lora": lora is not None, "lora_rank": lora.rank if lora else 0}
    return plain(said | {"optimizer_config": {"type": "adamw"}} | trained)


# ---- refusals ---------------------------------------------------------------------


# The first that an error is one of: some are kinds of `Mistake`.
_REFUSALS: tuple[tuple[type[HoldfastError], int, str], ...] = (
    (NotFound, 404, "not_found"),
    (TooLarge, 413, "too_large"),
    (Denied, 403, "denied"),
    (Mistake, 400, "bad_request"),
    (Gone, 410, "gone"),
    (Fenced, 421, "wrong_incarnation"),
)


def problem(status: int, code: str, message: str, **headers: str) -> Answer:
    """A request that could not be served. Our own 404 is sure, and need not be tried again."""
    if status == 404:
        headers.setdefault("x_should_retry", "false")
    return plain(
        {"error": {"code": code, "message": message}, "detail": message}, status, **headers
    )


def refusal(error: HoldfastError) -> Answer:
    """What to say to whoever sent the request that raised this."""
    if isinstance(error, Retriable | UnknownOutcome):
        # Numbers tell duplicates, so sending it again is how its outcome becomes known.
        wait_ms = str(max(200, int(error.retry_after_s * 1000)))
        return problem(503, "try_again", str(error), retry_after_ms=wait_ms)
    for kind, status, code in _REFUSALS:
        if isinstance(error, kind):
            return problem(status, code, str(error))
    return problem(500, "internal", str(error))
