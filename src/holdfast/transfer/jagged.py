"""Nested torch tensors as bytes: where each row begins, then all values behind one another.

Both layouts of torch are carried: `jagged` (values and offsets, as torch keeps it, with
lengths where rows have holes between them) and `strided` (each row with a shape of its own).
What comes back has the layout that was put.
"""

import math
import sys
from typing import Any

import msgspec
import numpy as np

from holdfast import tensors
from holdfast.errors import Corrupt, MissingPackage, Mistake
from holdfast.transfer.frame import ALIGN, Buffer, Head

__all__ = ["pack", "unpack"]


class _Shape(msgspec.Struct):
    """What there is to know about a nested tensor besides its values."""

    layout: str
    rows: list[list[int]]
    """jagged: [offsets], or [offsets, lengths]; strided: the shape of each row."""
    rest: list[int]
    """jagged: the shape of `values`."""
    ragged: int = 1


def pack(key: str, tensor: Any) -> tuple[tuple[Buffer, ...], str, tuple[int, ...], int]:
    """Parts, dtype, shape and the length of the first part."""
    torch = sys.modules["torch"]
    if tensor.layout is torch.jagged:
        offsets, lengths = tensor.offsets().tolist(), tensor.lengths()
        rows = [offsets] if lengths is None else [offsets, lengths.tolist()]
        values = tensors.source(key, tensor.values())
        shape = _Shape("jagged", rows, list(values.shape), tensor._ragged_idx)
        data: list[Buffer] = [values.data]
        dtype = values.dtype
    else:
        found = [tensors.source(key, row) for row in tensor.unbind()]
        if not found:
            raise Mistake(f"{key} is a nested tensor without rows", key=key)
        shape = _Shape("strided", [list(one.shape) for one in found], [])
        data, dtype = [one.data for one in found], found[0].dtype
    text = msgspec.msgpack.encode(shape)
    front = len(text).to_bytes(8, "little") + text
    front += bytes(-len(front) % ALIGN)  # the values begin aligned, too
    count = len(shape.rows) if shape.layout == "strided" else len(shape.rows[0]) - 1
    return (front, *data), dtype, (count,), len(front)


def unpack(head: Head, payload: memoryview) -> Any:
    """The nested tensor."""
    try:
        import torch
    except ImportError as error:
        raise MissingPackage("torch is not installed: pip install 'holdfast-rl[train]'") from error
    try:
        length = int.from_bytes(payload[:8], "little")
        shape = msgspec.msgpack.decode(payload[8 : 8 + length], type=_Shape)
        values = payload[head.split :]
        if shape.layout == "strided":
            rows, begin = [], 0
            for row in shape.rows:
                end = begin + tensors.size(head.dtype, row)
                rows.append(tensors.as_torch(values[begin:end], head.dtype, row))
                begin = end
            return torch.nested.nested_tensor(rows)
        offsets, *lengths = (torch.from_numpy(np.array(row, np.int64)) for row in shape.rows)
        if math.prod(shape.rest) * tensors.DTYPES[head.dtype] != values.nbytes:
            raise Corrupt(f"{head.key}: rows and values do not fit", key=head.key)
        return torch.nested.nested_tensor_from_jagged(
            tensors.as_torch(values, head.dtype, shape.rest),
            offsets,
            lengths[0] if lengths else None,
            jagged_dim=shape.ragged,
        )
    except (msgspec.MsgspecError, Mistake) as error:
        raise Corrupt(f"{head.key}: {error}", key=head.key) from error
