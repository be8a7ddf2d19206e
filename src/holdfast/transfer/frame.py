"""Frames: what a value looks like in a store.

    head (a multiple of 64 bytes)                           payload
    magic kind dtype ndim head_size key_size generation     as many bytes as `size` says
    size checksum split | shape | key | zeros

A frame says what it is, under which key and generation it was put, and proves it: the
checksum (xxh3, 64 bits) covers the head, with itself left out, and the payload. So an empty
or short answer is never a value, a flipped bit is always seen, and a value that was put
under another key or at another time is not taken for this one.

The payload begins at a multiple of 64 bytes, so that it can be used where it lies. Pure:
bytes in, bytes out. Machines are little-endian.
"""

import struct
from collections.abc import Sequence
from typing import Literal

import msgspec
from xxhash import xxh3_64, xxh3_64_intdigest

from holdfast.errors import Corrupt, Gone, Mistake, TooLarge

__all__ = [
    "ALIGN",
    "BORN_AT",
    "FIXED_BYTES",
    "HEAD_SIZE_AT",
    "KEY_SIZE_AT",
    "MAX_HEAD",
    "MAX_KEY_BYTES",
    "SUM_AT",
    "Buffer",
    "Head",
    "Kind",
    "Ref",
    "aligned",
    "check_key",
    "checksum",
    "make_head",
    "open_head",
    "prove",
]

ALIGN = 64
MAX_KEY_BYTES = 512
MAX_DIMS = 64
MAX_HEAD = 1152
"""No head is longer: fixed part, 64 dimensions, the longest key, padding."""

Kind = Literal["none", "bytes", "object", "array", "tensor", "jagged"]
KINDS: tuple[Kind, ...] = ("none", "bytes", "object", "array", "tensor", "jagged")
_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}

DTYPES = (
    *("", "C128", "F64", "I64", "U64", "C64", "F32", "I32", "U32", "F16", "BF16", "I16", "U16"),
    *("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"),
)
"""The numbers of dtypes in a frame. New ones go to the end."""
_DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}

_MAGIC = b"HFt1"
_FIXED = struct.Struct("<4sBBBBHHIQQQQ")
HEAD_SIZE_AT, KEY_SIZE_AT, BORN_AT, SUM_AT = 8, 10, 16, 32
"""Where things are in a head; the generation is `BORN_AT`."""
FIXED_BYTES = _FIXED.size
"""Where the shape begins in a head; the key follows it."""
_BEFORE_SUM = struct.Struct("<4sBBBBHHIQQ")
_SHAPES = [struct.Struct(f"<{ndim}Q") for ndim in range(MAX_DIMS + 1)]
_PAD = bytes(ALIGN)

Buffer = bytes | bytearray | memoryview


class Ref(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A reference to one value: this key, as it was put then, with exactly these bytes."""

    key: str
    generation: int
    checksum: int
    nbytes: int
    """The whole frame, head and payload."""


class Head(msgspec.Struct, frozen=True):
    """What a frame says about itself."""

    kind: Kind
    key: str
    generation: int
    size: int
    """Bytes of payload."""
    checksum: int
    nbytes: int
    """Bytes of head: where the payload begins."""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    split: int = 0
    """Of a jagged tensor: bytes of its offsets, which come before its values."""
    seed: int = 0
    """What the checksum of the payload begins with: the checksum of the head."""


def aligned(size: int) -> int:
    """The next multiple of 64."""
    return (size + ALIGN - 1) // ALIGN * ALIGN


def check_key(key: object) -> str:
    """Refuse what is not a key."""
    if type(key) is not str or not key:
        raise Mistake(f"a key is text that is not empty, not {_short(key)}")
    if not key.isprintable():
        raise Mistake(f"the key {_short(key)} has characters that cannot be printed", key=key)
    if len(key) * 4 > MAX_KEY_BYTES and len(key.encode()) > MAX_KEY_BYTES:
        raise TooLarge(
            f"the key {_short(key)} has {len(key.encode())} bytes; the limit is {MAX_KEY_BYTES}",
            key=key,
        )
    return key


def checksum(parts: Sequence[Buffer], seed: int) -> int:
    """The checksum of a payload, which may lie in several places."""
    if len(parts) == 1:
        return xxh3_64_intdigest(parts[0], seed)
    state = xxh3_64(seed=seed)
    for part in parts:
        state.update(part)
    return state.intdigest()


def make_head(
    kind: Kind,
    key: str,
    generation: int,
    parts: Sequence[Buffer],
    *,
    dtype: str = "",
    shape: tuple[int, ...] = (),
    split: int = 0,
) -> tuple[bytes, Ref]:
    """The head of a frame around this payload, and the reference to it.

    The parts are bytes: their length is the number of their items.
    """
    name = key.encode()
    ndim = len(shape)
    size = sum(map(len, parts))
    length = _FIXED.size + 8 * ndim + len(name)
    nbytes = aligned(length)
    front = _BEFORE_SUM.pack(
        _MAGIC,
        _NUMBERS[kind],
        _DTYPE_NUMBERS[dtype],
        ndim,
        0,
        nbytes,
        len(name),
        0,
        generation,
        size,
    )
    back = split.to_bytes(8, "little") + _SHAPES[ndim].pack(*shape) + name
    back += _PAD[: nbytes - length]
    seed = xxh3_64_intdigest(front + back)
    proof = checksum(parts, seed)
    head = b"".join((front, proof.to_bytes(8, "little"), back))
    return head, Ref(key, generation, proof, nbytes + size)


def open_head(frame: Buffer, wanted: Ref | str, total: int | None = None) -> Head:
    """Read the head of a frame; the payload is not proven yet (see `prove`).

    `frame` is the whole frame, or its beginning of at least `MAX_HEAD` bytes when `total`
    says how long all of it is. Raises `Corrupt` when it is no frame, or not a whole one, and
    `Gone` when it is not the value that the reference speaks of.
    """
    key = wanted if isinstance(wanted, str) else wanted.key
    total = len(frame) if total is None else total
    if total < _FIXED.size or len(frame) < _FIXED.size:
        raise Corrupt(f"{key}: {total} bytes are not a value, not even an empty one", key=key)
    magic, kind, dtype, ndim, _, nbytes, key_size, _, generation, size, proof, split = (
        _FIXED.unpack_from(frame)
    )
    end = _FIXED.size + 8 * ndim + key_size
    if (
        magic != _MAGIC
        or kind >= len(KINDS)
        or dtype >= len(DTYPES)
        or ndim > MAX_DIMS
        or not end <= nbytes <= MAX_HEAD
        or nbytes + size != total
        or split > size
        or nbytes > len(frame)
    ):
        raise Corrupt(f"{key}: what is stored there is not a whole value", key=key)
    name = bytes(frame[end - key_size : end])
    head = Head(
        KINDS[kind],
        key,
        generation,
        size,
        proof,
        nbytes,
        DTYPES[dtype],
        _SHAPES[ndim].unpack_from(frame, _FIXED.size),
        split,
        xxh3_64_intdigest(bytes(frame[:SUM_AT]) + bytes(frame[SUM_AT + 8 : nbytes])),
    )
    if name != key.encode():
        raise Corrupt(f"{key}: what is stored there was put under another key", key=key)
    return head


def prove(head: Head, parts: Sequence[Buffer], wanted: Ref | str) -> None:
    """Prove that these are the bytes that were put, and that they are what was asked for.

    Only a proven head may speak of its generation: one that is damaged says anything.
    """
    if checksum(parts, head.seed) != head.checksum:
        raise Corrupt(f"{head.key}: the bytes are not those that were put", key=head.key)
    if isinstance(wanted, Ref) and (
        wanted.generation != head.generation or wanted.checksum != head.checksum
    ):
        raise Gone(
            f"{head.key}: the value that is meant is no longer there; another one has been put "
            "in its place",
            key=head.key,
        )


def _short(key: object) -> str:
    text = repr(key)
    return text if len(text) <= 80 else text[:77] + "..."
