"""A batch of TransferQueue's as values, row by row. Pure.

A column is a tensor, a stack of objects, or `NonTensorData`. The last is what becomes of a numpy
array of objects or text, and of what a caller wraps by hand. With a list, an array or a tensor in
it, row i is item i, as in TransferQueue's own storage; with anything else, that one object is the
value of every row (there, an error).
"""

from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, TensorDict  # type: ignore[import-not-found]

from holdfast.errors import Mistake

__all__ = ["values"]


def values(data: TensorDict) -> list[Any]:
    """All values, field by field in the order of names, row by row."""
    found: list[Any] = []
    count = data.batch_size[0]
    for field in sorted(data.keys()):
        column = data.get(field)
        if isinstance(column, NonTensorData):
            found += _wrapped(field, column.data, count)
        elif isinstance(column, torch.Tensor):
            found += column.unbind()
        else:  # a stack of objects; of anything else, rows that the store refuses
            found.extend(data[field])
    return found


def _wrapped(field: str, content: Any, count: int) -> list[Any]:
    is_array = isinstance(content, np.ndarray | torch.Tensor) and content.ndim > 0
    if not is_array and not isinstance(content, list):
        return [content] * count
    if len(content) != count:
        raise Mistake(
            f"the field {field} has {len(content)} items for {count} rows: give one for each, or "
            "wrap what is the value of every row, as in NonTensorStack(*[value] * rows)",
            key=field,
        )
    return list(content)
