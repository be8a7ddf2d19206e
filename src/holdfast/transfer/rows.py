"""Many small tensors of one kind at once: the rows of a tensor, each under a key of its own.

A hundred thousand rows are a hundred thousand frames like any other; only making and proving
them is done for all at once, as columns of one matrix with a frame per row. What is left per
row are two checksums. Pure.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from holdfast.errors import TooLarge
from holdfast.transfer.backend import Bytes, Frame
from holdfast.transfer.frame import (
    BORN_AT,
    FIXED_BYTES,
    HEAD_SIZE_AT,
    KEY_SIZE_AT,
    MAX_HEAD,
    SUM_AT,
    Head,
    Kind,
    Ref,
    aligned,
    check_key,
    make_head,
    open_head,
)

__all__ = ["RowFrames", "make_rows", "open_rows"]


class RowFrames(Mapping[str, Frame]):
    """Frames of equal length as the rows of one matrix. Each is also a frame by itself."""

    def __init__(
        self, keys: list[str], block: Bytes, head: int, size: int, generation: int
    ) -> None:
        self.names = keys
        self.block = block
        """One frame in each row, padded to a multiple of 64 bytes."""
        self.size = size
        """Bytes of a frame without that padding."""
        self.generation = generation
        self._head = head
        self._at = {key: at for at, key in enumerate(keys)}

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __getitem__(self, key: str) -> Frame:
        row = self.block[self._at[key]]
        return Frame(
            row[: self._head].tobytes(),
            (memoryview(row[self._head : self.size]),),
            Ref(key, self.generation, _sum(row), self.size),
        )

    def refs(self) -> dict[str, Ref]:
        """The references to all of them."""
        sums = self.block[:, SUM_AT : SUM_AT + 8].copy().view(np.uint64).ravel().tolist()
        generation, size = self.generation, self.size
        return {
            key: Ref(key, generation, proof, size)
            for key, proof in zip(self.names, sums, strict=True)
        }


def _sum(row: Bytes) -> int:
    return int.from_bytes(row[SUM_AT : SUM_AT + 8].tobytes(), "little")


def _sums(heads: Bytes, payloads: Bytes) -> list[int]:
    """The checksum of each row: of its payload, beginning with that of its head."""
    length, size = heads.shape[1], payloads.shape[1]
    front, back = heads.reshape(-1).data, payloads.reshape(-1).data
    digest = xxh3_64_intdigest
    seeds = [digest(front[at : at + length]) for at in range(0, heads.size, length)]
    if not size:
        return [digest(b"", seed) for seed in seeds]
    begins = range(0, payloads.size, size)
    return [digest(back[at : at + size], seed) for at, seed in zip(begins, seeds, strict=True)]


def _without_sum(block: Bytes, head: int) -> Bytes:
    """The heads without their checksums, one behind the other."""
    return np.concatenate((block[:, :SUM_AT], block[:, SUM_AT + 8 : head]), axis=1)


def _names(keys: Sequence[str]) -> tuple[Bytes, npt.NDArray[np.int64]]:
    """The keys as bytes, padded with zeros, and how long they are."""
    raw = [key.encode() for key in keys]
    sizes = np.fromiter(map(len, raw), np.int64, len(raw))
    names = np.array(raw, dtype=f"S{sizes.max()}")
    return names.view(np.uint8).reshape(len(raw), -1), sizes


def make_rows(
    keys: Sequence[str],
    payloads: Bytes,
    generation: int,
    kind: Kind,
    dtype: str,
    shape: tuple[int, ...],
) -> RowFrames:
    """Frames for the rows of a matrix of bytes; `dtype` and `shape` are those of one row."""
    names, sizes = _names([check_key(key) for key in keys])
    first, _ = make_head(kind, "x", generation, (payloads[0].tobytes(),), dtype=dtype, shape=shape)
    begin = FIXED_BYTES + 8 * len(shape)
    head = aligned(begin + int(sizes.max()))
    if head > MAX_HEAD:
        raise TooLarge(f"a head of {head} bytes is too long: use shorter keys")
    size = head + payloads.shape[1]
    block = np.zeros((len(keys), aligned(size)), np.uint8)
    block[:, :begin] = np.frombuffer(first[:begin], np.uint8)
    block[:, SUM_AT : SUM_AT + 8] = 0
    block[:, HEAD_SIZE_AT : HEAD_SIZE_AT + 2] = _column([head], np.uint16)
    block[:, KEY_SIZE_AT : KEY_SIZE_AT + 2] = _column(sizes, np.uint16)
    block[:, begin : begin + names.shape[1]] = names
    block[:, head:size] = payloads
    sums = _sums(_without_sum(block, head), payloads)
    block[:, SUM_AT : SUM_AT + 8] = _column(sums, np.uint64)
    return RowFrames(list(keys), block, head, size, generation)


def _column(values: Any, kind: type[np.generic]) -> Bytes:
    found = np.array(values, kind)
    return found.view(np.uint8).reshape(len(found), -1)


def open_rows(
    block: Bytes, keys: Sequence[str], wanted: Sequence[Ref | str]
) -> tuple[Bytes, npt.NDArray[np.bool_], Head]:
    """The payloads of frames, which of them are proven, and a head that speaks for those.

    Each row is one whole frame. Proven are those that are the frames of these keys (and of
    these references) and of the same kind, dtype and shape as the first; the others may be
    anything. Raises `Corrupt` when the first row is no frame.
    """
    first = open_head(block[0].data, wanted[0])
    head, ndim = first.nbytes, len(first.shape)
    payloads = np.ascontiguousarray(block[:, head:])
    names, sizes = _names(keys)
    begin = FIXED_BYTES + 8 * ndim
    if begin + names.shape[1] > head:
        return payloads, np.zeros(len(block), np.bool_), first
    heads = block[:, :head]
    right: npt.NDArray[np.bool_] = (heads[:, :KEY_SIZE_AT] == heads[0, :KEY_SIZE_AT]).all(axis=1)
    right &= (heads[:, FIXED_BYTES:begin] == heads[0, FIXED_BYTES:begin]).all(axis=1)
    right &= (heads[:, begin : begin + names.shape[1]] == names).all(axis=1)
    right &= _number(heads, KEY_SIZE_AT, np.uint16) == sizes
    found = _number(heads, SUM_AT, np.uint64)
    right &= found == np.array(_sums(_without_sum(block, head), payloads), np.uint64)
    refs = [one if isinstance(one, Ref) else None for one in wanted]
    if any(refs):
        meant = np.array([one is not None for one in refs])
        proofs = np.array([one.checksum if one else 0 for one in refs], np.uint64)
        born = np.array([one.generation if one else 0 for one in refs], np.uint64)
        right &= ~meant | ((proofs == found) & (born == _number(heads, BORN_AT, np.uint64)))
    return payloads, right, first


def _number(heads: Bytes, at: int, kind: type[np.generic]) -> npt.NDArray[Any]:
    width = np.dtype(kind).itemsize
    return heads[:, at : at + width].copy().view(kind).ravel()
