"""The safetensors file format, written and read by hand.

    8 bytes   N, the length of the header, little-endian
    N bytes   JSON: {"__metadata__": {text: text}, name: {dtype, shape, data_offsets}, …},
              filled up with spaces so that the data begins at a multiple of 8
    the rest  the tensors, one behind the other without holes

By hand, because the library wants all tensors of a file as one mapping and makes the bytes
itself, while here they go to the disk straight from where they lie; and because it reads
paths, while here a file is open already and its path may be somebody else's by now.

What `parse` accepts the library accepts too, and reads alike. `parse` refuses more: JSON
keys that stand there twice, unknown fields, items smaller than a byte.

This module is pure: no file access.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from holdfast.errors import Corrupt, Mistake, TooLarge
from holdfast.tensors import DTYPES, MAX_DIMS, Source, name_problem, size

__all__ = ["MAX_HEADER_BYTES", "METADATA", "Span", "chunks", "header", "parse"]

MAX_HEADER_BYTES = 100_000_000
"""The library reads no more."""
METADATA: Mapping[str, str] = {"format": "pt"}
"""transformers refuses files without it."""

_MAX_ITEMS = 1 << 58  # so that no reader's count of bits overflows 64 bits
_Number = Annotated[int, msgspec.Meta(ge=0)]


class Span(msgspec.Struct, frozen=True):
    """Where a tensor lies in a file: bytes `begin` to `end`, counted from the file's first."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def header(sources: Sequence[Source]) -> bytes:
    """What stands before the data of a file with these tensors."""
    described: dict[str, object] = {"__metadata__": METADATA}
    position = 0
    for source in _ordered(sources):
        if source.name in described:
            raise Mistake(f"there are two tensors {source.name}", key=source.name)
        if source.data.nbytes != size(source.dtype, source.shape):
            raise Mistake(
                f"tensor {source.name} has {source.data.nbytes} bytes, which is not "
                f"{source.dtype} of shape {source.shape}",
                key=source.name,
            )
        end = position + source.data.nbytes
        described[source.name] = {
            "dtype": source.dtype,
            "shape": source.shape,
            "data_offsets": (position, end),
        }
        position = end
    text = msgspec.json.encode(described)
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise TooLarge(
            f"the header of a file with {len(sources)} tensors has {len(text)} bytes; the limit "
            f"is {MAX_HEADER_BYTES}: use smaller shards"
        )
    return len(text).to_bytes(8, "little") + text


def chunks(sources: Sequence[Source]) -> Iterator[bytes | memoryview]:
    """The whole file, piece by piece; the tensors are not copied."""
    yield header(sources)
    for source in _ordered(sources):
        if source.data.nbytes:
            yield source.data


def _ordered(sources: Sequence[Source]) -> list[Source]:
    """Large items first: then every tensor begins at a multiple of its item size."""
    return sorted(sources, key=lambda source: (-DTYPES[source.dtype], source.name))


def parse(view: memoryview, file: str) -> dict[str, Span]:
    """Where each tensor lies, in the order of the file. Raises `Corrupt`, which names both."""
    try:
        return _parse(view)
    except _Bad as bad:
        raise Corrupt(f"{file} is damaged: {bad}", key=file) from None


class _Bad(Exception):
    """What is wrong with a file, in words."""


def _parse(view: memoryview) -> dict[str, Span]:
    start, described = _read_header(view)
    metadata = described.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) and _is_text(key + value) for key, value in metadata.items()
    ):
        raise _Bad("its metadata is not a mapping from text to text")
    spans = [(name, _span(name, item, start)) for name, item in described.items()]
    spans.sort(key=lambda pair: (pair[1].begin, pair[1].end))
    position = start
    for name, span in spans:
        if span.begin != position:
            what = (
                "leaves a hole before"
                if span.begin > position
                else "overlaps with the tensor before"
            )
            raise _Bad(f"tensor {name} begins at byte {span.begin} and {what} it")
        if span.end > view.nbytes:
            raise _Bad(f"tensor {name} ends at byte {span.end} of {view.nbytes}")
        position = span.end
    if position != view.nbytes:
        raise _Bad(f"it has {view.nbytes - position} bytes behind the last tensor")
    return dict(spans)


def _read_header(view: memoryview) -> tuple[int, dict[str, Any]]:
    """Where the data begins, and the JSON before it."""
    if view.nbytes < 8:
        raise _Bad(f"it has only {view.nbytes} bytes")
    length = int.from_bytes(view[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise _Bad(f"its header would have {length} bytes; the limit is {MAX_HEADER_BYTES}")
    if 8 + length > view.nbytes:
        raise _Bad(f"its header would have {length} bytes, the whole file has {view.nbytes}")
    try:
        text = str(view[8 : 8 + length], "utf-8")
        described = _decoder.decode(text)
    except (ValueError, RecursionError) as error:
        raise _Bad(f"its header is not JSON: {error}") from None
    if not isinstance(described, dict) or not text.startswith("{"):
        raise _Bad("its header is not a JSON object")
    return 8 + length, described


class _Item(msgspec.Struct, forbid_unknown_fields=True):
    """What the header says of a tensor. Exact types: true and false are no numbers here."""

    dtype: str
    shape: tuple[_Number, ...]
    data_offsets: tuple[_Number, _Number]


def _span(name: str, item: object, start: int) -> Span:
    problem = name_problem(name)
    if problem is not None:
        raise _Bad(f"the tensor name {name[:80]!r} {problem}")
    try:
        found = msgspec.convert(item, _Item)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # half a character
        text = "is not described by dtype, shape and data_offsets"
        raise _Bad(f"tensor {name} {text}: {error}") from None
    dtype, shape, (begin, end) = found.dtype, found.shape, found.data_offsets
    if dtype not in DTYPES:
        raise _Bad(f"tensor {name} has the unknown dtype {dtype[:80]!r}")
    # Each is of at most 20 digits, so the product of a few is soon known.
    if len(shape) > MAX_DIMS or math.prod(max(length, 1) for length in shape) > _MAX_ITEMS:
        raise _Bad(f"tensor {name} has an impossible shape")
    if end - begin != size(dtype, shape):
        raise _Bad(f"tensor {name} has {end - begin} bytes, which is not {dtype} of shape {shape}")
    return Span(dtype, shape, start + begin, start + end)


def _is_text(text: str) -> bool:
    """JSON can spell half a character, which nothing else can."""
    return text.isascii() or not any("\ud800" <= one <= "\udfff" for one in text)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        [(name, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name[:80]!r} stands there twice")
    return found


def _whole(text: str) -> int:
    # "-0" is a whole number to Python but not to others.
    if text.startswith("-") or len(text) > 20:
        raise ValueError(f"{text[:80]} is not a length or an offset")
    return int(text)


def _not_whole(text: str) -> int:
    raise ValueError(f"{text[:80]} is not a whole number")


_decoder = json.JSONDecoder(
    object_pairs_hook=_no_duplicates,
    parse_int=_whole,
    parse_float=_not_whole,
    parse_constant=_not_whole,
)
