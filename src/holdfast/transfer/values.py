"""Values: what may be put, as the payload of a frame and back.

    None                      kind "none", no payload
    bytes, bytearray, memoryview   kind "bytes"; comes back as bytes
    numpy array               kind "array": its bytes, row by row
    torch tensor              kind "tensor"
    nested torch tensor       kind "jagged": offsets (and lengths), then values
    anything plain, numpy arrays of objects or text
                              kind "object": msgpack; see `objects.py`

What comes back is what was put: same type, dtype, shape and bits. Tensors come back on the
CPU, contiguous, without gradients. There is no pickle.
"""

import sys
from typing import Any

import msgspec
import numpy as np

from holdfast import tensors
from holdfast.errors import Corrupt, MissingPackage, Mistake
from holdfast.transfer import jagged, objects
from holdfast.transfer.frame import Buffer, Head, Kind

__all__ = ["Packed", "fits", "pack", "room", "unpack"]


class Packed(msgspec.Struct, frozen=True):
    """A value as the parts of a payload. It keeps what it was made from alive."""

    kind: Kind
    parts: tuple[Buffer, ...]
    dtype: str = ""
    shape: tuple[int, ...] = ()
    split: int = 0


_NONE = Packed("none", (b"",))


def pack(key: str, value: object) -> Packed:
    """A value as bytes, without a copy where it lies contiguous. Raises `Mistake`."""
    if value is None:
        return _NONE
    if objects.holds_objects(value):
        return Packed("object", (objects.encode(key, value),))
    if isinstance(value, bytes | bytearray):
        return Packed("bytes", (value,))
    if isinstance(value, memoryview):
        return Packed("bytes", (value.cast("B") if value.c_contiguous else value.tobytes(),))
    if isinstance(value, np.ndarray):
        found = tensors.source(key, value)
        return Packed("array", (found.data,), found.dtype, found.shape)
    torch = sys.modules.get("torch")  # whoever holds a torch tensor has imported torch
    if torch is not None and isinstance(value, torch.Tensor):
        if value.is_nested:
            parts, dtype, shape, split = jagged.pack(key, value)
            return Packed("jagged", parts, dtype, shape, split)
        found = tensors.source(key, value)
        return Packed("tensor", (found.data,), found.dtype, found.shape)
    return Packed("object", (objects.encode(key, value),))


def room(key: str, destination: object) -> tensors.Source:
    """The memory of what the caller wants a value read into; a buffer has no dtype."""
    if isinstance(destination, memoryview | bytearray):
        view = memoryview(destination)
        if not view.c_contiguous or view.readonly:
            raise Mistake(f"the buffer for {key} must be contiguous and writable", key=key)
        return tensors.Source(key, "", (view.nbytes,), view.cast("B"))
    contiguous = isinstance(destination, np.ndarray) and (
        destination.flags.c_contiguous and destination.flags.writeable
    )
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(destination, torch.Tensor):
        contiguous = (
            not destination.is_nested
            and destination.is_contiguous()
            and destination.device.type == "cpu"
        )
    if not contiguous:
        raise Mistake(
            f"the buffer for {key} must be a contiguous, writable array, a tensor on the CPU or a "
            "bytearray",
            key=key,
        )
    return tensors.source(key, destination)


def fits(head: Head, found: tensors.Source) -> None:
    """Refuse a destination of another dtype, shape or size than the value."""
    key, size = head.key, len(found.data)
    if not found.dtype:
        if head.size != size:
            raise Mistake(f"{key} has {head.size} bytes, and its buffer {size}", key=key)
        return
    if head.kind not in ("array", "tensor"):
        raise Mistake(
            f"{key} is not a tensor (kind: {head.kind}): get it without a buffer", key=key
        )
    if (found.dtype, found.shape) != (head.dtype, head.shape):
        raise Mistake(
            f"{key} is {head.dtype} of shape {head.shape}, and its buffer {found.dtype} of shape "
            f"{found.shape}",
            key=key,
        )


def unpack(head: Head, payload: memoryview) -> Any:
    """A value from its proven payload. Tensors keep and share the memory of `payload`."""
    match head.kind:
        case "none":
            return None
        case "bytes":
            return payload.tobytes()
        case "object":
            return objects.decode(head.key, payload)
        case "jagged":
            return jagged.unpack(head, payload)
    try:
        if head.kind == "array":
            return tensors.as_numpy(payload, head.dtype, head.shape)
        return tensors.as_torch(payload, head.dtype, head.shape)
    except MissingPackage:
        raise
    except Mistake as error:
        raise Corrupt(f"{head.key}: {error}", key=head.key) from error
