"""Writing the files of a version into its draft folder.

A *draft* is a temporary folder that one publisher (and its ranks) writes and nobody reads.
Shards that hold exactly what the parent's shard of the same name holds are hard-linked from
it instead of written (copied where links do not work); files are never changed in place, so
sharing them is safe. `check_folder` proves a folder against its manifest, whoever wrote it.
"""

import contextlib
import errno
import functools
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from holdfast import faults
from holdfast.errors import Corrupt, Gone, HoldfastError, Mistake
from holdfast.tensors import Source, sources
from holdfast.weights import stfile
from holdfast.weights.disk import Disk, Folder, OpenFile
from holdfast.weights.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    FileEntry,
    Manifest,
    TensorEntry,
    check_file,
    decode,
    digest,
    same_shard,
)
from holdfast.weights.shards import ADAPTER, MODEL, Shard, plan
from holdfast.weights.trouble import translate

__all__ = [
    "Part",
    "Prepared",
    "Ticket",
    "check_folder",
    "check_tensors",
    "open_files",
    "prepare",
    "read_manifest",
    "read_parts",
    "write_carried",
    "write_part",
    "write_shards",
]

Kind = Literal["model", "adapter"]
STEMS: dict[Kind, str] = {"model": MODEL, "adapter": ADAPTER}
SMALL_BYTES = 64 << 20

SHARD = faults.declare("weights.publish.shard", "one shard written or linked, others missing")


class Ticket(msgspec.Struct, frozen=True):
    """A version that is being written; it may travel to other ranks as JSON."""

    path: str
    step: int
    epoch: int
    kind: Kind
    parent: int | None
    parent_path: str
    shard_bytes: int


class Part(msgspec.Struct, frozen=True):
    """What one rank has written."""

    rank: int
    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...]


class Prepared(msgspec.Struct):
    """Tensors that are hashed and sorted into shards."""

    shards: list[Shard]
    sources: dict[str, Source]
    tensors: dict[str, TensorEntry]
    reuse: dict[str, FileEntry]

    def new_bytes(self) -> int:
        """What has to be written; the rest is shared with the parent."""
        return sum(shard.bytes for shard in self.shards if shard.file not in self.reuse)


def check_tensors(tensors: object) -> None:
    """Refuse what is not a state dict, with what to pass instead."""
    if isinstance(tensors, Mapping):
        return
    hint = "pass its state_dict()" if hasattr(tensors, "state_dict") else "pass a state dict"
    raise Mistake(f"tensors by name are expected, not {type(tensors).__name__}: {hint}")


async def prepare(
    disk: Disk, ticket: Ticket, tensors: Mapping[str, object], rank: int | None = None
) -> Prepared:
    """Hash the tensors, decide which shard they go to and which shards need no writing."""
    given = await disk.work(sources, tensors)
    hashes = await disk.gather([functools.partial(digest, one.data) for one in given])
    shards = plan(
        given,
        max_shard_bytes=ticket.shard_bytes,
        small_bytes=min(SMALL_BYTES, ticket.shard_bytes),
        stem=STEMS[ticket.kind],
        rank=rank,
    )
    file_of = {name: shard.file for shard in shards for name in shard.names}
    entries = {
        one.name: TensorEntry(one.name, one.dtype, one.shape, file_of[one.name], hashed)
        for one, hashed in zip(given, hashes, strict=True)
    }
    parent = await _parent(disk, ticket)
    reuse: dict[str, FileEntry] = {}
    if parent is not None:
        for shard in shards:
            found = same_shard(parent, shard.file, [entries[name] for name in shard.names])
            if found is not None:
                reuse[shard.file] = found
    return Prepared(shards, {one.name: one for one in given}, entries, reuse)


async def _parent(disk: Disk, ticket: Ticket) -> Manifest | None:
    """The parent's manifest, if it is there to share files with."""
    if not ticket.parent_path:
        return None
    try:
        async with await disk.folder(ticket.parent_path) as folder:
            return await read_manifest(folder, ticket.parent_path)
    except (OSError, HoldfastError):
        return None  # everything is written then


async def write_shards(
    disk: Disk, folder: Folder, ticket: Ticket, prepared: Prepared
) -> list[FileEntry]:
    """Write or link every shard; each is synced when this returns."""
    written: list[FileEntry] = []
    for shard in prepared.shards:
        entry = prepared.reuse.get(shard.file)
        if entry is None or not await _share(disk, folder, ticket, entry):
            chunks = stfile.chunks([prepared.sources[name] for name in shard.names])
            result = await folder.write(shard.file, chunks)
            entry = FileEntry(shard.file, result.bytes, result.hash)
        faults.point(SHARD)
        written.append(entry)
    return written


async def _share(disk: Disk, folder: Folder, ticket: Ticket, entry: FileEntry) -> bool:
    """Give the parent's file a second name here; False when it has to be written."""
    try:
        async with await disk.folder(ticket.parent_path) as parent:
            file = await parent.open(entry.name)
    except OSError:
        return False  # gone, or damaged: what we have is good
    try:
        if file.bytes != entry.bytes or await disk.work(digest, file.view()) != entry.hash:
            return False  # damaged since: what we have is good
        if await folder.link(entry.name, file):
            return True
        await folder.write(entry.name, [file.view()])
        return True
    except FileNotFoundError:
        return False
    finally:
        file.close()


async def write_part(disk: Disk, ticket: Ticket, rank: int, tensors: Mapping[str, object]) -> Part:
    """Write one rank's tensors into the draft; called by every rank, with its own tensors."""
    if rank < 0:
        raise Mistake(f"a rank is 0 or more, not {rank}")
    check_tensors(tensors)
    prepared = await prepare(disk, ticket, tensors, rank)
    try:
        async with await disk.folder(ticket.path) as folder:
            if any(item.name == _part_name(rank) for item in await folder.items()):
                raise FileExistsError(errno.EEXIST, "it has written before", _part_name(rank))
            files = await write_shards(disk, folder, ticket, prepared)
            part = Part(rank, tuple(files), tuple(prepared.tensors.values()))
            await folder.put(_part_name(rank), msgspec.json.encode(part))
    except FileNotFoundError as error:
        raise Gone(
            f"the draft of version {ticket.step} is gone: another rank has failed, or a newer "
            "publisher has taken over; begin the version again",
            version=ticket.step,
        ) from error
    except FileExistsError as error:
        raise Mistake(
            f"rank {rank} has written its part of version {ticket.step} before, or another rank "
            "gave the same number: call `write_part` once per rank, each with its own",
            version=ticket.step,
        ) from error
    except OSError as error:
        # Without this part there will be no version: nobody is to wait for the rest.
        with contextlib.suppress(OSError):
            await disk.remove(ticket.path)
        raise translate(error, f"version {ticket.step} was not published") from error
    return part


def _part_name(rank: int) -> str:
    return f"part-{rank:05d}.json"


async def read_parts(folder: Folder, ranks: int) -> Part:
    """What all ranks together have written. Their notes are removed from the draft."""
    there = {item.name for item in await folder.items()}
    missing = [rank for rank in range(ranks) if _part_name(rank) not in there]
    if missing:
        raise Mistake(
            f"ranks {missing} of {ranks} have not written their part: call `finish` only after "
            "`write_part` has returned on every rank"
        )
    files: list[FileEntry] = []
    tensors: list[TensorEntry] = []
    for rank in range(ranks):
        raw = await folder.read(_part_name(rank), MAX_MANIFEST_BYTES)
        part = msgspec.json.decode(raw, type=Part)
        files += part.files
        tensors += part.tensors
        await folder.unlink(_part_name(rank))
    names = [tensor.name for tensor in tensors]
    if twice := sorted(name for name, times in Counter(names).items() if times > 1)[:5]:
        raise Mistake(f"several ranks have written the tensors {', '.join(twice)}")
    return Part(0, tuple(files), tuple(tensors))


async def write_carried(folder: Folder, files: Mapping[str, bytes]) -> list[FileEntry]:
    """Write configuration and tokenizer files beside the shards."""
    written = []
    for name, data in sorted(files.items()):
        result = await folder.write(name, [data])
        written.append(FileEntry(name, result.bytes, result.hash))
    return written


async def read_manifest(folder: Folder, where: str) -> Manifest:
    """The manifest of a version's folder."""
    return decode(await folder.read(MANIFEST, MAX_MANIFEST_BYTES), where)


async def open_files(folder: Folder, names: Iterable[str]) -> dict[str, OpenFile]:
    """Open all of these files, or none."""
    opened: dict[str, OpenFile] = {}
    try:
        for name in names:
            opened[name] = await folder.open(name)
    except BaseException:
        close_files(opened)
        raise
    return opened


def close_files(files: Mapping[str, OpenFile]) -> None:
    """Let go of open files."""
    for file in files.values():
        file.close()


async def check_files(
    disk: Disk,
    manifest: Manifest,
    files: Mapping[str, OpenFile],
    *,
    each_tensor: bool = False,
) -> None:
    """Compare every open file with the manifest. Raises `Corrupt` naming file and tensor."""
    await disk.gather(
        [
            functools.partial(
                check_file, manifest, entry, files[entry.name].view(), each_tensor=each_tensor
            )
            for entry in manifest.files
        ]
    )


async def check_folder(disk: Disk, folder: Folder, manifest: Manifest) -> None:
    """Prove that a folder, just written, holds what its manifest says, tensor by tensor."""
    try:
        files = await open_files(folder, (entry.name for entry in manifest.files))
    except FileNotFoundError as error:
        raise Corrupt(
            f"step_{manifest.step}: {error.filename or 'a file'} is missing",
            version=manifest.step,
        ) from error
    try:
        await check_files(disk, manifest, files, each_tensor=True)
    finally:
        close_files(files)
