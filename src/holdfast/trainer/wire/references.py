"""A batch by reference: the request names values in a store of `holdfast.transfer`.

    POST forward_backward_references
    {"model_id": …, "seq_id": 7, "loss_fn": "importance_sampling", "forward_only": false,
     "data": [{"tokens": [key, generation, checksum, bytes],
               "loss_fn_inputs": {"target_tokens": [...], …},
               "inline": {"advantages": [0.0, 0.5, …]}}]}

Holdfast's own, beside Tinker's protocol. What the references mean is fetched, compared and put
into the journal before the promise is given: a replay depends on nothing that others delete.
What the caller has computed from values (advantages) it gives `inline`, as float32.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from holdfast.errors import Mistake
from holdfast.trainer.ops import Datum, ForwardBackward, Tensor
from holdfast.trainer.wire.body import DEFAULT_LIMITS, Id, Limits, Seq, decode
from holdfast.transfer import Ref

__all__ = ["ByReference", "filled", "read"]

_MAX_INPUTS = 32


class ReferredDatum(msgspec.Struct, frozen=True):
    """One sequence, by reference."""

    tokens: Ref
    loss_fn_inputs: dict[str, Ref] = {}
    inline: dict[str, list[float]] = {}


class ByReference(msgspec.Struct, frozen=True):
    """A request to `forward_backward_references`."""

    model_id: Id
    seq_id: Seq
    data: list[ReferredDatum]
    loss_fn: str
    loss_fn_config: dict[str, float | str] = {}
    forward_only: bool = False

    def refs(self) -> list[Ref]:
        """Everything that it refers to."""
        return [ref for one in self.data for ref in (one.tokens, *one.loss_fn_inputs.values())]


def read(body: bytes, limits: Limits = DEFAULT_LIMITS) -> ByReference:
    """The request, checked by its form."""
    ask = decode(body, ByReference)
    if not 1 <= len(ask.data) <= limits.datums:
        raise Mistake(f"`data` has {len(ask.data)} items: 1 to {limits.datums} are allowed")
    if any(len(one.loss_fn_inputs) + len(one.inline) > _MAX_INPUTS for one in ask.data):
        raise Mistake(f"`loss_fn_inputs` has at most {_MAX_INPUTS} fields")
    told = sum(ref.nbytes for ref in ask.refs())
    if told > limits.plain_bytes:
        raise Mistake(f"the values have {told} bytes; {limits.plain_bytes} are allowed at once")
    return ask


def filled(ask: ByReference, values: Mapping[str, Any]) -> ForwardBackward:
    """The operation, with the values in place of the references."""
    data = []
    for at, one in enumerate(ask.data):
        tokens = _array(f"datum {at}, `tokens`", values[one.tokens.key])
        if tokens.ndim != 1 or tokens.dtype.kind != "i":
            raise Mistake(f"datum {at}: `tokens` is a list of integers, not {tokens.dtype}")
        inputs = {
            name: Tensor.of(_array(f"datum {at}, `{name}`", values[ref.key]))
            for name, ref in one.loss_fn_inputs.items()
        }
        inputs |= {name: Tensor.of(np.array(given, "<f4")) for name, given in one.inline.items()}
        data.append(Datum(tokens=tokens.astype("<i4").tobytes(), inputs=inputs))
    return ForwardBackward(
        data=data, loss=ask.loss_fn, config=ask.loss_fn_config, backward=not ask.forward_only
    )


def _array(what: str, value: Any) -> "np.ndarray[Any, Any]":
    array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
    if array.dtype.kind not in "if":
        raise Mistake(f"{what} is an array of numbers, not of {array.dtype}")
    return array
