"""Marker files: what a channel's folder says where there is no ledger.

    step_42/STABLE                       the version exists (written last)
    LOADED_STEP                          a consumer that is not ours has loaded this number
    .holdfast/HEAD                       Head: no number up to this one is used again
    .holdfast/writers/7                  Writer: whoever made the largest number may publish
    .holdfast/swept/42                   Swept: given up; nobody may pin it any more
    .holdfast/marks/42                   Mark: found damaged
    .holdfast/consumers/r0-1f3a…/        one life of one consumer, written by it alone:
        STATE                            what it needs, pins and serves
        HEARTBEAT                        touched while it lives
        LOADED_STEP                      what it serves, for tools that are not ours
    .holdfast/consumers/<any>/LOADED_STEP   a consumer that is not ours, with a name

This module reads them. What is read is judged by pure functions (`judge`, `member`), the
rest is access. A consumer lives while the file system's clock is less than its lease beyond
the newest of its files; one that is not ours holds everything from its number on, because
nobody knows what it will load next. What cannot be read holds everything while it is fresh.
In a channel with a ledger only the files of consumers that are not ours mean anything
(`Markers.foreign`).

STABLE is written last. A foreign trainer that writes a step again may leave the old STABLE in
place meanwhile; so a version with a file that is newer than its STABLE does not count before
that file was left alone for `foreign_settle_s`. (A copy of a folder may have such files for ever.)

Reading costs a few small calls per version folder and per consumer. Manifests are read once
and remembered by inode, size and time.
"""

import contextlib
import errno
import re
import time
from collections.abc import Iterator, Mapping
from typing import TypeVar

import msgspec

from holdfast.errors import Corrupt, HoldfastError
from holdfast.ledger import Record
from holdfast.timeouts import DEFAULTS
from holdfast.weights.book import DELETING, Member
from holdfast.weights.disk import Disk, Folder, Item
from holdfast.weights.layout import MAX_VERSION, Layout, number
from holdfast.weights.manifest import MANIFEST, MAX_MANIFEST_BYTES, STABLE, decode, digest
from holdfast.weights.records import Consumer, Head, Mark, Swept, Version, Writer
from holdfast.weights.trouble import DENIED, FULL, NOT_A_FILE, translate

__all__ = [
    "HEAD",
    "HEARTBEAT",
    "LOADED_STEP",
    "STATE",
    "Found",
    "Markers",
    "State",
    "judge",
    "life",
    "member",
    "telling",
]

HEAD, STATE, HEARTBEAT, LOADED_STEP = "HEAD", "STATE", "HEARTBEAT", "LOADED_STEP"

MAX_MARKER_BYTES = 64 << 10
_HASH = re.compile(rb"[0-9a-f]{32}\s*")
_LIFE = re.compile(r"(.+)-[0-9a-f]{16}")
_SIGNS = (STATE, HEARTBEAT, LOADED_STEP)

R = TypeVar("R", bound=Record)


class State(Record, frozen=True, kw_only=True):
    """The file STATE. `nonce` names the life."""

    nonce: str
    lease_s: float
    consumer: Consumer


class Found(msgspec.Struct, frozen=True):
    """A version that is there. With a `problem` it must not be loaded."""

    version: Version
    problem: str = ""


@contextlib.contextmanager
def telling(what: str) -> Iterator[None]:
    """What the file system says becomes an error of ours."""
    try:
        yield
    except OSError as error:
        raise translate(error, what) from error


# ---- pure ----------------------------------------------------------------------


def judge(number: int, files: Mapping[str, Item], stable: bytes, manifest: bytes | None) -> Found:
    """What a folder with STABLE is: ours (verifiable), damaged, or of a foreign trainer."""
    size = sum(item.bytes for item in files.values() if item.name not in (STABLE, MANIFEST))
    promised = stable.strip().decode() if _HASH.fullmatch(stable) else ""
    lost = "missing" if promised else ""
    ours = Version(
        version=number,
        parent=None,
        epoch=0,
        content=promised,
        manifest=lost if manifest is None else digest(manifest),
        bytes=size,
        published_s=files[STABLE].mtime_s,
    )
    if manifest is None:
        return Found(ours, f"its {MANIFEST} is missing" if promised else "")
    try:
        says = decode(manifest, MANIFEST)
    except HoldfastError as error:
        return Found(ours, str(error))
    ours = msgspec.structs.replace(
        ours,
        parent=says.parent,
        epoch=says.epoch,
        content=says.content,
        bytes=sum(file.bytes for file in says.files),
    )
    if says.step != number:
        return Found(ours, f"its {MANIFEST} is that of version {says.step}")
    if promised and promised != says.content:
        return Found(ours, f"its {MANIFEST} and its {STABLE} do not belong together")
    return Found(ours)


def life(folder: str) -> str | None:
    """The consumer's name in the name of a folder that our own consumers make, or None."""
    match = _LIFE.fullmatch(folder)
    return match[1] if match else None


def member(
    folder: str,
    made_s: float,
    files: Mapping[str, Item],
    state: bytes | None,
    loaded: bytes | None,
) -> Member | None:
    """A consumer, from its folder's name and time and from what is in its files."""
    lease_s = DEFAULTS.foreign_lease_s  # it may load for long
    seen_s = max((files[name].mtime_s for name in _SIGNS if name in files), default=made_s)
    if state is not None:
        try:
            found = msgspec.json.decode(state, type=State)
            record, lease_s = found.consumer, found.lease_s
        except (msgspec.DecodeError, UnicodeDecodeError):
            record = Consumer(name=folder, needs="every", floor=0, problem="STATE is unreadable")
    elif loaded is not None:
        step = _step(loaded)
        problem = "" if step is not None else f"{LOADED_STEP} is not a number"
        record = Consumer(
            name=folder, needs="every", floor=step or 0, acknowledged=step, problem=problem
        )
    elif (ours := life(folder)) is not None:
        # It is joining or leaving, or was killed while it did.
        record, seen_s = Consumer(name=ours, needs="latest", floor=0), max(seen_s, made_s)
    else:
        return None
    return Member(folder, record, seen_s + lease_s)


def _step(raw: bytes) -> int | None:
    text = raw.strip()
    # Longer ones are no versions, and slow to convert.
    return int(text) if text.isdigit() and len(text) <= len(str(MAX_VERSION)) else None


# ---- access --------------------------------------------------------------------


class Markers:
    """Reads the marker files of one channel.

    With `reading` nothing depends on what is found: who may not write here, or comes where
    nobody has ever been, is told as much as can be seen, by this machine's clock.
    """

    def __init__(self, disk: Disk, layout: Layout, *, reading: bool = False) -> None:
        self.disk = disk
        self.layout = layout
        self._reading = reading
        self._known: dict[int, tuple[object, Found]] = {}

    async def versions(self) -> dict[int, Found]:
        """All versions that are there, by number. Those given up have a problem."""
        numbers = await self._numbers()
        found = {one: version for one in numbers if (version := await self.find(one)) is not None}
        self._known = {one: known for one, known in self._known.items() if one in found}
        for one in found:
            if await self.swept(one) is not None:
                found[one] = Found(found[one].version, DELETING)
        for one, reason in (await self.marks()).items():
            if one in found and not found[one].problem:
                found[one] = Found(found[one].version, reason)
        return found

    async def _numbers(self) -> list[int]:
        """Folders with the name of a version, whatever is in them; the newest first."""
        async with await self.disk.folder(self.layout.base) as folder:
            items = await folder.items()
        names = [number(item.name) for item in items if item.is_folder]
        return sorted((one for one in names if one is not None), reverse=True)

    async def find(self, one: int) -> Found | None:
        """The version if its folder is there, settled, and has its STABLE, marked or not."""
        try:
            async with await self.disk.folder(self.layout.version(one)) as folder:
                files = {item.name: item for item in await folder.items() if not item.is_folder}
                if STABLE not in files:
                    return None
                identity = sorted(
                    (item.name, item.inode, item.bytes, item.mtime_s) for item in files.values()
                )
                known = self._known.get(one)
                if known is not None and known[0] == identity:
                    return known[1]
                stable = await _small(folder, STABLE)
                manifest = None
                if MANIFEST in files:
                    manifest = await _small(folder, MANIFEST, MAX_MANIFEST_BYTES)
                elif await self._is_being_written(files):
                    return None
        except (FileNotFoundError, NotADirectoryError):
            return None  # it went while we looked
        found = await self.disk.work(judge, one, files, stable, manifest)
        self._known[one] = (identity, found)
        return found

    async def _is_being_written(self, files: Mapping[str, Item]) -> bool:
        """Whether a foreign trainer seems to write a version again under its old STABLE."""
        newest_s = max(item.mtime_s for item in files.values())
        if newest_s == files[STABLE].mtime_s:
            return False
        return await self._now() < newest_s + DEFAULTS.foreign_settle_s

    async def head(self) -> int | None:
        """The largest number that was ever published, as far as anybody knows."""
        recorded = await self.recorded()
        for one in await self._numbers():
            if recorded is not None and one <= recorded.version:
                break
            if await self.find(one) is not None:
                return one
        return recorded.version if recorded else None

    async def recorded(self) -> Head | None:
        """What the file HEAD says."""
        return await self._record(self.layout.hidden, HEAD, Head)

    async def swept(self, one: int) -> Swept | None:
        """What is left of a version that was given up, or None."""
        return await self._record(self.layout.swept, str(one), Swept)

    async def writer(self, epoch: int) -> Writer | None:
        """Who took over publishing with an epoch, or None when that is no longer known."""
        return await self._record(self.layout.writers, str(epoch), Writer)

    async def mark(self, one: int) -> str:
        """Why a version must not be loaded; empty when nobody said so."""
        mark = await self._record(self.layout.marks, str(one), Mark)
        return mark.reason if mark else ""

    async def marks(self) -> dict[int, str]:
        """All marks."""
        return {one: await self.mark(one) for one in await self.listed(self.layout.marks)}

    async def listed(self, path: str) -> list[int]:
        """The files in a folder whose names are numbers, in order."""
        names = [item.name for item in await self._items(path)]
        return sorted(int(name) for name in names if name.isascii() and name.isdecimal())

    async def _items(self, path: str) -> list[Item]:
        """What is in one of our folders, which only a reader may find missing."""
        try:
            async with await self.disk.folder(path) as folder:
                return await folder.items()
        except FileNotFoundError:
            if not self._reading:
                raise
            return []

    async def members(self) -> tuple[float, tuple[Member, ...]]:
        """The file system's time, and all consumers, dead ones too.

        The clock is read first: whoever seems dead by it finds, whenever it touches its
        heartbeat next, that it came too late.
        """
        now_s, items = await self._now(), await self._items(self.layout.consumers)
        found = [await self._member(item) for item in items if item.is_folder]
        found.append(await self._member(None))
        return now_s, tuple(one for one in found if one is not None)

    async def foreign(self) -> tuple[Member, ...]:
        """The consumers that are not ours, beside a ledger; their `until_s` counts from now."""
        now_s, members = await self.members()
        return tuple(Member(one.id, one.record, one.until_s - now_s) for one in members)

    async def _now(self) -> float:
        """The file system's time, which takes the right to write, and a little room."""
        try:
            async with await self.disk.folder(self.layout.consumers) as folder:
                return await folder.clock()
        except OSError as error:
            if not self._reading or error.errno not in (errno.ENOENT, *DENIED, *FULL):
                raise
            return time.time()

    async def _member(self, item: Item | None) -> Member | None:
        """The consumer with this folder; None: the one that writes beside the versions."""
        path = self.layout.base if item is None else f"{self.layout.consumers}/{item.name}"
        state = loaded = None
        try:
            async with await self.disk.folder(path) as folder:
                files: Mapping[str, Item] = {one.name: one for one in await folder.items()}
                if item is None:
                    files = {name: files[name] for name in (LOADED_STEP,) if name in files}
                if STATE in files:
                    state = await _small(folder, STATE)
                elif LOADED_STEP in files:
                    loaded = await _small(folder, LOADED_STEP)
        except (FileNotFoundError, NotADirectoryError):
            return None  # it left while we looked
        name, made_s = (LOADED_STEP, 0.0) if item is None else (item.name, item.mtime_s)
        return member(name, made_s, files, state, loaded)

    async def _record(self, path: str, name: str, kind: type[R]) -> R | None:
        try:
            async with await self.disk.folder(path) as folder:
                raw = await folder.read(name, MAX_MARKER_BYTES)
        except FileNotFoundError:
            return None
        try:
            return msgspec.json.decode(raw, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Corrupt(
                f"{path}/{name} does not hold a {kind.__name__} ({error}): was it written by hand?"
            ) from error


async def _small(folder: Folder, name: str, limit: int = MAX_MARKER_BYTES) -> bytes:
    """A file that others write; what is too large, or no file, is as unreadable as nothing."""
    try:
        return await folder.read(name, limit)
    except Corrupt:
        return b""
    except OSError as error:
        if error.errno not in NOT_A_FILE:
            raise
        return b""
