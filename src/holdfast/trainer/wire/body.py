"""What is done to every body before it means anything: limits, decompression, JSON.

- Nothing is decompressed beyond its limit, whatever its header says: a bomb costs at most
  `Limits.plain_bytes` and one step.
- All requests together hold at most `Limits.all_bytes` of bodies (`Budget`). An error never
  refers to itself through its traceback: what it was raised for is freed with it.
- What cannot be read is a `Mistake` that names the field. Where a request can be told by its
  model and number all the same, it is a `BadOp`, so that the number can be used up: its
  sender will never send it again, and those behind it must not wait.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, TypeVar

import msgspec
import zstandard

from holdfast.errors import Mistake, TooLarge, Unavailable
from holdfast.trainer.ops import Op

__all__ = [
    "DEFAULT_LIMITS",
    "JSON",
    "PROTOBUF",
    "BadOp",
    "Budget",
    "Id",
    "Index",
    "Limits",
    "Numbered",
    "Path",
    "Share",
    "blaming",
    "decode",
    "is_protobuf",
    "number",
    "numbered",
    "read_body",
]

PROTOBUF = "application/x-protobuf"
JSON = "application/json"
MAX_SEQ = 2**31 - 1

# Four compressed bytes make at most one block of 128 KiB: a step makes 32 MiB at most.
_STEP_BYTES = 1024
_WINDOW_BYTES = 32 << 20

Id = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Seq = Annotated[int, msgspec.Meta(ge=1, le=MAX_SEQ)]
Index = Annotated[int, msgspec.Meta(ge=0, le=MAX_SEQ)]
Path = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
Kind = TypeVar("Kind")


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How much one request may hold. The SDK sends about 5 MB and 1024 datums at a time."""

    body_bytes: int = 64 << 20
    plain_bytes: int = 256 << 20
    all_bytes: int = 512 << 20
    """Of the bodies of all requests that are in work, as they came and decompressed."""
    datums: int = 4096
    tokens: int = 4 << 20
    elements: int = 32 << 20
    """Of all tensors of a request together; sparse ones count as if they were dense."""
    samples: int = 1024
    stops: int = 256
    topk: int = 1024


DEFAULT_LIMITS = Limits()


class Budget:
    """What the bodies of all requests may hold in memory together. Beyond: `Unavailable`."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0

    @contextmanager
    def share(self) -> "Iterator[Share]":
        """One request's part of it, given back at the end."""
        share = Share(self)
        try:
            yield share
        finally:
            self.held_bytes -= share.bytes


class Share:
    """What one request holds."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.bytes = 0

    def take(self, count: int) -> None:
        """Hold so many bytes more, or raise `Unavailable`: then the request must end."""
        budget = self._budget
        if budget.held_bytes + count > budget.limit_bytes:
            raise Unavailable(
                f"the requests in work hold {budget.held_bytes} bytes of the "
                f"{budget.limit_bytes} that all bodies together may have: send this one again",
                retry_after_s=1.0,
            )
        budget.held_bytes += count
        self.bytes += count


class BadOp(Mistake):
    """A request that cannot be done, but whose `model` and `seq` could be read."""

    def __init__(self, message: str, *, model: str, seq: int) -> None:
        super().__init__(message)
        self.model = model
        self.seq = seq


class Numbered(msgspec.Struct, frozen=True):
    """An operation and its place: number `seq` of `model`."""

    model: str
    seq: int
    op: Op


class _Number(msgspec.Struct):
    model_id: Id
    seq_id: Seq


def is_protobuf(content_type: str) -> bool:
    """Whether a body of this type is protobuf; anything but that and JSON is refused."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind not in (PROTOBUF, JSON, ""):
        raise Mistake(f"the content type {kind[:80]!r} is not known: send {JSON} or {PROTOBUF}")
    return kind == PROTOBUF


def read_body(
    raw: bytes, content_type: str, content_encoding: str, limits: Limits = DEFAULT_LIMITS
) -> bytes:
    """The body as it was before it was compressed (zstd, or not at all)."""
    is_protobuf(content_type)
    if len(raw) > limits.body_bytes:
        raise TooLarge(f"the body has {len(raw)} bytes; {limits.body_bytes} are allowed")
    coding = content_encoding.strip().lower()
    if coding in ("", "identity"):
        return raw
    if coding != "zstd":
        raise Mistake(f"the content encoding {coding[:80]!r} is not known: send zstd, or none")
    return _decompress(raw, limits.plain_bytes)


def _decompress(raw: bytes, limit: int) -> bytes:
    """One whole frame and nothing behind it, in steps that cannot explode."""
    stream = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES).decompressobj()
    parts, total = [], 0
    try:
        for at in range(0, len(raw), _STEP_BYTES):
            if stream.eof:
                raise Mistake("there is something behind the compressed body")
            part = stream.decompress(raw[at : at + _STEP_BYTES])
            total += len(part)
            if total > limit:
                raise TooLarge(f"the body has more than {limit} bytes when decompressed")
            parts.append(part)
    except (zstandard.ZstdError, MemoryError) as error:
        raise Mistake(f"the body cannot be decompressed: {error}") from error
    if not stream.eof:
        raise Mistake("the compressed body is cut short")
    if stream.unused_data:
        raise Mistake("there is something behind the compressed body")
    return b"".join(parts)


@contextmanager
def blaming(model: str, seq: int) -> Iterator[None]:
    """Whatever is wrong inside is wrong with this operation."""
    try:
        yield
    except Mistake as error:
        raise BadOp(f"{error}", model=model, seq=seq) from error


def decode(body: bytes, kind: type[Kind]) -> Kind:
    """A JSON body; fields that are not known are ignored, for newer clients send some."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Mistake(f"the request cannot be read: {error}") from error


def numbered(body: bytes, kind: type[Kind]) -> tuple[str, int, Kind]:
    """Model, number and content of an operation in JSON."""
    try:
        told = decode(body, _Number)
    except Mistake as error:
        found = _salvage(body)
        if found is None:
            raise
        raise BadOp(f"{error}", model=found[0], seq=found[1]) from error
    with blaming(told.model_id, told.seq_id):
        return told.model_id, told.seq_id, decode(body, kind)


def number(given: object) -> tuple[str, int]:
    """The `model_id` and `seq_id` of something that has been read already."""
    try:
        told = msgspec.convert(given, _Number)
    except msgspec.ValidationError as error:
        raise Mistake(f"the request cannot be read: {error}") from error
    return told.model_id, told.seq_id


def _salvage(body: bytes) -> tuple[str, int] | None:
    """The number of a body that is JSON but for a NaN in it, which some clients write."""
    try:
        return number(json.loads(body))
    except (Mistake, ValueError, RecursionError):
        return None
