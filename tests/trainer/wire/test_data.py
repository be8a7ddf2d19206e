"""Data that no library would send: whatever it claims, it is compared with what there is."""

import contextlib
import json
import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import Mistake
from holdfast.trainer import ops
from holdfast.trainer.wire import data, requests, sampling, schema, sessions
from holdfast.trainer.wire.body import JSON, PROTOBUF, BadOp, Limits

from .conftest import floats, longs, of

LIMITS = Limits(datums=3, tokens=10, elements=20, samples=4, stops=2, topk=5)
FLOAT, INT, INT32, HALF = (
    schema.DTYPES[name] for name in ("float32", "int64", "int32", "bfloat16")
)


def message(tokens: bytes = bytes(8), **tensors: Any) -> Any:
    """A request with one datum; a tensor is (dtype, shape, dense bytes or a sparse triple)."""
    made = schema.ForwardBackwardRequest(model_id="m", seq_id=7, loss_fn="ppo")
    datum = made.data.add()
    datum.model_input.add().encoded_text.tokens = tokens
    for name, (dtype, shape, content) in tensors.items():
        field = datum.loss_fn_inputs[name]
        field.dtype = dtype
        field.shape.extend(shape)
        if isinstance(content, bytes):
            field.dense = content
        else:
            field.sparse_csr.values, field.sparse_csr.crow_indices = content[:2]
            field.sparse_csr.col_indices = content[2]
    return made


def read(made: Any) -> ops.ForwardBackward:
    said = data.forward_backward(made.SerializeToString(), PROTOBUF, LIMITS)
    assert (said.model, said.seq) == ("m", 7)
    assert isinstance(said.op, ops.ForwardBackward)
    return said.op


def test_narrow_types_are_widened() -> None:
    """bfloat16 and int32 become float32 and int64; without a shape there is one dimension."""
    halves = struct.pack("<3H", 0x3F80, 0xC040, 0x7F80)
    op = read(message(a=(HALF, [3], halves), b=(INT32, [], struct.pack("<2i", -5, 6))))
    inputs = op.data[0].inputs
    inf = float("inf")
    assert inputs["a"] == ops.Tensor(dtype="float32", shape=(3,), data=floats(1.0, -3.0, inf))
    assert inputs["b"] == ops.Tensor(dtype="int64", shape=(2,), data=longs(-5, 6))


def test_the_newer_configuration_wins() -> None:
    """Texts exist only there; older clients send only numbers."""
    made = message()
    made.loss_fn_config["beta"] = 0.5
    assert read(made).config == {"beta": 0.5}
    made.loss_fn_config_v2["beta"].number = 0.25
    made.loss_fn_config_v2["loss_id"].text = "x"
    assert read(made).config == {"beta": 0.25, "loss_id": "x"}


SPARSE = (floats(1.0, 2.0), longs(0, 1, 2), longs(0, 1))


def with_rows(*rows: int, col: tuple[int, ...] = (0, 1)) -> Any:
    return message(w=(FLOAT, [2, 2], (SPARSE[0], longs(*rows), longs(*col))))


BAD_TENSORS: list[tuple[Any, str]] = [
    (message(w=(FLOAT, [2], floats(1.0))), r"`w`: shape \[2\] does not fit 1 elements"),
    (message(w=(FLOAT, [-1], b"")), "`w`: shape"),
    (message(w=(FLOAT, [-1, -1], floats(1.0))), "`w`: shape"),
    (message(w=(FLOAT, [0, 2**62], b"")), "`w`: shape"),
    (message(w=(FLOAT, [1] * 5, floats(1.0))), "`w`: shape"),
    (message(w=(FLOAT, [1], b"abc")), "whole number"),
    (message(w=(0, [1], floats(1.0))), "dtype 0"),
    (message(w=(99, [1], floats(1.0))), "dtype 99"),
    (message(w=(FLOAT, [21], floats(*range(21)))), "too many elements"),
    (message(a=(INT, [11], longs(*range(11))), b=(INT, [10], longs(*range(10)))), "too many"),
    (message(w=(FLOAT, [2**20, 2**20], SPARSE)), "too many elements"),
    (message(w=(FLOAT, [2**30, 0], (b"", longs(0), b""))), "crow_indices"),
    (message(w=(FLOAT, [4], SPARSE)), "two dimensions"),
    (message(w=(FLOAT, [], SPARSE)), "two dimensions"),
    (with_rows(0, 2), "crow_indices has 2 entries"),
    (message(w=(FLOAT, [0, 2], (b"", b"", b""))), "crow_indices has 0 entries"),
    (with_rows(1, 1, 2), "crow_indices must"),
    (with_rows(0, 1, 3), "crow_indices must"),
    (with_rows(0, 3, 2), "crow_indices must"),
    (with_rows(0, -1, 2), "crow_indices must"),
    (with_rows(0, 1, 2, col=(0, 2)), "col_indices must"),
    (with_rows(0, 1, 2, col=(0, -1)), "col_indices must"),
    (with_rows(0, 1, 2, col=(0,)), "col_indices must"),
    (with_rows(0, 2, 2, col=(1, 1)), "go up within a row"),
    (message(bytes(7)), "whole number"),
    (message(bytes(44)), "too many tokens"),
]


@pytest.mark.parametrize(("made", "why"), BAD_TENSORS)
def test_bad_tensors(made: Any, why: str) -> None:
    """Whatever a shape or an index claims, it is compared with the bytes, and with limits."""
    with pytest.raises(BadOp, match=r"datum 0, .*" + why) as caught:
        read(made)
    assert (caught.value.model, caught.value.seq) == ("m", 7)


def test_bad_messages() -> None:
    """Requests that are wrong as a whole."""
    nothing = schema.ForwardBackwardRequest(model_id="m", seq_id=7, loss_fn="ppo")
    many = message()
    for _ in range(3):
        many.data.add()
    unnamed = message()
    unnamed.loss_fn = ""
    audio, image = message(), message()
    audio.data[0].model_input.add().dmel.SetInParent()
    image.data[0].model_input.add().image.SetInParent()
    valueless = message()
    valueless.loss_fn_config_v2["beta"].SetInParent()
    full = message()
    for at in range(33):
        full.loss_fn_config[f"k{at}"] = 1.0
    for made, why in (
        (nothing, "`data` is empty"),
        (many, "4 datums"),
        (unnamed, "loss_fn"),
        (audio, "'dmel' are not supported"),
        (image, "datum 0.*'image' are not supported"),
        (valueless, "no value for 'beta'"),
        (full, "more than 32"),
    ):
        with pytest.raises(BadOp, match=why):
            read(made)
    for seq in (0, -1):
        made = message()
        made.seq_id = seq
        with pytest.raises(Mistake, match="seq_id") as caught:
            read(made)
        assert not isinstance(caught.value, BadOp)


def in_json(**datum: Any) -> bytes:
    one = {"model_input": {"chunks": [{"tokens": [1, 2]}]}, "loss_fn_inputs": {}, **datum}
    given = {"data": [one], "loss_fn": "ppo"}
    return json.dumps({"model_id": "m", "seq_id": 7, "forward_backward_input": given}).encode()


def tensor(**fields: Any) -> dict[str, Any]:
    return {"loss_fn_inputs": {"w": {"data": [1, 2], "dtype": "int64", **fields}}}


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (in_json(**tensor(data=[1, 2.5])), "`w`: data has numbers that are not integers"),
        (in_json(**tensor(data=[2**63])), "64 bits"),
        (in_json(**tensor(data=[10**400], dtype="float32")), "too large"),
        (in_json(**tensor(data=[True])), "data"),
        (in_json(**tensor(data=[None])), "data"),
        (in_json(**tensor(dtype="int32")), "dtype"),
        (in_json(**tensor(shape=[3])), "does not fit"),
        (in_json(**tensor(shape=[])), "does not fit"),
        (in_json(**tensor(sparse_crow_indices=[0, 2])), "belong together"),
        (in_json(**tensor(shape=[1, 2], sparse_crow_indices=[0, 2], sparse_col_indices=[0, 0])),
         "go up within a row"),
        (in_json(model_input={"chunks": [{"tokens": [2**31]}]}), "32 bits"),
        (in_json(model_input={"chunks": [{"tokens": list(range(11))}]}), "too many tokens"),
        (in_json(model_input={"chunks": [{"type": "encoded_text"}]}), "no `tokens`"),
        (in_json(model_input={"chunks": [{"type": "image", "data": "x"}]}), "'image' are not"),
        (in_json(model_input={}), "chunks"),
        (b'{"model_id":"m","seq_id":7,"forward_input":{}}', "forward_backward_input"),
    ],
)  # fmt: skip
def test_bad_data_in_json(body: bytes, why: str) -> None:
    """JSON is as strict as protobuf, and every error uses its number up."""
    with pytest.raises(BadOp, match=why):
        data.forward_backward(body, JSON, LIMITS)


def test_a_scalar_in_json() -> None:
    """An empty shape is a scalar; no shape is one dimension."""
    for shape, want in (([], ()), (None, (1,))):
        body = in_json(**tensor(data=[5], shape=shape))
        op = data.forward_backward(body, "", LIMITS).op
        assert isinstance(op, ops.ForwardBackward)
        assert op.data[0].inputs["w"] == ops.Tensor(dtype="int64", shape=want, data=longs(5))


NUMBERED = {"model_id": "m", "seq_id": 7, "adam_params": {"eps": 1}}
PROMPT = {"prompt": {"chunks": [{"tokens": [1, 2, 3]}]}, "sampling_params": {}}
MODEL = {"session_id": "s", "model_seq_id": 0, "base_model": "b"}

EVERY: list[Callable[[bytes], Any]] = [
    lambda body: data.forward_backward(body, PROTOBUF),
    lambda body: data.forward_backward(body, JSON),
    lambda body: data.forward(body, JSON),
    sampling.asample,
    requests.create_model,
    sampling.create_sampling_session,
    sessions.create_session,
    of(sessions.OfModel),
    of(sessions.OfSession),
    of(sampling.OfSampler),
    requests.load_weights,
    requests.optim_step,
    of(sampling.Poll),
    sampling.retrieve_futures,
    requests.save_weights,
    requests.save_weights_for_sampler,
    of(sessions.OfWeights),
]
GOOD = [
    message(w=(FLOAT, [2, 2], SPARSE), a=(HALF, [2], bytes(4))).SerializeToString(),
    in_json(**tensor(shape=[1, 2])),
    *(json.dumps(one).encode() for one in (NUMBERED, PROMPT | MODEL, MODEL)),
]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    good=st.sampled_from(GOOD),
    cuts=st.lists(
        st.tuples(st.floats(0, 1), st.binary(max_size=3), st.integers(0, 3)), max_size=4
    ),
)
def test_damaged_bodies(good: bytes, cuts: list[tuple[float, bytes, int]]) -> None:
    """Whatever becomes of a body on its way, it is read or it is a `Mistake`; nothing else."""
    for place, put, drop in cuts:
        at = int(place * len(good))
        good = good[:at] + put + good[at + drop :]
    for ask in EVERY:
        with contextlib.suppress(Mistake):
            ask(good)
