"""Data that the real libraries post are read as what their users meant."""

import math
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast.trainer import ops
from holdfast.trainer.wire import data
from holdfast.trainer.wire.body import PROTOBUF, Numbered, read_body

from .conftest import FAST, Codec

INT64 = st.integers(-(2**63), 2**63 - 1)
FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
SHAPES = st.one_of(
    st.tuples(st.integers(0, 5)), st.tuples(st.integers(1, 4), st.integers(1, 4))
).map(list)


@st.composite
def dense(draw: st.DrawFn) -> dict[str, Any]:
    shape, dtype = draw(SHAPES), draw(st.sampled_from(["float32", "int64"]))
    count = math.prod(shape)
    values = draw(
        st.lists(FLOAT32 if dtype == "float32" else INT64, min_size=count, max_size=count)
    )
    return {"data": values, "dtype": dtype, "shape": shape, "dense": values}


@st.composite
def sparse(draw: st.DrawFn) -> dict[str, Any]:
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    dtype = draw(st.sampled_from(["float32", "int64"]))
    value = FLOAT32 if dtype == "float32" else INT64
    cells = sorted(draw(st.sets(st.tuples(st.integers(0, rows - 1), st.integers(0, columns - 1)))))
    values = draw(st.lists(value, min_size=len(cells), max_size=len(cells)))
    full: list[Any] = [0] * (rows * columns)
    for (row, column), one in zip(cells, values, strict=True):
        full[row * columns + column] = one
    crow = [sum(1 for row, _ in cells if row < at) for at in range(rows + 1)]
    col = [column for _, column in cells]
    shape = [rows, columns]
    return {
        "data": values, "dtype": dtype, "shape": shape, "crow": crow, "col": col, "dense": full
    }  # fmt: skip


@st.composite
def specs(draw: st.DrawFn) -> dict[str, Any]:
    names = st.sampled_from(["target_tokens", "weights", "advantages", "anything"])
    datum = st.fixed_dictionaries(
        {
            "chunks": st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=4), max_size=3),
            "inputs": st.dictionaries(names, st.one_of(dense(), sparse()), max_size=3),
        }
    )
    return {
        "data": draw(st.lists(datum, min_size=1, max_size=3)),
        "loss": draw(st.sampled_from(["ppo", "cross_entropy"])),
        "config": draw(
            st.none()
            | st.dictionaries(
                st.sampled_from(["beta", "loss_id"]), st.floats(-9, 9) | st.text(max_size=3)
            )
        ),
        "model": draw(st.text(min_size=1, max_size=8).filter(lambda t: t.isprintable())),
        "seq": draw(st.integers(1, 2**31 - 1)),
    }


def meant(spec: dict[str, Any], *, backward: bool) -> Numbered:
    """The operation that a specification stands for, written down independently."""
    data = []
    for one in spec["data"]:
        tokens = np.asarray([t for chunk in one["chunks"] for t in chunk], dtype="<i4")
        inputs = {
            name: ops.Tensor(
                dtype=given["dtype"],
                shape=tuple(given["shape"]),
                data=np.asarray(given["dense"], dtype=given["dtype"]).tobytes(),
            )
            for name, given in one["inputs"].items()
        }
        data.append(ops.Datum(tokens=tokens.tobytes(), inputs=inputs))
    op = ops.ForwardBackward(
        data=data, loss=spec["loss"], config=spec["config"] or {}, backward=backward
    )
    return Numbered(spec["model"], spec["seq"], op)


@FAST
@given(spec=specs(), forward=st.booleans(), zstd=st.booleans())
def test_tinkers_data(sdk: Codec, spec: dict[str, Any], forward: bool, zstd: bool) -> None:
    """Data that `tinker` encodes, compressed or not, arrive unchanged."""
    raw = sdk.encode("encode_tinker", spec=spec, forward=forward, zstd=zstd)
    body = read_body(raw, PROTOBUF, "zstd" if zstd else "")
    said = data.forward_backward(body, PROTOBUF)
    assert said == meant(spec, backward=not forward)


@FAST
@given(spec=specs(), forward=st.booleans())
def test_fireworks_data(sdk: Codec, spec: dict[str, Any], forward: bool) -> None:
    """Data that `fireworks-ai` encodes as JSON are the same operation as in protobuf."""
    body = sdk.encode("encode_fireworks", spec=spec, forward=forward)
    read = data.forward if forward else data.forward_backward
    said = read(body, "application/json; charset=utf-8")
    assert said == meant(spec, backward=not forward)
    told = data.forward_backward(
        sdk.encode("encode_tinker", spec=spec, forward=forward, zstd=False), PROTOBUF
    )
    assert ops.identity(said.op) == ops.identity(told.op)
