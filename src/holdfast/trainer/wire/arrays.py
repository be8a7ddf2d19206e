"""Tokens and tensors of requests: raw bytes or lists → what operations are made of.

Everything is little-endian. Integers become int64 and numbers float32, the two kinds that
operations know. A shape is compared with the bytes there are, and a sparse tensor with the
`Budget` of its request, before anything is allocated: densifying is what makes few bytes many.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from holdfast.errors import Mistake, TooLarge
from holdfast.trainer.ops import Cells, Tensor
from holdfast.trainer.wire import schema
from holdfast.trainer.wire.body import Limits

__all__ = [
    "Budget",
    "TensorData",
    "cells_from_lists",
    "tensor_from_lists",
    "tensor_from_message",
    "tokens_from_list",
]

Array = npt.NDArray[Any]

_FLOAT, _INT64, _INT32, _HALF = (np.dtype(code) for code in ("<f4", "<i8", "<i4", "<u2"))
_STORED = {
    schema.DTYPES["float32"]: _FLOAT,
    schema.DTYPES["int64"]: _INT64,
    schema.DTYPES["int32"]: _INT32,
    schema.DTYPES["bfloat16"]: _HALF,
}
_MAX_RANK = 4


class TensorData(msgspec.Struct):
    """A tensor in JSON."""

    data: list[int | float]
    dtype: Literal["float32", "int64"]
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class Budget:
    """What is left of a request's limits; every array takes its part."""

    def __init__(self, limits: Limits) -> None:
        self._tokens, self._elements = limits.tokens, limits.elements

    def take_tokens(self, count: int) -> None:
        """Tokens of one datum."""
        self._tokens -= count
        if self._tokens < 0:
            raise TooLarge("the request has too many tokens: send it in parts")

    def take_elements(self, count: int) -> None:
        """Elements of one tensor, as if it were dense."""
        self._elements -= count
        if self._elements < 0:
            raise TooLarge("the request's tensors have too many elements: send it in parts")


def tokens_from_list(tokens: Sequence[int]) -> bytes:
    """Token ids as int32 bytes."""
    try:
        return np.asarray(tokens, dtype=_INT32).tobytes()
    except OverflowError:
        raise Mistake("a token id does not fit into 32 bits") from None


def tensor_from_message(message: Any, budget: Budget) -> Tensor:
    """A `Tensor` message. Without a shape it is one-dimensional."""
    stored = _STORED.get(message.dtype)
    if stored is None:
        raise Mistake(f"dtype {message.dtype} is not known")
    shape = tuple(message.shape) or None
    which = message.WhichOneof("encoding")
    if which == "sparse_csr":
        csr = message.sparse_csr
        return _sparse(
            _widen(_raw(csr.values, stored)),
            shape,
            _raw(csr.crow_indices, _INT64),
            _raw(csr.col_indices, _INT64),
            budget,
        )
    # Without either it is empty: a dense tensor of no bytes looks like none on the wire.
    data = message.dense if which == "dense" else b""
    return _dense(_widen(_raw(data, stored)), shape, budget)


def tensor_from_lists(given: TensorData, budget: Budget) -> Tensor:
    """A tensor as JSON has it: flat lists. Without a shape it is one-dimensional."""
    data = given.data
    values = _numbers(data) if given.dtype == "float32" else _integers(data, "data")
    rows = _rows(given)
    shape = None if given.shape is None else tuple(given.shape)
    if rows is None:
        return _dense(values, shape, budget)
    return _sparse(values, shape, *rows, budget)


def cells_from_lists(given: TensorData, budget: Budget) -> Cells:
    """Integers of a matrix as JSON has them, in the layout in which they came."""
    if given.shape is None or len(given.shape) != 2:
        raise Mistake("a shape of two dimensions is needed")
    shape = (given.shape[0], given.shape[1])
    values = _integers(given.data, "data")
    indices = _rows(given)
    if indices is None:
        return Cells(shape=shape, values=_dense(values, shape, budget).data)
    _checked_rows(values, shape, *indices, budget)
    crow, col = (one.tobytes() for one in indices)
    return Cells(shape=shape, values=values.tobytes(), crow=crow, col=col)


def _rows(given: TensorData) -> tuple[Array, Array] | None:
    """The indices of compressed rows; None: the tensor is dense."""
    crow, col = given.sparse_crow_indices, given.sparse_col_indices
    if crow is None and col is None:
        return None
    if crow is None or col is None:
        raise Mistake("sparse_crow_indices and sparse_col_indices belong together")
    return _integers(crow, "sparse_crow_indices"), _integers(col, "sparse_col_indices")


def _raw(data: bytes, dtype: "np.dtype[Any]") -> Array:
    if len(data) % dtype.itemsize:
        raise Mistake(f"{len(data)} bytes are not a whole number of {dtype.name} elements")
    return np.frombuffer(data, dtype=dtype)


def _widen(values: Array) -> Array:
    """To int64 or float32; a bfloat16 is the upper half of a float32."""
    if values.dtype == _HALF:
        return (values.astype("<u4") << np.uint32(16)).view(_FLOAT)
    return values.astype(_INT64) if values.dtype == _INT32 else values


def _numbers(data: Sequence[float]) -> Array:
    try:
        with np.errstate(over="ignore"):  # becomes infinite, which whoever needs it refuses
            return np.asarray(data, dtype=np.float64).astype(_FLOAT)
    except OverflowError:
        raise Mistake("a number in data is too large") from None


def _integers(data: Sequence[float], name: str) -> Array:
    if not all(type(value) is int for value in data):
        raise Mistake(f"{name} has numbers that are not integers")
    try:
        return np.asarray(data, dtype=_INT64)
    except OverflowError:
        raise Mistake(f"{name} has integers that do not fit into 64 bits") from None


def _checked(shape: tuple[int, ...], budget: Budget) -> int:
    if len(shape) > _MAX_RANK or not all(0 <= size < 2**31 for size in shape):
        raise Mistake(f"shape {list(shape)[:8]} is not one of a tensor here")
    count = math.prod(shape)
    budget.take_elements(count)
    return count


def _dense(values: Array, shape: tuple[int, ...] | None, budget: Budget) -> Tensor:
    if shape is None:
        shape = (values.size,)
    if _checked(shape, budget) != values.size:
        raise Mistake(f"shape {list(shape)} does not fit {values.size} elements")
    return Tensor.of(values.reshape(shape))


def _sparse(
    values: Array, shape: tuple[int, ...] | None, crow: Array, col: Array, budget: Budget
) -> Tensor:
    """What compressed rows do not name is 0."""
    shape, row = _checked_rows(values, shape, crow, col, budget)
    dense = np.zeros(shape, dtype=values.dtype)
    dense[row, col] = values
    return Tensor.of(dense)


def _checked_rows(
    values: Array, shape: tuple[int, ...] | None, crow: Array, col: Array, budget: Budget
) -> tuple[tuple[int, int], Array]:
    """The row of every value: row `r` has the columns `col[crow[r]:crow[r + 1]]`."""
    if shape is None or len(shape) != 2:
        raise Mistake("a sparse tensor needs a shape of two dimensions")
    _checked(shape, budget)
    rows, columns = shape
    # A tensor of no columns may have any number of rows, and would pass the budget.
    if rows != crow.size - 1:
        raise Mistake(f"crow_indices has {crow.size} entries for {rows} rows")
    if crow[0] != 0 or crow[-1] != values.size or np.any(crow[1:] < crow[:-1]):
        raise Mistake("crow_indices must go up from 0 to the number of values")
    if col.size != values.size or np.any((col < 0) | (col >= columns)):
        raise Mistake(f"col_indices must name one of {columns} columns for every value")
    row = np.repeat(np.arange(rows), np.diff(crow))
    if np.any((row[1:] == row[:-1]) & (col[1:] <= col[:-1])):
        raise Mistake("col_indices must go up within a row")
    return (rows, columns), row
