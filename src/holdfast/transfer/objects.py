"""Plain objects as msgpack, so that they come back as they were: no pickle, no guessing.

None, booleans, whole numbers of any size, floats, text, bytes, lists, tuples, sets,
dictionaries with plain keys, and tensors and numpy's numbers inside of them; numpy arrays of
such objects and of text. Tuples, sets, large numbers, tensors and arrays travel as extensions,
because msgpack has no word of its own for them. Everything else is refused by name, with what to
use instead; so is what is nested deeper than `MAX_DEPTH`.
"""

import dataclasses
import os
import re
import struct
import sys
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from holdfast import tensors
from holdfast.errors import Corrupt, Mistake

__all__ = ["MAX_DEPTH", "decode", "encode", "holds_objects"]

MAX_DEPTH = 64

_TUPLE, _SET, _FROZENSET, _INT, _ARRAY, _TENSOR, _COMPLEX, _SCALAR, _OBJECTS = range(1, 10)
_OBJECT_KINDS = "OUST"
"""Of numpy's dtypes: objects, text, bytes, text of any length."""
_SMALL = (-(1 << 63), (1 << 64) - 1)
_PLAIN = (str, bytes, float, bool, type(None))
_KEYS = (str, int, bytes, bool, float, type(None))

_OBJECT_DTYPES = re.compile(r"O|T|[<>|=][US]\d{1,9}", re.ASCII)
_ADVICE = {
    "enum.Enum": "value.value",
    "datetime.datetime": "value.isoformat()",
    "datetime.date": "value.isoformat()",
    "datetime.timedelta": "value.total_seconds()",
    "decimal.Decimal": "str(value)",
    "torch.dtype": "str(value)",
    "torch.device": "str(value)",
    "pydantic.main.BaseModel": "value.model_dump()",
    "PIL.Image.Image": "numpy.asarray(value)",
    "tensordict.base.TensorDictBase": "a field of its own for each of its entries",
}
"""What to use instead of classes that are met often."""

_encoder = msgspec.msgpack.Encoder()


def encode(key: str, value: object) -> bytes:
    """A plain object as bytes. Raises `Mistake` naming what cannot be carried."""
    try:
        return _encoder.encode(_lower(value, 0))
    except Mistake as error:
        raise Mistake(f"the value of {key} {error}", key=key) from None
    except UnicodeEncodeError:
        raise Mistake(f"the value of {key} has text that is not valid Unicode", key=key) from None


def decode(key: str, data: memoryview) -> Any:
    """The object. Raises `Corrupt` when these bytes are none."""
    try:
        return msgspec.msgpack.decode(data, ext_hook=_raise_ext)
    except (msgspec.DecodeError, ValueError, TypeError, struct.error) as error:
        raise Corrupt(f"{key}: not an object: {error}", key=key) from error


def holds_objects(value: object) -> bool:
    """Whether it is a numpy array, or a number of one, whose bytes are not its values."""
    return (
        isinstance(value, np.ndarray | np.generic)
        and value.dtype.kind in _OBJECT_KINDS
        and value.dtype.fields is None
    )


def _lower(value: Any, depth: int) -> Any:
    """The same in msgpack's own words."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is int:
        if _SMALL[0] <= value <= _SMALL[1]:
            return value
        length = value.bit_length() // 8 + 1
        return msgspec.msgpack.Ext(_INT, value.to_bytes(length, "little", signed=True))
    if depth >= MAX_DEPTH:
        raise Mistake(f"is nested deeper than {MAX_DEPTH}")
    if kind is list:
        return [_lower(item, depth + 1) for item in value]
    if kind is dict:
        return {_key(name): _lower(item, depth + 1) for name, item in value.items()}
    for code, sort in ((_TUPLE, tuple), (_SET, set), (_FROZENSET, frozenset)):
        if kind is sort:
            return msgspec.msgpack.Ext(
                code, _encoder.encode([_lower(item, depth + 1) for item in value])
            )
    if kind is complex:
        return msgspec.msgpack.Ext(_COMPLEX, struct.pack("<dd", value.real, value.imag))
    if holds_objects(value):
        return _objects(value, depth)
    return _tensor(value)


def _objects(value: Any, depth: int) -> Any:
    """An array of objects or text: its items, one by one."""
    array = np.asarray(value)
    if array.dtype.kind == "T" and array.dtype != np.dtypes.StringDType():
        raise Mistake(f"has an array of {array.dtype!r} in it: use value.astype(object)")
    dtype = array.dtype.kind if array.dtype.kind in "OT" else array.dtype.str
    items = [_lower(item, depth + 1) for item in array.ravel().tolist()]
    scalar = isinstance(value, np.generic)
    return msgspec.msgpack.Ext(
        _OBJECTS, _encoder.encode([dtype, list(array.shape), scalar, items])
    )


def _raise_objects(data: memoryview) -> Any:
    front = tuple[str, list[int], bool, list[Any]]
    dtype, shape, scalar, items = msgspec.msgpack.decode(data, type=front, ext_hook=_raise_ext)
    if not _OBJECT_DTYPES.fullmatch(dtype):
        raise ValueError(f"{dtype!r} is not a dtype of objects or text")
    kind = np.dtypes.StringDType() if dtype == "T" else np.dtype(dtype)
    array = np.empty(len(items), kind)
    for at, item in enumerate(items):  # not all at once: an item may be a list itself
        array[at] = item
    array = array.reshape(shape)
    return array[()] if scalar else array


def _key(name: Any) -> Any:
    if type(name) not in _KEYS or (type(name) is int and not _SMALL[0] <= name <= _SMALL[1]):
        raise Mistake(f"has a dictionary with the key {name!r:.40}: use text")
    return name


def _instead(value: Any) -> str:
    """What to put in its place."""
    kind = type(value)
    names = {f"{one.__module__}.{one.__qualname__}" for one in kind.__mro__}
    for known, advice in _ADVICE.items():
        if known in names:
            return f"use {advice}"
    if isinstance(value, os.PathLike):
        return "use str(value)"
    if dataclasses.is_dataclass(value):
        return "use dataclasses.asdict(value)"
    for plain in (tuple, dict, list, set, str, bytes, int, float):
        if isinstance(value, plain):
            return f"use {plain.__name__}(value)"
    if isinstance(value, Iterable):
        return "use list(value)"
    return "use plain numbers, text, bytes, lists, tuples, sets, dictionaries, tensors"


def _tensor(value: Any) -> Any:
    torch = sys.modules.get("torch")
    is_tensor = torch is not None and isinstance(value, torch.Tensor)
    if is_tensor and value.is_nested:
        raise Mistake("has a nested tensor inside: put it under a key of its own")
    scalar = isinstance(value, np.generic)
    if scalar:
        value = np.asarray(value)
    if not is_tensor and not isinstance(value, np.ndarray):
        raise Mistake(
            f"has a {type(value).__module__}.{type(value).__qualname__} in it, which cannot be "
            f"carried: {_instead(value)}"
        )
    found = tensors.source("inside", value)
    front = _encoder.encode([found.dtype, list(found.shape)])
    return msgspec.msgpack.Ext(
        _TENSOR if is_tensor else _SCALAR if scalar else _ARRAY,
        len(front).to_bytes(4, "little") + front + bytes(found.data),
    )


def _raise_ext(code: int, data: memoryview) -> Any:
    """Back from an extension."""
    if code == _INT:
        return int.from_bytes(data, "little", signed=True)
    if code == _COMPLEX:
        return complex(*struct.unpack("<dd", data))
    if code in (_TUPLE, _SET, _FROZENSET):
        items = msgspec.msgpack.decode(data, type=list, ext_hook=_raise_ext)
        return {_TUPLE: tuple, _SET: set, _FROZENSET: frozenset}[code](items)
    if code == _OBJECTS:
        return _raise_objects(data)
    if code in (_ARRAY, _TENSOR, _SCALAR):
        length = 4 + int.from_bytes(data[:4], "little")
        dtype, shape = msgspec.msgpack.decode(data[4:length], type=tuple[str, list[int]])
        memory = memoryview(bytearray(data[length:]))
        if code == _TENSOR:
            return tensors.as_torch(memory, dtype, shape)
        array = tensors.as_numpy(memory, dtype, shape)
        return array if code == _ARRAY else array[()]
    raise ValueError(f"unknown extension {code}")
