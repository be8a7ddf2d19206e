"""What each loss needs, and whether a request has it. Knows no torch: it runs where requests do.

`validate` is the last look at an operation before it is journaled: what passes here can be
computed, on every replay, without an error. So it looks at everything that can be wrong:
names, shapes, token ids, numbers that are not finite. Its messages name datum and field.

Inputs that a loss does not use are refused, so that nobody believes in a mask that is not
applied. `weights` are the exception: Tinker's examples send them along with every loss, and
only cross_entropy uses them.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.errors import Mistake
from holdfast.trainer.ops import Datum, ForwardBackward, Tensor

__all__ = ["CLIP_HIGH", "CLIP_LOW", "SPECS", "Spec", "unsupported", "validate"]

CLIP_LOW, CLIP_HIGH = 0.8, 1.2
_LOW, _HIGH = "clip_low_threshold", "clip_high_threshold"

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Spec:
    """The inputs of a loss besides `target_tokens`, and the keys of its configuration."""

    needs: tuple[str, ...] = ()
    takes: tuple[str, ...] = ("weights",)
    needs_config: tuple[str, ...] = ()
    takes_config: tuple[str, ...] = ()
    candidates: bool = False
    """Whether there may be several targets for each position."""


_RATIO = ("logprobs", "advantages")
_CLIPS = (_LOW, _HIGH)

SPECS = {
    "cross_entropy": Spec(candidates=True),
    "importance_sampling": Spec(needs=_RATIO),
    "ppo": Spec(needs=_RATIO, takes=("weights", *_CLIPS), takes_config=_CLIPS),
    "cispo": Spec(needs=_RATIO, takes=("weights", *_CLIPS), takes_config=_CLIPS),
    "dro": Spec(needs=_RATIO, needs_config=("beta",)),
    "gspo": Spec(
        needs=(*_RATIO, "sequence_ratio_mask"),
        takes=("weights", *_CLIPS),
        takes_config=_CLIPS,
    ),
}


def unsupported(name: str) -> Mistake:
    """The error for a loss that is not here: it says what to use instead."""
    if name == "stable_reinforce":
        why = "it needs what only its own sampler records; use cispo or importance_sampling"
    elif name == "custom":
        why = "no losses are kept on the server; give forward_backward_custom a function"
    else:
        why = f"there are {', '.join(SPECS)}; for others use forward_backward_custom"
    return Mistake(f"the loss {name[:80]!r} is not supported: {why}")


def validate(op: ForwardBackward, vocabulary_size: int, context_length: int) -> None:
    """Raise a `Mistake` that says what is wrong with an operation, if anything is."""
    spec = SPECS.get(op.loss)
    if spec is None:
        raise unsupported(op.loss)
    _check_config(op, spec)
    if not op.data:
        raise Mistake("`data` is empty: there is nothing to compute")
    for at, datum in enumerate(op.data):
        try:
            _check_datum(op, spec, datum, vocabulary_size, context_length)
        except Mistake as error:
            raise Mistake(f"datum {at}: {error}") from error


def _check_config(op: ForwardBackward, spec: Spec) -> None:
    known = (*spec.needs_config, *spec.takes_config)
    for key, value in op.config.items():
        if key not in known:
            allowed = f"{op.loss} takes {', '.join(known) or 'none'}"
            raise Mistake(f"`loss_fn_config` has an unknown key {key[:80]!r}: {allowed}")
        if isinstance(value, str) or not (math.isfinite(value) and value >= 0):
            raise Mistake(f"`{key}` in `loss_fn_config` must be a number that is not negative")
    for key in spec.needs_config:
        if key not in op.config:
            raise Mistake(f"{op.loss} needs `{key}` in `loss_fn_config`")
    low, high = op.config.get(_LOW, CLIP_LOW), op.config.get(_HIGH, CLIP_HIGH)
    if isinstance(low, float | int) and isinstance(high, float | int) and low > high:
        raise Mistake(f"`{_LOW}` {low:g} is above `{_HIGH}` {high:g}")


def _check_datum(
    op: ForwardBackward, spec: Spec, datum: Datum, vocabulary_size: int, context_length: int
) -> None:
    if len(datum.tokens) % 4:
        raise Mistake("`model_input` is not a whole number of tokens")
    tokens = np.frombuffer(datum.tokens, dtype="<i4")
    if not 0 < tokens.size <= context_length:
        raise Mistake(
            f"`model_input` has {tokens.size} tokens; 1 to {context_length} are possible"
        )
    _check_ids("model_input", tokens, vocabulary_size)
    for name in datum.inputs:
        if name not in ("target_tokens", *spec.needs, *spec.takes):
            what = "multiply it into the other inputs" if name == "mask" else "leave it out"
            raise Mistake(f"`{name[:80]}` is not an input of {op.loss}: {what}")
    for name in ("target_tokens", *spec.needs):
        if name not in datum.inputs:
            raise Mistake(f"`{name}` is missing; {op.loss} needs it")
    targets = datum.inputs["target_tokens"]
    _check_targets(targets, spec, tokens.size, vocabulary_size)
    arrays = {
        name: _check_numbers(name, given, targets.shape)
        for name, given in sorted(datum.inputs.items())
        if name != "target_tokens"
    }
    _check_clips(arrays, op)
    mask = arrays.get("sequence_ratio_mask")
    if mask is not None and not np.any(mask) and np.any(arrays["advantages"]):
        raise Mistake("`sequence_ratio_mask` marks no token, but there are `advantages`")


def _check_targets(targets: Tensor, spec: Spec, length: int, vocabulary_size: int) -> None:
    if targets.dtype != "int64":
        raise Mistake(f"`target_tokens` are {targets.dtype}; token ids are int64")
    ranks = (1, 2) if spec.candidates else (1,)
    if len(targets.shape) not in ranks or targets.shape[0] != length or 0 in targets.shape:
        wanted = f"[{length}]" + (f" or [{length}, K]" if spec.candidates else "")
        raise Mistake(f"`target_tokens` has shape {list(targets.shape)}; it must be {wanted}")
    _check_ids("target_tokens", _array("target_tokens", targets), vocabulary_size)


def _check_ids(name: str, ids: Array, vocabulary_size: int) -> None:
    wrong = np.flatnonzero((ids < 0) | (ids >= vocabulary_size))
    if wrong.size:
        first = int(wrong[0])
        raise Mistake(
            f"`{name}` has the token {ids.flat[first]} at {first}; "
            f"the vocabulary has {vocabulary_size}"
        )


def _check_numbers(name: str, given: Tensor, shape: tuple[int, ...]) -> Array:
    """Of the targets' shape; a threshold may be one number for the whole datum."""
    if given.shape != shape and not (name in _CLIPS and math.prod(given.shape) == 1):
        raise Mistake(f"`{name}` has shape {list(given.shape)}; `target_tokens` {list(shape)}")
    array = _array(name, given)
    wrong = np.flatnonzero(~np.isfinite(array))
    if wrong.size:
        raise Mistake(f"`{name}` has {array.flat[int(wrong[0])]} at {wrong[0]}")
    return array


def _array(name: str, given: Tensor) -> Array:
    try:
        return given.array()
    except ValueError:
        said = f"`{name}` has {len(given.data)} bytes for shape {list(given.shape)}"
        raise Mistake(said) from None


def _check_clips(arrays: dict[str, Array], op: ForwardBackward) -> None:
    if not any(name in arrays for name in _CLIPS):
        return
    low = arrays.get(_LOW, np.float32(op.config.get(_LOW, CLIP_LOW)))
    high = arrays.get(_HIGH, np.float32(op.config.get(_HIGH, CLIP_HIGH)))
    if np.any(low < 0) or np.any(low > high):
        raise Mistake(f"`{_LOW}` must be at least 0 and at most `{_HIGH}`, for every token")
