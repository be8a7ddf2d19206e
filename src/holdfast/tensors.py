"""From and to tensors: torch and numpy on one side, named runs of bytes on the other.

`source` turns a tensor into a `Source`: name, dtype, shape and a flat view of the bytes,
row by row and little-endian, as they stand in a safetensors file. What lies contiguous in
the memory of this machine is not copied, so the caller must leave it alone until it is
written. `as_numpy` and `as_torch` go the other way, over a buffer that they do not copy.

torch is never imported for somebody who does not use it. Nothing here opens a file.
Machines are little-endian.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from holdfast.errors import MissingPackage, Mistake, TooLarge

if TYPE_CHECKING:
    import torch

__all__ = [
    "DTYPES",
    "MAX_DIMS",
    "MAX_NAME_BYTES",
    "Source",
    "as_numpy",
    "as_torch",
    "name_problem",
    "size",
    "source",
    "sources",
]

MAX_NAME_BYTES = 1024
MAX_DIMS = 64
"""numpy has no more."""

# What torch, numpy and ml_dtypes all call them, and the bytes of an item.
_TABLE: Mapping[str, tuple[str, int]] = {
    "C128": ("complex128", 16),
    "F64": ("float64", 8),
    "I64": ("int64", 8),
    "U64": ("uint64", 8),
    "C64": ("complex64", 8),
    "F32": ("float32", 4),
    "I32": ("int32", 4),
    "U32": ("uint32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I16": ("int16", 2),
    "U16": ("uint16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
}
DTYPES: Mapping[str, int] = {code: size for code, (_, size) in _TABLE.items()}
"""Bytes per item, by safetensors code (C128 is ours). Items smaller than a byte are left out."""

_NAMES = {code: name for code, (name, _) in _TABLE.items()}
_CODES = {name: code for code, name in _NAMES.items()}
_plain_codes: dict[object, str] = {}
"""The codes of torch's dtypes that numpy has, too, as far as they were met."""


class Source(msgspec.Struct, frozen=True):
    """A tensor that is to be written."""

    name: str
    dtype: str
    """A code of `DTYPES`."""
    shape: tuple[int, ...]
    data: memoryview
    """All of its bytes: flat, contiguous, unsigned. Keeps the tensor alive."""


def size(dtype: str, shape: Sequence[int]) -> int:
    """How many bytes such a tensor has."""
    return DTYPES[dtype] * math.prod(shape)


def name_problem(name: object) -> str | None:
    """Why this cannot be the name of a tensor, or None."""
    if not isinstance(name, str):
        return f"is not text but {type(name).__name__}"
    if not name:
        return "is empty"
    if name == "__metadata__":
        return "is reserved by the safetensors format"
    try:
        length = len(name.encode())
    except UnicodeEncodeError:
        return "is not valid Unicode"
    if length > MAX_NAME_BYTES:
        return f"has {length} bytes; the limit is {MAX_NAME_BYTES}"
    return None


def sources(tensors: Mapping[str, object]) -> list[Source]:
    """The tensors as bytes, in the order of their names. Raises `Mistake` naming the tensor.

    Tensors on other devices are copied to this machine's memory, all of them. Two names
    for one tensor (tied weights) are two sources.
    """
    if not tensors:
        raise Mistake("there are no tensors to publish: the mapping is empty")
    for name in tensors:
        problem = name_problem(name)
        if problem is not None:
            raise Mistake(f"the tensor name {_short(name)} {problem}")
    found = [source(str(name), tensors[name]) for name in sorted(tensors)]
    for one in found:
        if one.dtype == "C128":
            raise Mistake(
                f"tensor {one.name} is complex128, which safetensors does not have: convert it",
                key=one.name,
            )
    return found


def source(name: str, value: object) -> Source:
    """One tensor as bytes; `name` is for errors. Raises `Mistake` when it has none."""
    if isinstance(value, np.ndarray):
        return _from_numpy(name, value)
    # Whoever holds a torch tensor has imported torch.
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _plain(name, value, torch) or _from_torch(name, value, torch)
    raise Mistake(
        f"tensor {name} is a {type(value).__name__}: pass torch tensors or numpy arrays", key=name
    )


def _plain(name: str, tensor: Any, torch: Any) -> Source | None:
    """The quick way, for what most tensors are: on the CPU, contiguous, known to numpy."""
    if (
        type(tensor) is not torch.Tensor
        or tensor.requires_grad
        or tensor.layout is not torch.strided
        or not tensor.is_cpu
        or tensor.is_quantized
        or not tensor.is_contiguous()
        or not tensor.numel()
        or tensor.dim() > MAX_DIMS
    ):
        return None
    if tensor.is_conj() or tensor.is_neg():
        return None  # views that only promise a conjugate or a sign
    code = _plain_codes.get(tensor.dtype)
    if code is None:
        code = _CODES.get(str(tensor.dtype).removeprefix("torch."))
        if code is None or code == "BF16" or code.startswith("F8_"):
            return None
        _plain_codes[tensor.dtype] = code
    return Source(name, code, tuple(tensor.shape), memoryview(tensor.numpy()).cast("B"))


def _from_torch(name: str, tensor: Any, torch: Any) -> Source:
    problem = _torch_problem(tensor, torch)
    if problem is not None:
        raise Mistake(f"tensor {name} {problem}", key=name)
    code = _code(name, str(tensor.dtype).removeprefix("torch."))
    shape = _shape(name, tensor.shape)
    # Views that only promise a conjugate or a sign have other bytes than values.
    here = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if here.numel() == 0:
        return Source(name, code, shape, memoryview(b""))
    try:
        # Not reshape: a single item may be "contiguous" with a stride that view refuses.
        flat = here.as_strided((here.numel(),), (1,))
        data = memoryview(flat.view(torch.uint8).numpy())
    except (RuntimeError, TypeError) as error:
        raise Mistake(
            f"tensor {name} is a {type(tensor).__name__} whose bytes cannot be read: {error}",
            key=name,
        ) from error
    return Source(name, code, shape, data)


def _torch_problem(tensor: Any, torch: Any) -> str | None:
    if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
        return "is not initialized: run the model once"
    if tensor.is_nested:
        return "is nested: pass its parts as tensors of their own"
    if hasattr(tensor, "__tensor_flatten__"):
        return (
            f"is a {type(tensor).__name__}, which is made of other tensors: pass a plain tensor "
            "(to_local() or full_tensor() of a DTensor)"
        )
    if tensor.is_meta:
        return "is on the meta device: it has no values"
    if tensor.is_quantized:
        return "is quantized: pass int_repr(), scales and zero points as tensors of their own"
    if tensor.layout is not torch.strided:
        return f"is sparse ({tensor.layout}): pass to_dense()"
    return None


def _from_numpy(name: str, array: np.ndarray[Any, Any]) -> Source:
    if isinstance(array, np.ma.MaskedArray):
        raise Mistake(f"tensor {name} is a masked array: pass filled()", key=name)
    code = _code(name, array.dtype.name)
    shape = _shape(name, array.shape)
    if array.size == 0:
        return Source(name, code, shape, memoryview(b""))
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    flat = np.ascontiguousarray(np.asarray(array)).reshape(-1)
    return Source(name, code, shape, flat.view(np.uint8).data)


def _code(name: str, dtype: str) -> str:
    code = _CODES.get(dtype)
    if code is None:
        raise Mistake(
            f"tensor {name} has the dtype {dtype}, which cannot be stored: convert it to one "
            f"of {', '.join(_CODES)}",
            key=name,
        )
    return code


def _shape(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    if len(shape) > MAX_DIMS:
        raise TooLarge(
            f"tensor {name} has {len(shape)} dimensions; the limit is {MAX_DIMS}", key=name
        )
    return tuple(shape)


def as_numpy(view: memoryview, dtype: str, shape: Sequence[int]) -> np.ndarray[Any, Any]:
    """An array over these bytes, without a copy; read-only if the buffer is."""
    _check_view(view, dtype, shape)
    if dtype == "BF16" or dtype.startswith("F8_"):
        raise Mistake(f"numpy has no {_NAMES[dtype]}: load it with torch, or take the raw view")
    return np.ndarray(tuple(shape), np.dtype(_NAMES[dtype]), buffer=view)


def as_torch(view: memoryview, dtype: str, shape: Sequence[int]) -> "torch.Tensor":
    """A tensor over these bytes, without a copy where torch allows that.

    It is copied if the buffer is read-only, because every torch tensor can be written, or
    if it begins at an address that is no multiple of the item size; neither happens with
    files that Holdfast wrote and maps.
    """
    try:
        import torch
    except ImportError as error:
        raise MissingPackage("torch is not installed: pip install 'holdfast-rl[train]'") from error
    _check_view(view, dtype, shape)
    kind = getattr(torch, _NAMES[dtype], None)
    if kind is None:
        raise Mistake(f"torch {torch.__version__} has no {_NAMES[dtype]}: use a newer torch")
    if view.nbytes == 0:
        return torch.empty(tuple(shape), dtype=kind)
    flat = torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)
    if flat.data_ptr() % DTYPES[dtype]:
        flat = flat.clone()
    return flat.view(kind).reshape(tuple(shape))


def _check_view(view: memoryview, dtype: str, shape: Sequence[int]) -> None:
    if dtype not in DTYPES:
        raise Mistake(f"{dtype!r} is not a dtype: use one of {', '.join(DTYPES)}")
    if view.nbytes != DTYPES[dtype] * math.prod(shape):
        raise Mistake(
            f"{view.nbytes} bytes cannot be a tensor of {dtype} and shape {tuple(shape)}"
        )


def _short(name: object) -> str:
    text = repr(name)
    return text if len(text) <= 80 else text[:77] + "..."
