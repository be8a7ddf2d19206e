"""What can be wrong with an operation, and that what passes can be computed."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.errors import Mistake
from holdfast.trainer.losses import LOSSES, inputs_of, token_losses, validate
from holdfast.trainer.ops import Datum, ForwardBackward
from holdfast.trainer.ops import Tensor as OpTensor

WORDS, CONTEXT = 50, 8


def array(values: Any, dtype: str = "float32", shape: tuple[int, ...] | None = None) -> OpTensor:
    flat = np.asarray(values, dtype=dtype)
    kind: Any = dtype
    return OpTensor(dtype=kind, shape=flat.shape if shape is None else shape, data=flat.tobytes())


def ids(values: Any) -> OpTensor:
    return array(values, "int64")


def tokens(*values: int) -> bytes:
    return np.asarray(values, dtype="<i4").tobytes()


INPUTS = {
    "target_tokens": ids([2, 49]),
    "logprobs": array([-1, -2]),
    "advantages": array([0, 1]),
    "sequence_ratio_mask": array([0, 1]),
}


def op_of(
    name: str, config: dict[str, float | str] | None = None, **changed: Any
) -> ForwardBackward:
    """Two datums that are right, but for what is changed in the second; None takes it away."""
    names = {"cross_entropy": 1, "gspo": 4}.get(name, 3)
    right = dict(list(INPUTS.items())[:names])
    text = changed.pop("tokens", tokens(0, 49))
    inputs = {key: value for key, value in (right | changed).items() if value is not None}
    data = [Datum(tokens=tokens(0, 49), inputs=right), Datum(tokens=text, inputs=inputs)]
    if config is None:
        config = {"beta": 0.1} if name == "dro" else {}
    return ForwardBackward(data=data, loss=name, config=config)


def several() -> ForwardBackward:
    targets, weights = ids([[1, 2], [3, 4]]), array([[1, 2], [3, 4]])
    return op_of("cross_entropy", target_tokens=targets, weights=weights)


GOOD: list[Callable[[], ForwardBackward]] = [
    *(partial(op_of, name) for name in LOSSES),
    lambda: op_of("cross_entropy", weights=array([0, 1])),
    lambda: op_of("cross_entropy", weights=array([0, 1], "int64")),
    several,
    lambda: op_of("ppo", weights=array([1, 1])),
    lambda: op_of("ppo", clip_low_threshold=array([0.5])),
    lambda: op_of("ppo", clip_low_threshold=array(0.5)),
    lambda: op_of("cispo", {"clip_low_threshold": 0.0, "clip_high_threshold": 5.0}),
    lambda: op_of("gspo", advantages=array([0, 0]), sequence_ratio_mask=array([0, 0])),
]  # fmt: skip


@pytest.mark.parametrize("make", GOOD)
def test_what_passes_can_be_computed(make: Callable[[], ForwardBackward]) -> None:
    """Validation and losses agree on what there must be."""
    op = make()
    validate(op, WORDS, CONTEXT)
    for datum in op.data:
        inputs = inputs_of(datum)
        now = torch.full(inputs["target_tokens"].shape, -1.0)
        tokens, metrics = token_losses(op.loss, now, inputs, op.config)
        assert math.isfinite(float(tokens.sum()))
        assert set(metrics) <= {"loss:sum", "clipped_tokens:sum"}


BAD: list[tuple[Callable[[], ForwardBackward], str]] = [
    (lambda: op_of("stable_reinforce"), "use cispo"),
    (lambda: op_of("custom"), "forward_backward_custom"),
    (lambda: op_of("dapo"), "there are cross_entropy, "),
    (lambda: ForwardBackward(data=[], loss="ppo"), "`data` is empty"),
    (lambda: op_of("dro", {}), "needs `beta`"),
    (lambda: op_of("dro", {"beta": "x"}), "`beta` in `loss_fn_config`"),
    (lambda: op_of("dro", {"beta": math.nan}), "`beta` in"),
    (lambda: op_of("dro", {"beta": -1.0}), "`beta` in"),
    (lambda: op_of("ppo", {"beta": 1.0}), "unknown key 'beta': ppo takes clip_low_threshold"),
    (lambda: op_of("cross_entropy", {"x": 1.0}), "takes none"),
    (lambda: op_of("ppo", {"clip_low_threshold": 2.0}), "is above"),
    (lambda: op_of("ppo", tokens=b""), "datum 1: `model_input` has 0 tokens"),
    (lambda: op_of("ppo", tokens=tokens(*range(9))), "datum 1: `model_input` has 9 tokens"),
    (lambda: op_of("ppo", tokens=tokens(1, 50)), "datum 1: `model_input` has the token 50 at 1"),
    (lambda: op_of("ppo", tokens=tokens(-1, 0)), "datum 1: `model_input` has the token -1 at 0"),
    (lambda: op_of("ppo", tokens=b"abcdefg"), "datum 1: `model_input` is not"),
    (lambda: op_of("ppo", target_tokens=None), "datum 1: `target_tokens` is missing"),
    (lambda: op_of("ppo", logprobs=None), "datum 1: `logprobs` is missing"),
    (lambda: op_of("dro", advantages=None), "datum 1: `advantages` is missing"),
    (lambda: op_of("gspo", sequence_ratio_mask=None), "`sequence_ratio_mask` is missing"),
    (lambda: op_of("ppo", mask=array([1, 1])), "datum 1: `mask` is not an input of ppo: multiply"),
    (lambda: op_of("cross_entropy", advantages=array([1, 1])), "`advantages` is not an input"),
    (lambda: op_of("ppo", target_tokens=ids([1, 50])), "`target_tokens` has the token 50 at 1"),
    (lambda: op_of("ppo", target_tokens=ids([-100, 1])), "`target_tokens` has the token -100"),
    (lambda: op_of("ppo", target_tokens=array([1, 2])), "`target_tokens` are float32"),
    (lambda: op_of("ppo", target_tokens=ids([1])), r"shape \[1\]; it must be \[2\]"),
    (lambda: op_of("ppo", target_tokens=ids([[1], [2]])), r"shape \[2, 1\]; it must be \[2\]$"),
    (lambda: op_of("cross_entropy", target_tokens=ids([[], []])), r"\[2\] or \[2, K\]"),
    (lambda: op_of("cross_entropy", target_tokens=ids([[1], [2]]), weights=array([1, 1])),
     r"`weights` has shape \[2\]"),
    (lambda: op_of("ppo", advantages=array([1])), r"`advantages` has shape \[1\]"),
    (lambda: op_of("ppo", advantages=array(1)), r"`advantages` has shape \[\]"),
    (lambda: op_of("ppo", advantages=array([1, math.nan])), "`advantages` has nan at 1"),
    (lambda: op_of("ppo", logprobs=array([-math.inf, 1])), "`logprobs` has -inf at 0"),
    (lambda: op_of("ppo", advantages=array([1], shape=(2,))), "`advantages` has 4 bytes"),
    (lambda: op_of("ppo", clip_low_threshold=array([0.5, 1.5])), "for every token"),
    (lambda: op_of("ppo", clip_low_threshold=array([-0.5, 1])), "for every token"),
    (lambda: op_of("ppo", clip_high_threshold=array(0.5)), "for every token"),
    (lambda: op_of("gspo", sequence_ratio_mask=array([0, 0])), "marks no token"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "why"), BAD)
def test_bad_operations(make: Callable[[], ForwardBackward], why: str) -> None:
    """Each is refused with a message that names datum and field."""
    with pytest.raises(Mistake, match=why):
        validate(make(), WORDS, CONTEXT)


def test_an_unknown_loss_is_not_computed() -> None:
    """Not by whoever skips validation, either."""
    with pytest.raises(Mistake, match="not supported"):
        token_losses("custom", torch.zeros(1), {}, {})
