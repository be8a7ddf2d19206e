"""What the bytes of a store mean: batches in segments, rows in tables. Pure.

A segment is filled from both ends. From the front come batches, from the back one byte per
value that says whether it is dead:

    batch batch batch ...  free  ... dead-bytes of the 2nd batch | dead-bytes of the 1st

    batch = header (128 bytes) | directory | zeros | frames, each at a multiple of 64
    directory = lengths | generations and stamps, if they differ | keys (msgpack)

The header names its place (slot, segment, position), its life and its number in the slot, and
has a checksum, and so has the directory: what lies there from an earlier life, or half
written, is never taken for a batch, whatever order the stores arrive in.

*Version* of a value: its generation, then its stamp (when it was put). Of two values of one
key the lower version was replaced, for good. Equal versions are copies of one value.
"""

import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from holdfast.transfer.frame import ALIGN, aligned

__all__ = [
    "HEADER",
    "MAX_BATCH",
    "OVERHEAD",
    "PAGE",
    "Header",
    "Ints",
    "costs",
    "make_directory",
    "make_header",
    "page_up",
    "read_directory",
    "read_header",
    "starts",
]

PAGE = 4096
HEADER = 128
MAX_BATCH = 1 << 20
"""Values of one batch."""
OVERHEAD = HEADER + 2 * ALIGN
"""What a batch takes beside what `costs` counts."""

Ints = npt.NDArray[np.int64]

_MAGIC = b"HFbatch1"
_FIELDS = struct.Struct("<8sQQQIIQQQQQQQ")
_SUM = struct.Struct("<Q")
_KEYS = msgspec.msgpack.Decoder(list[str])
_encode = msgspec.msgpack.Encoder().encode


class Header(msgspec.Struct, frozen=True):
    """The head of a batch."""

    life: int
    """Which filling of the segment it belongs to."""
    seq: int
    """Its number in the slot. It is committed when the board says at least this."""
    at: int
    slot: int
    segment: int
    count: int
    directory: int
    """Bytes of the directory."""
    total: int
    """Bytes from this header to the next."""
    dead_at: int
    """Where the dead-bytes begin, one per value."""
    generation: int
    """Of all values; 0: each has its own, in the directory."""
    stamp: int
    directory_sum: int


def page_up(size: int) -> int:
    """The next multiple of a page."""
    return (size + PAGE - 1) // PAGE * PAGE


def make_header(header: Header) -> bytes:
    """A header as bytes."""
    data = _FIELDS.pack(_MAGIC, *msgspec.structs.astuple(header))
    return (data + _SUM.pack(xxh3_64_intdigest(data))).ljust(HEADER, b"\0")


def read_header(data: bytes) -> Header | None:
    """The header that these bytes are, if they are one."""
    if data[: len(_MAGIC)] != _MAGIC or len(data) < HEADER:
        return None
    if _SUM.unpack_from(data, _FIELDS.size)[0] != xxh3_64_intdigest(data[: _FIELDS.size]):
        return None
    return Header(*_FIELDS.unpack_from(data)[1:])


def make_directory(keys: Sequence[str], sizes: Ints, versions: tuple[Ints, Ints] | None) -> bytes:
    """The directory of a batch."""
    arrays = (sizes,) if versions is None else (sizes, *versions)
    return b"".join([*(one.tobytes() for one in arrays), _encode(keys)])


def read_directory(
    header: Header, data: bytes
) -> tuple[list[str], Ints, tuple[Ints, Ints] | None] | None:
    """Keys, lengths and, if they differ, generations and stamps; None if it is not whole."""
    if xxh3_64_intdigest(data) != header.directory_sum:
        return None
    many = 1 if header.generation else 3
    columns = np.frombuffer(data, np.int64, many * header.count).reshape(many, header.count)
    keys = _KEYS.decode(memoryview(data)[columns.nbytes :])
    return keys, columns[0], None if header.generation else (columns[1], columns[2])


def starts(at: int, directory: int, sizes: Ints) -> Ints:
    """Where the frames of a batch lie, and, as one item more, where they end."""
    found: Ints = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum((sizes + (ALIGN - 1)) // ALIGN * ALIGN, out=found[1:])
    found += at + HEADER + aligned(directory)
    return found


def costs(keys: Sequence[str], sizes: Ints, own_versions: bool) -> Ints:
    """At most so many bytes of a segment for each value."""
    names: npt.NDArray[Any] = np.fromiter(map(len, keys), np.int64, len(keys))
    each = 8 + 5 + 1 + (16 if own_versions else 0)
    found: Ints = (sizes + (ALIGN - 1)) // ALIGN * ALIGN + names * 4 + each
    return found
