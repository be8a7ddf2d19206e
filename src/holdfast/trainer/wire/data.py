"""`forward_backward` and `forward`: the requests that carry data.

Tinker's SDK sends protobuf to `forward_backward` for both; Fireworks' sends JSON, and has
an endpoint for each. Whichever way it came, the same data are the same operation.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
from google.protobuf.message import DecodeError

from holdfast.errors import Mistake, TooLarge
from holdfast.trainer.ops import Datum, ForwardBackward
from holdfast.trainer.ops import Tensor as OpTensor
from holdfast.trainer.wire import schema
from holdfast.trainer.wire.arrays import (
    Budget,
    TensorData,
    tensor_from_lists,
    tensor_from_message,
    tokens_from_list,
)
from holdfast.trainer.wire.body import (
    DEFAULT_LIMITS,
    Limits,
    Numbered,
    blaming,
    is_protobuf,
    number,
    numbered,
)

__all__ = ["ModelInput", "forward", "forward_backward", "tokens_of"]

_MAX_INPUTS = 32
_MAX_CONFIG = 32
Value = TypeVar("Value")


class Chunk(msgspec.Struct):
    """A part of an input. Only text is understood; `tokens` is what makes it text."""

    type: str = "encoded_text"
    tokens: list[int] | None = None


class ModelInput(msgspec.Struct):
    """An input in JSON."""

    chunks: list[Chunk]


class _Datum(msgspec.Struct):
    model_input: ModelInput
    loss_fn_inputs: dict[str, TensorData] = {}


class _Input(msgspec.Struct):
    data: list[_Datum]
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None = None


class _Forward(msgspec.Struct):
    forward_input: _Input


class _ForwardBackward(msgspec.Struct):
    forward_backward_input: _Input


def forward_backward(body: bytes, content_type: str, limits: Limits = DEFAULT_LIMITS) -> Numbered:
    """A request to `forward_backward`; in protobuf it may ask for the forward pass alone."""
    if is_protobuf(content_type):
        return _from_protobuf(body, limits, forward_only=False)
    model, seq, ask = numbered(body, _ForwardBackward)
    return _from_json(model, seq, ask.forward_backward_input, limits, backward=True)


def forward(body: bytes, content_type: str, limits: Limits = DEFAULT_LIMITS) -> Numbered:
    """A request to `forward`, which makes no gradients."""
    if is_protobuf(content_type):
        return _from_protobuf(body, limits, forward_only=True)
    model, seq, ask = numbered(body, _Forward)
    return _from_json(model, seq, ask.forward_input, limits, backward=False)


def tokens_of(given: ModelInput) -> bytes:
    """The token ids of an input, as int32 bytes."""
    parts = []
    for chunk in given.chunks:
        if chunk.type != "encoded_text":
            raise Mistake(_unsupported(chunk.type))
        if chunk.tokens is None:
            raise Mistake("a chunk of text has no `tokens`")
        parts.append(tokens_from_list(chunk.tokens))
    return b"".join(parts)


def _unsupported(kind: str) -> str:
    return f"chunks of type {kind[:40]!r} are not supported: only encoded_text is"


# ---- the two ways to write it -----------------------------------------------------


def _from_json(model: str, seq: int, given: _Input, limits: Limits, *, backward: bool) -> Numbered:
    with blaming(model, seq):
        op = ForwardBackward(
            data=_data(given.data, tokens_of, tensor_from_lists, limits),
            loss=_named(given.loss_fn),
            config=_few(given.loss_fn_config or {}, _MAX_CONFIG, "loss_fn_config"),
            backward=backward,
        )
    return Numbered(model, seq, op)


def _from_protobuf(body: bytes, limits: Limits, *, forward_only: bool) -> Numbered:
    message = schema.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except (DecodeError, RecursionError) as error:
        raise Mistake(f"the request is not a ForwardBackwardRequest: {error}") from error
    model, seq = number({"model_id": message.model_id, "seq_id": message.seq_id})
    with blaming(model, seq):
        op = ForwardBackward(
            data=_data(message.data, _message_tokens, tensor_from_message, limits),
            loss=_named(message.loss_fn),
            config=_config(message),
            backward=not (forward_only or message.forward_only),
        )
    return Numbered(model, seq, op)


def _message_tokens(chunks: Any) -> bytes:
    parts = []
    for chunk in chunks:
        kind = chunk.WhichOneof("chunk") or "unknown"
        if kind != "encoded_text":
            raise Mistake(_unsupported(kind))
        if len(chunk.encoded_text.tokens) % 4:
            raise Mistake("the tokens are not a whole number of int32")
        parts.append(chunk.encoded_text.tokens)
    return b"".join(parts)


def _data(
    given: Sequence[Any],
    tokens_in: Callable[[Any], bytes],
    tensor_in: Callable[[Any, Budget], OpTensor],
    limits: Limits,
) -> list[Datum]:
    """The data of a request, however they are written."""
    if not given:
        raise Mistake("`data` is empty: there is nothing to compute")
    if len(given) > limits.datums:
        raise TooLarge(f"`data` has {len(given)} datums; {limits.datums} are allowed at a time")
    budget, data = Budget(limits), []
    for at, datum in enumerate(given):
        field = "model_input"
        try:
            tokens = tokens_in(datum.model_input)
            budget.take_tokens(len(tokens) // 4)
            field = "loss_fn_inputs"
            inputs: dict[str, OpTensor] = {}
            for name in sorted(_few(datum.loss_fn_inputs, _MAX_INPUTS, field)):
                field = name
                inputs[name] = tensor_in(datum.loss_fn_inputs[name], budget)
        except Mistake as error:
            raise Mistake(f"datum {at}, `{field[:80]}`: {error}") from error
        data.append(Datum(tokens=tokens, inputs=inputs))
    return data


def _config(message: Any) -> dict[str, float | str]:
    """The newer map says all; the older one has the numbers, for servers that know no other."""
    if not message.loss_fn_config_v2:
        return dict(_few(message.loss_fn_config, _MAX_CONFIG, "loss_fn_config"))
    config: dict[str, float | str] = {}
    for key, value in _few(message.loss_fn_config_v2, _MAX_CONFIG, "loss_fn_config").items():
        which = value.WhichOneof("value")
        if which is None:
            raise Mistake(f"loss_fn_config has no value for {key[:80]!r}")
        config[key] = value.number if which == "number" else value.text
    return config


def _named(loss: str) -> str:
    if not loss or len(loss) > 80:
        raise Mistake("`loss_fn` must be the name of a loss")
    return loss


def _few(given: Value, most: int, name: str) -> Value:
    if len(given) > most:  # type: ignore[arg-type]
        raise TooLarge(f"`{name}` has more than {most} entries")
    return given
