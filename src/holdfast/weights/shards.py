"""Which tensor goes into which file: a stable map, so that unchanged files stay unchanged.

A version that differs from its parent in a few tensors should write only a few files; the
others become hard links. What is trained together has names that differ in numbers only
(the LoRA matrices of all layers, all `q_proj`), so the *class* of a tensor is its name
with every run of digits replaced by '#', and classes share a file only if they are small.

The map is a function of names, dtypes and shapes: never of values, nor of the order of a
mapping. This module is pure: no file access.
"""

import re
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from holdfast.errors import Mistake
from holdfast.tensors import Source, size

__all__ = ["ADAPTER", "MODEL", "Shard", "index", "index_file", "plan"]

MODEL = "model"
"""How the files of a model begin, for transformers and vLLM."""
ADAPTER = "adapter_model"
"""How the file of an adapter begins, for PEFT and vLLM."""

_DIGITS = re.compile("([0-9]+)")


class Shard(msgspec.Struct, frozen=True):
    """One file and the tensors in it. `bytes` counts the tensors, not the header."""

    file: str
    names: tuple[str, ...]
    bytes: int


def plan(
    sources: Sequence[Source],
    *,
    max_shard_bytes: int = 1 << 30,
    small_bytes: int = 64 << 20,
    stem: str = MODEL,
    rank: int | None = None,
) -> list[Shard]:
    """Divide the tensors into files.

    All in one file if that is not larger than `small_bytes`, and always for an adapter,
    because its readers know one file only. Otherwise classes below a sixteenth of
    `small_bytes` are packed together up to `small_bytes`, and every other class has files
    of its own, split at `max_shard_bytes`. With a `rank` the names need no total, so each
    rank plans alone.
    """
    if max_shard_bytes <= 0 or small_bytes <= 0:
        raise Mistake("max_shard_bytes and small_bytes must be positive")
    ordered = sorted(sources, key=lambda one: _natural(one.name))
    alone = rank is None and stem == ADAPTER
    if alone or _bytes(ordered) <= small_bytes:
        groups = [ordered] if ordered else []
    else:
        groups = list(_groups(ordered, max_shard_bytes, small_bytes))
    return [
        Shard(
            _file(stem, rank, number, len(groups)),
            tuple(one.name for one in group),
            _bytes(group),
        )
        for number, group in enumerate(groups, 1)
    ]


def _bytes(group: Iterable[Source]) -> int:
    return sum(size(one.dtype, one.shape) for one in group)


def _groups(
    ordered: Sequence[Source], max_shard_bytes: int, small_bytes: int
) -> Iterator[list[Source]]:
    """The contents of the files: large classes first, in natural order, then the packed ones."""
    classes: dict[str, list[Source]] = {}
    for one in ordered:
        classes.setdefault(_DIGITS.sub("#", one.name), []).append(one)
    small: dict[str, list[Source]] = {}
    for name, members in classes.items():
        if 16 * _bytes(members) < small_bytes:
            small[name] = members
        else:
            yield from _split([[one] for one in members], max_shard_bytes)
    # By the end of the name first (weight, lora_A, q_proj, …): the parts that are trained
    # together are alike in their last words, whatever they belong to.
    names = sorted(small, key=lambda name: name.split(".")[::-1])
    yield from _split([small[name] for name in names], small_bytes)


def _split(pieces: Sequence[list[Source]], limit: int) -> Iterator[list[Source]]:
    """Join neighbours up to the limit; a piece that is larger stays alone."""
    joined: list[Source] = []
    total = 0
    for piece in pieces:
        length = _bytes(piece)
        if joined and total + length > limit:
            yield joined
            joined, total = [], 0
        joined.extend(piece)
        total += length
    if joined:
        yield joined


def _natural(name: str) -> tuple[list[str | int], str]:
    """Sorts layer 2 before layer 10. Text and numbers alternate, so they are never compared."""
    parts: list[str | int] = list(_DIGITS.split(name))
    parts[1::2] = [int(part) for part in parts[1::2]]
    return parts, name


def _file(stem: str, rank: int | None, number: int, total: int) -> str:
    """The name of one of so many files, or of one of a rank's files; counted from 1."""
    if rank is not None:
        return f"{stem}-rank{rank:05d}-{number:05d}.safetensors"
    if total == 1:
        return f"{stem}.safetensors"
    return f"{stem}-{number:05d}-of-{total:05d}.safetensors"


def index_file(stem: str = MODEL) -> str:
    """The name under which transformers and vLLM look for the index."""
    return f"{stem}.safetensors.index.json"


def index(places: Iterable[tuple[str, str]], total_bytes: int) -> bytes:
    """The index's content: tensors and their files. A name in two files is a `Mistake`."""
    files: dict[str, str] = {}
    for name, file in places:
        if name in files:
            raise Mistake(f"tensor {name} is in {files[name]} and in {file}", key=name)
        files[name] = file
    content = {
        "metadata": {"total_size": total_bytes},
        "weight_map": dict(sorted(files.items())),
    }
    return msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"
