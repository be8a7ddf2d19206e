"""Values of every kind, and what it means that two are the same."""

import warnings
from typing import Any

import numpy as np
import torch

__all__ = ["SAMPLES", "objects", "same"]

_RNG = np.random.default_rng(7)


def _floats(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.from_numpy(_RNG.standard_normal(shape)).to(dtype)


def objects(*items: Any) -> Any:
    """An array of objects, whatever they are."""
    array = np.empty(len(items), object)
    for at, item in enumerate(items):
        array[at] = item
    return array


def _samples() -> dict[str, Any]:
    made: dict[str, Any] = {
        "none": None,
        "bytes empty": b"",
        "bytes": bytes(range(256)) * 5,
        "text": "grün \0 \U0001f9ca",
        "text empty": "",
        "zero": 0,
        "false": False,
        "big": 2**200,
        "big negative": -(3**150),
        "float": 0.1,
        "list empty": [],
        "dict": {"a": [1, (2, 3), {4, 5}], "b": {"c": None, 7: b"x"}, "d": frozenset({1})},
        "tuple": (1, ("two", 3.0), [None]),
        "complex": 1 + 2j,
        "inside": {"t": torch.arange(6).reshape(2, 3), "n": (np.array([1.5], np.float32), b"")},
        "array": _RNG.standard_normal((3, 4, 5)),
        "array 0-d": np.array(3.5, np.float32),
        "array empty": np.empty((0, 7), np.int16),
        "array strided": np.arange(60).reshape(6, 10)[::2, 1::3],
        "array transposed": np.arange(12, dtype=np.int32).reshape(3, 4).T,
        "array bool": np.array([True, False, True]),
        "array complex": np.array([1 + 2j, -3j]),
        "array uint64": np.array([2**64 - 1], np.uint64),
        "array text": np.array([["x", ""], ["grün", "\U0001f9ca"]]),
        "array bytes": np.array([b"x", b"", b"yz"]),
        "array objects": objects("x", {"a": [1, np.arange(2)]}, None, [1, 2], torch.ones(2)),
        "array objects 2-d": np.array([[1, "a"], [None, 2**100]], dtype=object),
        "array objects empty": np.empty((0, 3), object),
        "array objects 0-d": np.array("x", dtype=object),
        "array of arrays": {"a": objects(np.array(["x"]), np.array([1, None], dtype=object))},
        "text of numpy": np.str_("x"),
        "bytes of numpy": [np.bytes_(b"x"), np.float32(1.5), np.bool_(True)],
        "number of numpy": np.int64(-3),
        "inside of numpy": [np.bytes_(b"x"), {"reward": np.float32(1.5)}, np.bool_(True)],
        "tensor 0-d": torch.tensor(2.5, dtype=torch.bfloat16),
        "tensor empty": torch.empty((4, 0, 2), dtype=torch.float16),
        "tensor strided": torch.arange(60).reshape(6, 10)[::2, 1::3],
        "tensor transposed": torch.arange(12).reshape(3, 4).T,
        "tensor bool": torch.tensor([[True, False]]),
        "tensor nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "jagged": torch.nested.nested_tensor(
            [_floats(torch.float32, 3, 2), _floats(torch.float32, 0, 2)], layout=torch.jagged
        ),
        "nested strided": torch.nested.nested_tensor(
            [_floats(torch.float32, 3, 2), _floats(torch.float32, 1, 5)], layout=torch.strided
        ),
    }
    for name in ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"):
        made[f"tensor {name}"] = _floats(getattr(torch, name), 5, 3)
    for name in ("int8", "uint8", "int16", "int32", "int64"):
        made[f"tensor {name}"] = torch.arange(17, dtype=getattr(torch, name))
    return made


with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message=".*nested tensors is in prototype")
    SAMPLES = _samples()


def same(left: Any, right: Any) -> bool:
    """Same type, dtype, shape and bits, all the way down."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        if left.is_nested or right.is_nested:
            return (
                left.is_nested == right.is_nested
                and left.layout == right.layout
                and all(map(same, left.unbind(), right.unbind()))
                and len(left.unbind()) == len(right.unbind())
            )
        return bool(
            left.dtype == right.dtype
            and left.shape == right.shape
            and left.contiguous().flatten().view(torch.uint8).numpy().tobytes()
            == right.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        )
    if isinstance(left, np.ndarray) and left.dtype == object:
        return left.shape == right.shape and same(left.ravel().tolist(), right.ravel().tolist())
    if isinstance(left, np.ndarray):
        return bool(
            left.dtype == right.dtype
            and left.shape == right.shape
            and left.tobytes() == right.tobytes()
        )
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    return bool(left == right)
