"""Verifying: every version of a channel, byte by byte, against its manifest and the book.

The manifest's hash is in the book, the files' hashes are in the manifest: what agrees all
the way down is what was published. A file that several versions share (one inode) is read
once, and if it is damaged, every version that shares it is told of. Of a version of somebody
else's trainer, which has no manifest, only the structure can be checked.

Verifying changes nothing, unless it is asked to `mark`, and pins nothing. A version that is
swept meanwhile is not missing: it was given up in the book before its files went, so whatever
was found wrong counts only if the book, asked afterwards, still has the version.

One manifest and a few files are open at a time, and files are mapped, not read into memory.
"""

import asyncio
import errno
from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from holdfast.errors import Corrupt, Gone, HoldfastError, NotFound
from holdfast.text import several
from holdfast.weights import foreign
from holdfast.weights.book import DELETING, Book, View
from holdfast.weights.channel import Channel
from holdfast.weights.disk import Folder, Item, OpenFile
from holdfast.weights.layout import version_folder
from holdfast.weights.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    STABLE,
    FileEntry,
    Manifest,
    TensorEntry,
    check_file,
    decode,
    digest,
)
from holdfast.weights.records import Swept, Version
from holdfast.weights.sweep import Scan, look
from holdfast.weights.trouble import translate
from holdfast.weights.writing import close_files

__all__ = ["Finding", "Progress", "verify"]

AT_ONCE = 8
MAX_STABLE_BYTES = 1024
REASONS_MAX = 3

Problem = Literal[
    "folder", "manifest", "missing", "bytes", "marker", "extra", "leftover", "unproven"
]
Progress = Callable[[int, int], None]
"""Called with the bytes that are done and those there are."""

_GIVEN_UP = "was given up: a sweep removes it when nobody reads it any more"
_UNFIT = ("folder", "manifest", "missing", "bytes")


class Finding(msgspec.Struct, frozen=True):
    """One thing that is not as it should be."""

    version: int
    problem: Problem
    detail: str
    """What it is, in words; a file's damaged tensors are named."""
    file: str = ""

    @property
    def unfit(self) -> bool:
        """Whether the version cannot be loaded any more."""
        return self.problem in _UNFIT

    @property
    def damaged(self) -> bool:
        """Whether something that was published is lost. The rest is only untidy."""
        return self.unfit or self.problem == "marker"


async def verify(
    channel: Channel,
    book: Book,
    numbers: Iterable[int] | None = None,
    *,
    mark: bool = False,
    progress: Progress | None = None,
) -> list[Finding]:
    """Prove all versions, or those with the given numbers; returns what is wrong.

    With `mark`, versions that cannot be loaded are marked in the book: then nobody tries any
    more, and the newest one without a mark counts as the newest. Raises `NotFound` or `Gone`
    for a number that is not in the book.
    """
    scan = await look(channel)
    view = await book.view()
    there = [one for one in view.versions if view.marks.get(one) != DELETING]
    wanted = sorted(there) if numbers is None else sorted(set(numbers))
    for number in wanted:
        if number not in there:
            raise await _absent(book, number)
    work = _Work(channel, _total(scan, wanted), progress)
    findings: list[Finding] = []
    for number in wanted:
        findings += await work.version(view.versions[number])
    after = await book.view()
    kept = [one for one in after.versions if after.marks.get(one) != DELETING]
    findings = [one for one in findings if one.version in kept]
    if numbers is None:
        findings += _leftovers(scan, view, after)
    if mark:
        await _mark(book, findings)
    return findings


async def _absent(book: Book, number: int) -> HoldfastError:
    known = await book.lookup(number)
    if isinstance(known, Swept):
        return Gone(f"version {number} was deleted: there is nothing to verify", version=number)
    return NotFound(f"version {number} was not published", version=number)


def _total(scan: Scan, wanted: Iterable[int]) -> int:
    sizes = {
        item.inode: item.bytes
        for number in wanted
        for item in scan.versions.get(number, ())
        if item.name not in (MANIFEST, STABLE)
    }
    return sum(sizes.values())


def _leftovers(scan: Scan, before: View, after: View) -> list[Finding]:
    """Folders that are in nobody's book, now and when we began."""
    found = []
    for number, items in sorted(scan.versions.items()):
        if after.marks.get(number) == DELETING:
            found.append(Finding(number, "leftover", f"{version_folder(number)} {_GIVEN_UP}"))
            continue
        if number in before.versions or number in after.versions:
            continue
        if not any(item.name == MANIFEST for item in items):
            what = "was not written by Holdfast: move it away"
        elif after.head is not None and number <= after.head:
            what = "is in nobody's book: a sweep removes it"
        else:
            continue  # about to be published, or cleared away by the next publisher
        found.append(Finding(number, "leftover", f"{version_folder(number)} {what}"))
    return found


async def _mark(book: Book, findings: Iterable[Finding]) -> None:
    reasons: dict[int, list[str]] = {}
    for one in findings:
        if one.unfit:
            reasons.setdefault(one.version, []).append(one.detail)
    for number, details in reasons.items():
        await book.mark(number, several(details, REASONS_MAX, "; ", "; and "))


class _Work:
    """One run; remembers for each inode how it differs from what was expected of it."""

    def __init__(self, channel: Channel, total: int, progress: Progress | None) -> None:
        self._channel = channel
        self._disk = channel.disk
        self._total, self._done = total, 0
        self._progress = progress
        self._places = asyncio.Semaphore(AT_ONCE)
        self._seen: dict[tuple[int, str], str] = {}

    def _read(self, count: int) -> None:
        self._done += count
        if self._progress is not None:
            self._progress(self._done, max(self._total, self._done))

    async def version(self, record: Version) -> list[Finding]:
        """What is wrong with one version."""
        number = record.version
        name = version_folder(number)
        try:
            folder = await self._disk.folder(self._channel.layout.version(number))
        except OSError as error:
            return [Finding(number, "folder", f"{name} is missing: {_why(error, name)}")]
        async with folder:
            if not record.manifest:
                return await self._foreign(folder, number)
            items = {item.name: item for item in await folder.items()}
            try:
                manifest = await _manifest(folder, record)
            except Corrupt as error:
                return [Finding(number, "manifest", str(error), MANIFEST)]
            findings = _names(manifest, items)
            findings += await _marker(folder, manifest)
            shards: dict[str, list[TensorEntry]] = {}
            for tensor in manifest.tensors:
                shards.setdefault(tensor.file, []).append(tensor)
            acts = [
                self._file(folder, manifest, entry, shards.get(entry.name, []))
                for entry in manifest.files
                if entry.name in items
            ]
            return findings + [one for found in await asyncio.gather(*acts) for one in found]

    async def _foreign(self, folder: Folder, number: int) -> list[Finding]:
        """What can be said of a version without a manifest."""
        name = version_folder(number)
        try:
            files = await foreign.open_version(folder, number)
        except (Corrupt, Gone) as error:
            return [Finding(number, "folder", f"{name}: {error}")]
        try:
            await foreign.describe(self._disk, number, files)
        except Corrupt as error:
            return [Finding(number, "bytes", str(error))]
        finally:
            self._read(sum(file.bytes for file in files.values()))
            close_files(files)
        text = f"{name} is not ours and has no manifest: only its structure was checked"
        return [Finding(number, "unproven", text)]

    async def _file(
        self, folder: Folder, manifest: Manifest, entry: FileEntry, tensors: list[TensorEntry]
    ) -> list[Finding]:
        """Prove one file, unless it was read as a file of another version."""
        number, where = manifest.step, f"{version_folder(manifest.step)}/{entry.name}"
        async with self._places:
            try:
                file = await folder.open(entry.name)
            except FileNotFoundError:
                return [Finding(number, "missing", f"{where} is missing", entry.name)]
            except OSError as error:
                text = f"{where} cannot be read: {_why(error, where)}"
                return [Finding(number, "bytes", text, entry.name)]
            try:
                key = (file.inode, digest(msgspec.json.encode((entry, tensors))))
                if key not in self._seen:
                    self._seen[key] = await self._disk.work(_difference, manifest, entry, file)
                    self._read(file.bytes)
            finally:
                file.close()
        what = self._seen[key]
        return [Finding(number, "bytes", f"{where}: {what}", entry.name)] if what else []


async def _manifest(folder: Folder, record: Version) -> Manifest:
    """The manifest, if it is the one that the book speaks of. Raises `Corrupt`."""
    where = f"{version_folder(record.version)}/{MANIFEST}"
    try:
        raw = await folder.read(MANIFEST, MAX_MANIFEST_BYTES)
    except OSError as error:
        raise Corrupt(f"{where} cannot be read: {_why(error, where)}") from error
    if digest(raw) != record.manifest:
        raise Corrupt(f"{where} is not the manifest that was published")
    manifest = decode(raw, where)
    if (manifest.step, manifest.content) != (record.version, record.content):
        raise Corrupt(f"{where} speaks of other contents than the book")
    return manifest


def _names(manifest: Manifest, items: dict[str, Item]) -> list[Finding]:
    """What is missing in the folder, and what should not be there."""
    number = manifest.step
    where = version_folder(number)
    listed = {entry.name for entry in manifest.files}
    found = []
    for name in sorted(listed - items.keys()):
        tensors = sorted(tensor.name for tensor in manifest.tensors if tensor.file == name)
        lost = f", with the tensors {several(tensors, REASONS_MAX)}" if tensors else ""
        found.append(Finding(number, "missing", f"{where}/{name} is missing{lost}", name))
    for name in sorted(items.keys() - listed - {MANIFEST, STABLE}):
        if not name.startswith("."):  # those are the disk's own
            text = f"{where}/{name} does not belong to the version"
            found.append(Finding(number, "extra", text, name))
    return found


async def _marker(folder: Folder, manifest: Manifest) -> list[Finding]:
    """Whether readers that know nothing of us see that the version is complete."""
    where = f"{version_folder(manifest.step)}/{STABLE}"
    try:
        content = (await folder.read(STABLE, MAX_STABLE_BYTES)).strip()
    except FileNotFoundError:
        what = "is missing: readers that wait for it do not see this version"
    except (OSError, Corrupt) as error:
        what = f"cannot be read: {error}"
    else:
        if content == manifest.content.encode():
            return []
        what = "is of other contents"
    return [Finding(manifest.step, "marker", f"{where} {what}", STABLE)]


def _difference(manifest: Manifest, entry: FileEntry, file: OpenFile) -> str:
    """How a file differs from what was published, in words; empty when it does not."""
    prefix = f"{version_folder(manifest.step)}/{entry.name} is not what was published: "
    try:
        check_file(manifest, entry, file.view())
    except Corrupt as error:
        return str(error).removeprefix(prefix)
    return ""


def _why(error: OSError, where: str) -> str:
    """The reason, in words. Raises when it says something about us and not about the file."""
    if error.errno in (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE):
        raise translate(error, f"{where} cannot be verified") from error
    return error.strerror or str(error)
