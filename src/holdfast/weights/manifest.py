"""The manifest of a version: its files, its tensors, and what they must look like.

A version is what its manifest says, and nothing else: a file that is not listed is not
part of it. Invariants of every manifest that `decode` gives back:

- Each file's name is a plain name. Names from outside never become paths.
- Names are unique, and every tensor lies in a file that is listed.
- `content` is the hash of the tensors and of the carried files (those that are neither
  shards nor an index). It does not depend on how tensors are divided into files, nor on
  step, parent or epoch: equal content means equal weights.

Hashes are xxh3-128: they find damage and mistakes, not malice. This module is pure: no
file access.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

import msgspec
import xxhash

from holdfast.errors import Corrupt, Mistake, TooLarge, TooNew
from holdfast.tensors import DTYPES, MAX_DIMS, name_problem
from holdfast.text import several
from holdfast.weights import stfile
from holdfast.weights.layout import version_folder

__all__ = [
    "MANIFEST",
    "MARKER",
    "MAX_MANIFEST_BYTES",
    "SCHEMA",
    "STABLE",
    "FileEntry",
    "Manifest",
    "TensorEntry",
    "carried",
    "check_file",
    "content_hash",
    "decode",
    "digest",
    "encode",
    "is_plain",
    "same_shard",
]

MANIFEST = "holdfast.json"
STABLE = "STABLE"
MARKER = ".marker"
"""What becomes STABLE. Whoever empties a folder takes it away first, so that the folder's
writer, if it wakes up late, cannot mark what is being emptied."""
MAX_MANIFEST_BYTES = 64 << 20
SCHEMA = 1

_INDEX = ".safetensors.index.json"
_HASH = re.compile("[0-9a-f]{32}")
_NAMED_MAX = 3  # how many tensors an error message names

Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class FileEntry(msgspec.Struct, frozen=True):
    """A file of a version."""

    name: str
    bytes: Number
    hash: str


class TensorEntry(msgspec.Struct, frozen=True):
    """A tensor of a version. `hash` is that of its bytes."""

    name: str
    dtype: str
    shape: tuple[Number, ...]
    file: str
    hash: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a version consists of. The manifest itself and STABLE are not among the files."""

    schema: Number = SCHEMA
    step: Number
    parent: Number | None
    epoch: Number
    kind: Literal["model", "adapter"]
    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...]
    content: str


def digest(buffer: bytes | bytearray | memoryview) -> str:
    """The hash of these bytes. xxhash lets other threads run while it works on a large buffer."""
    return xxhash.xxh3_128_hexdigest(buffer)


def content_hash(tensors: Iterable[TensorEntry], carried: Iterable[FileEntry]) -> str:
    """The hash of what a version means, however it is divided into files."""
    return digest(
        msgspec.json.encode(
            (
                sorted((one.name, one.dtype, one.shape, one.hash) for one in tensors),
                sorted((one.name, one.hash) for one in carried),
            )
        )
    )


def carried(files: Iterable[FileEntry], tensors: Iterable[TensorEntry]) -> list[FileEntry]:
    """Those files that are neither shards nor an index of shards."""
    shards = {one.file for one in tensors}
    return [one for one in files if one.name not in shards and not one.name.endswith(_INDEX)]


def is_plain(name: str) -> bool:
    """Whether a file of a version may have this name: never a path, nothing hidden or ours."""
    return (
        name.isprintable()
        and len(name.encode()) in range(1, 256)
        and not name.startswith(".")
        and not any(separator in name for separator in "/\\")
        and name not in (MANIFEST, STABLE)
    )


def encode(manifest: Manifest) -> bytes:
    """The manifest as canonical JSON with one line per file and tensor, in order of names.

    Raises `Mistake` on what `decode` would refuse.
    """
    problem = _problem(manifest)
    if problem is not None:
        raise Mistake(f"this cannot be published: {problem}", version=manifest.step)
    fields: list[bytes] = []
    for field in msgspec.structs.fields(Manifest):
        value = getattr(manifest, field.name)
        if field.name in ("files", "tensors"):
            lines = [_json(one) for one in sorted(value, key=lambda one: one.name)]
            text = b"[\n" + b",\n".join(lines) + b"\n]"
        else:
            text = _json(value)
        fields.append(_json(field.name) + b": " + text)
    raw = b"{\n" + b",\n".join(fields) + b"\n}\n"
    if len(raw) > MAX_MANIFEST_BYTES:
        raise TooLarge(
            f"the manifest of {len(manifest.tensors)} tensors has {len(raw)} bytes; "
            f"the limit is {MAX_MANIFEST_BYTES}",
            version=manifest.step,
        )
    return raw


def decode(raw: bytes, where: str) -> Manifest:
    """Read a manifest. Raises `Corrupt`, or `TooNew` if a newer Holdfast wrote it."""
    if len(raw) > MAX_MANIFEST_BYTES:
        raise Corrupt(f"{where} has {len(raw)} bytes: that is not a manifest", key=where)
    try:
        schema = msgspec.json.decode(raw, type=_Schema).schema
        if schema > SCHEMA:
            raise TooNew(
                f"{where} has schema {schema}, this Holdfast knows {SCHEMA}: use a newer one",
                key=where,
            )
        manifest = msgspec.json.decode(raw, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(f"{where} is not a manifest: {error}", key=where) from error
    problem = _problem(manifest)
    if problem is not None:
        raise Corrupt(f"{where} is damaged: {problem}", key=where, version=manifest.step)
    return manifest


class _Schema(msgspec.Struct, frozen=True):
    schema: Annotated[int, msgspec.Meta(ge=1)]


_json = msgspec.json.encode


def _problem(manifest: Manifest) -> str | None:
    """What is wrong with a manifest whose fields have the right types."""
    files: set[str] = set()
    for file in manifest.files:
        if not is_plain(file.name):
            return f"{file.name[:80]!r} is not a plain file name"
        if file.name in files:
            return f"the file {file.name} is listed twice"
        if not _HASH.fullmatch(file.hash):
            return f"the file {file.name} has no valid hash"
        files.add(file.name)
    tensors: set[str] = set()
    for tensor in manifest.tensors:
        problem = name_problem(tensor.name)
        if problem is not None:
            return f"the tensor name {tensor.name[:80]!r} {problem}"
        if tensor.name in tensors:
            return f"tensor {tensor.name} is listed twice"
        if tensor.file not in files:
            return f"tensor {tensor.name} is in {tensor.file[:80]!r}, which is not listed"
        if tensor.dtype not in DTYPES or len(tensor.shape) > MAX_DIMS:
            return f"tensor {tensor.name} has an unknown dtype or too many dimensions"
        if not _HASH.fullmatch(tensor.hash):
            return f"tensor {tensor.name} has no valid hash"
        tensors.add(tensor.name)
    if manifest.content != content_hash(
        manifest.tensors, carried(manifest.files, manifest.tensors)
    ):
        return "its content hash does not fit its tensors and files"
    return None


def check_file(
    manifest: Manifest, entry: FileEntry, view: memoryview, *, each_tensor: bool = False
) -> None:
    """Raise `Corrupt` unless these bytes are the file that was published.

    A shard must also hold exactly the tensors that the manifest has for it. Whoever has
    just written the file asks for `each_tensor`: that compares their hashes too, and so
    finds a tensor that was changed between hashing and writing.
    """
    where = f"{version_folder(manifest.step)}/{entry.name}"
    tensors = {one.name: one for one in manifest.tensors if one.file == entry.name}
    found: list[str] = []
    if view.nbytes != entry.bytes:
        size = f"it has {view.nbytes} bytes instead of {entry.bytes}"
        found = [size, *(_damage(tensors, view) if tensors else ())]
    elif digest(view) != entry.hash:
        found = _damage(tensors, view)
    elif tensors:
        found = _differences(tensors, stfile.parse(view, where), view if each_tensor else None)
    if found:
        raise Corrupt(
            f"{where} is not what was published: {several(found, _NAMED_MAX)}",
            key=entry.name,
            version=manifest.step,
        )


def _damage(tensors: Mapping[str, TensorEntry], view: memoryview) -> list[str]:
    """What differs in a file whose hash is wrong; never empty."""
    if not tensors:
        return ["its hash differs"]
    try:
        spans = stfile.parse(view, "the file")
    except Corrupt as error:
        names = f"tensors {', '.join(sorted(tensors)[:_NAMED_MAX])} cannot be read from it"
        return [str(error), names]
    return _differences(tensors, spans, view) or ["its header differs, its tensors do not"]


def _differences(
    tensors: Mapping[str, TensorEntry], spans: Mapping[str, stfile.Span], view: memoryview | None
) -> list[str]:
    """How a shard differs from its manifest; with a view, the tensors' bytes too."""
    found = [f"tensor {name} is missing" for name in sorted(tensors.keys() - spans.keys())]
    found += [f"tensor {name} is extra" for name in sorted(spans.keys() - tensors.keys())]
    for name in sorted(tensors.keys() & spans.keys()):
        entry, span = tensors[name], spans[name]
        if (entry.dtype, entry.shape) != (span.dtype, span.shape):
            found.append(
                f"tensor {name} is {span.dtype} of shape {span.shape} instead of "
                f"{entry.dtype} of shape {entry.shape}"
            )
        elif view is not None and digest(view[span.begin : span.end]) != entry.hash:
            found.append(f"tensor {name} differs")
    return found


def same_shard(parent: Manifest, file: str, tensors: Iterable[TensorEntry]) -> FileEntry | None:
    """The parent's file of this name if it holds exactly these tensors, or None.

    Such a file can be linked instead of written.
    """
    wanted = set(tensors)
    if not wanted or wanted != {one for one in parent.tensors if one.file == file}:
        return None
    return next((one for one in parent.files if one.name == file), None)
