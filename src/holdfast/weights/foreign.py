"""Versions of a trainer that is not ours: safetensors files and STABLE, no manifest.

Nobody wrote down what their bytes must be, so only their structure can be checked: every
file is a whole safetensors file, no tensor is there twice, an index names exactly the tensors
that are there, and of `…-00002-of-00004…` all four are there. Bytes that were changed pass.

Such a trainer may also delete by its own rules, whatever anybody has pinned. The folder is
listed before and after its files are opened, so a version that was being deleted meanwhile
is told as `Gone`; what was opened stays readable.

It may write a step again that has its STABLE. What was opened is compared by inode, size and
time with both listings, and the version is looked up once more after its files were parsed:
files of two writings are told as `Conflict`, and pinned again. A trainer that replaces files
cannot change what was opened; one that writes over a file in place changes it under its
readers (`changed` tells), and one that cuts it short kills them.
"""

import functools
import re
from collections.abc import Mapping

import msgspec

from holdfast.errors import Conflict, Corrupt, Gone
from holdfast.weights import stfile
from holdfast.weights.disk import Disk, Folder, Item, OpenFile
from holdfast.weights.layout import version_folder
from holdfast.weights.manifest import STABLE, FileEntry, Manifest, TensorEntry, is_plain
from holdfast.weights.shards import ADAPTER
from holdfast.weights.trouble import NOT_A_FILE
from holdfast.weights.writing import close_files, open_files

__all__ = ["changed", "describe", "open_version", "rewritten"]

MAX_FILES = 10_000
MAX_INDEX_BYTES = 64 << 20

_SHARD = ".safetensors"
_INDEX = ".safetensors.index.json"
_NUMBERED = re.compile(r"(.*)-([0-9]{1,6})-of-([0-9]{1,6})\.safetensors")


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


async def open_version(folder: Folder, number: int) -> dict[str, OpenFile]:
    """Open all files of a version. Raises `Gone` when somebody is deleting it."""
    items = await _items(folder, number)
    try:
        files = await open_files(folder, [item.name for item in items])
    except FileNotFoundError:
        raise _gone(number) from None
    except OSError as error:
        if error.errno not in NOT_A_FILE:
            raise
        raise Corrupt(f"{error.filename} of version {number} is not an ordinary file") from error
    try:
        opened = [(item.inode, item.bytes) for item in items]
        if opened != [(file.inode, file.bytes) for file in files.values()]:
            raise rewritten(number)
        if await _items(folder, number) != items:
            raise rewritten(number)
    except BaseException:
        close_files(files)
        raise
    return files


async def _items(folder: Folder, number: int) -> list[Item]:
    items = await folder.items()
    if not any(item.name == STABLE for item in items):
        raise _gone(number)
    found = [item for item in items if not item.is_folder and is_plain(item.name)]
    if len(found) > MAX_FILES:
        raise Corrupt(f"version {number} has {len(found)} files; the limit is {MAX_FILES}")
    return found


def changed(files: Mapping[str, OpenFile]) -> bool:
    """Whether any of these files was written to since it was opened."""
    return any(file.is_changed() for file in files.values())


def rewritten(number: int) -> Conflict:
    """What a reader is told that may have files of two writings of one version."""
    return Conflict(
        f"version {number} was written again by its trainer while it was loaded: load it again",
        version=number,
    )


def _gone(number: int) -> Gone:
    return Gone(f"version {number} was deleted while it was opened", version=number)


async def describe(disk: Disk, number: int, files: Mapping[str, OpenFile]) -> Manifest:
    """What a manifest of these files would say, without any hash. Raises `Corrupt`."""
    where = version_folder(number)
    names = [name for name in files if name.endswith(_SHARD)]
    if not names:
        raise Corrupt(f"{where} holds no safetensors file", version=number)
    parsed = await disk.gather(
        [functools.partial(stfile.parse, files[name].view(), f"{where}/{name}") for name in names]
    )
    tensors: dict[str, TensorEntry] = {}
    for file, spans in zip(names, parsed, strict=True):
        for name, span in spans.items():
            if name in tensors:
                raise _corrupt(number, f"{file} and {tensors[name].file} both hold {name}")
            tensors[name] = TensorEntry(name, span.dtype, span.shape, file, "")
    for name in files:
        if name.endswith(_INDEX):
            problem = await disk.work(_index_problem, files[name].view(), name, tensors)
            if problem:
                raise _corrupt(number, f"{name}: {problem}")
    if missing := _missing(names):
        raise _corrupt(number, f"{missing} is missing")
    return Manifest(
        step=number,
        parent=None,
        epoch=0,
        kind="adapter" if any(name.startswith(ADAPTER) for name in names) else "model",
        files=tuple(FileEntry(name, file.bytes, "") for name, file in files.items()),
        tensors=tuple(tensors.values()),
        content="",
    )


def _corrupt(number: int, what: str) -> Corrupt:
    return Corrupt(f"{version_folder(number)} is not whole: {what}", version=number)


def _index_problem(view: memoryview, name: str, tensors: Mapping[str, TensorEntry]) -> str:
    """How an index differs from the files that it is the index of; empty when it does not."""
    if view.nbytes > MAX_INDEX_BYTES:
        return f"it has {view.nbytes} bytes; the limit is {MAX_INDEX_BYTES}"
    try:
        index = msgspec.json.decode(view, type=_Index).weight_map
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return f"it is not an index ({error})"
    for tensor, file in index.items():
        if tensor not in tensors or tensors[tensor].file != file:
            return f"tensor {tensor} is not in {file}"
    stem = name.removesuffix(_INDEX)
    for tensor, entry in tensors.items():
        if entry.file.startswith(f"{stem}-") and tensor not in index:
            return f"tensor {tensor} of {entry.file} is not in it"
    return ""


def _missing(names: list[str]) -> str:
    """The first file that is missing by what the names of the others say."""
    for name in names:
        match = _NUMBERED.fullmatch(name)
        if match is not None:
            stem, at, total = match.groups()
            for one in range(1, min(int(total), MAX_FILES) + 1):
                other = f"{stem}-{one:0{len(at)}d}-of-{total}.safetensors"
                if other not in names:
                    return other
    return ""
