"""The sweep: gives up what nobody needs, and removes whatever crashes have left.

It looks at everything each time, so a version that was skipped once is not leaked, and a
sweep that was killed is finished by the next one, whoever runs it. The order makes it safe:

1. The **disk is listed before the book is read**: a staging folder that was listed belongs
   to a consumer that had joined before, so if the book does not know it, it is gone.
2. A version is given up **in the book first** (which fails if somebody pinned it since),
   then its folder is renamed away, then removed. Whatever is removed is renamed first.
3. A folder is moved away **by name only if its number can never be published any more**
   (it is not in the book, and the head is not below it). So a sweeper that was stopped for
   an hour and wakes up still moves away only what nobody will ever want.

Consumers that are not ours and only write LOADED_STEP count in a channel with a ledger too.
They are read after the ledger. A sweep gives up only what lies below the head that it read
before, so a consumer that writes its file first and then looks for the newest version finds
one that no sweep under way gives up.
"""

import contextlib
from collections.abc import Iterable, Set

import msgspec

from holdfast import events, faults
from holdfast.errors import Corrupt, TooNew
from holdfast.weights.book import Book, View
from holdfast.weights.channel import Channel
from holdfast.weights.disk import Disk, Item
from holdfast.weights.layout import Layout, epoch_of, number
from holdfast.weights.manifest import MANIFEST, MARKER, MAX_MANIFEST_BYTES, STABLE, decode
from holdfast.weights.markers import Markers
from holdfast.weights.policy import (
    Files,
    Hold,
    OnDisk,
    Retention,
    deletable,
    holds,
    used_bytes,
)
from holdfast.weights.trouble import NOT_A_FILE

__all__ = ["Report", "Scan", "Sweeper", "Swept", "files_of", "look"]

DECIDED = faults.declare("weights.sweep.decided", "a version is to go, nothing done yet")
RECORDED = faults.declare("weights.sweep.recorded", "given up in the book, folder still there")
RENAMED = faults.declare("weights.sweep.renamed", "folder renamed away, not removed")


class Swept(events.Event, frozen=True, tag="weights.swept"):
    """A version was deleted."""

    channel: str
    version: int
    bytes: int


class Stuck(events.Event, frozen=True, tag="weights.stuck"):
    """Something that belongs to nobody could not be removed; the next sweep tries it again."""

    path: str
    reason: str


class Scan(msgspec.Struct):
    """What lies in a channel's folder."""

    versions: dict[int, list[Item]]
    drafts: dict[str, dict[int, int]]
    staging: dict[str, dict[int, int]]
    trash: dict[str, dict[int, int]]

    def other(self, layout: Layout, gone: Set[str] = frozenset()) -> Files:
        """Files that count and are no versions, without the folders that are gone."""
        found: dict[int, int] = {}
        for path, group in (
            (layout.drafts, self.drafts),
            (layout.staging, self.staging),
            (layout.trash, self.trash),
        ):
            for name, files in group.items():
                if f"{path}/{name}" not in gone:
                    found.update(files)
        return found

    def bytes_without(self, layout: Layout, gone: Set[str] = frozenset()) -> int:
        """What all folders take but those that are gone; a file that several have counts once."""
        left = dict(self.other(layout, gone))
        for one, items in self.versions.items():
            if layout.version(one) not in gone:
                left.update(files_of(items))
        return sum(left.values())


async def look(channel: Channel) -> Scan:
    """List the channel's folder."""
    disk, layout = channel.disk, channel.layout
    versions: dict[int, list[Item]] = {}
    for item in await _items(disk, layout.base):
        found = number(item.name) if item.is_folder else None
        if found is not None:
            versions[found] = await _items(disk, f"{layout.base}/{item.name}")
    below = [await _below(disk, path) for path in (layout.drafts, layout.staging, layout.trash)]
    return Scan(versions, *below)


async def _items(disk: Disk, path: str) -> list[Item]:
    """What is in a folder; nothing if it is gone."""
    with contextlib.suppress(FileNotFoundError):
        async with await disk.folder(path) as folder:
            return await folder.items()
    return []


async def _below(disk: Disk, path: str) -> dict[str, dict[int, int]]:
    return {
        item.name: await _tree(disk, f"{path}/{item.name}")
        for item in await _items(disk, path)
        if item.is_folder
    }


async def _tree(disk: Disk, path: str, depth: int = 3) -> dict[int, int]:
    """All files below a folder."""
    files: dict[int, int] = {}
    for item in await _items(disk, path):
        if not item.is_folder:
            files[item.inode] = item.bytes
        elif depth:
            files.update(await _tree(disk, f"{path}/{item.name}", depth - 1))
    return files


class Report(msgspec.Struct, frozen=True):
    """What a sweep did, and what is left."""

    deleted: tuple[int, ...]
    leftovers: tuple[str, ...]
    used_bytes: int
    missing_bytes: int
    """What is missing in the budget for the room that was wanted."""
    holds: tuple[Hold, ...]
    freed_bytes: int = 0
    """Of files that no folder has any more."""
    beyond: tuple[int, ...] = ()
    """Folders beyond the newest version: of a publisher at work, or known to another ledger."""
    stuck: dict[str, str] = {}
    """What could not be removed, and why."""


class Sweeper:
    """Sweeps one channel."""

    def __init__(self, channel: Channel, book: Book, retention: Retention) -> None:
        self._channel = channel
        self._disk = channel.disk
        self._layout = channel.layout
        self._book = book
        self._retention = retention
        self._foreign = Markers(channel.disk, channel.layout, reading=True)

    async def scan(self) -> Scan:
        """List the channel's folder."""
        return await look(self._channel)

    async def view(self) -> View:
        """What the book says, and in a channel with a ledger who else writes LOADED_STEP."""
        view = await self._book.view()
        if self._channel.has_ledger:
            foreign = await self._foreign.foreign()
            view = msgspec.structs.replace(view, members=(*view.members, *foreign))
        return view

    async def sweep(self, reserve_bytes: int = 0, *, dry_run: bool = False) -> Report:
        """Delete what may go; `reserve_bytes` is room that is wanted on top."""
        scan = await self.scan()
        view = await self.view()
        versions = on_disk(scan, view)
        chosen = deletable(
            versions,
            view.pins(),
            view.acknowledgements(),
            self._retention,
            view.now_s,
            reserve_bytes=reserve_bytes,
            other=scan.other(self._layout),
        )
        rubbish = self._rubbish(scan, view)
        stuck: dict[str, str] = {}
        deleted = [one for one in chosen if self._book.may_forget(view, one)]
        if not dry_run:
            deleted = [one for one in deleted if await self._give_up(view, one, stuck)]
            rubbish = tuple([path for path in rubbish if await self._remove(path, stuck)])
        cleared = await self._clear_beyond(scan, view, dry_run=dry_run)
        rubbish += tuple(map(self._layout.version, cleared))
        return self._report(scan, view, versions, tuple(deleted), rubbish, stuck, reserve_bytes)

    async def _give_up(self, view: View, one: int, stuck: dict[str, str]) -> bool:
        """Delete a version, unless somebody needs it since the view."""
        faults.point(DECIDED)
        if not await self._book.forget(view, one):
            return False
        faults.point(RECORDED)
        await self._remove(self._layout.version(one), stuck)
        events.emit(Swept(channel=self._channel.name, version=one, bytes=view.versions[one].bytes))
        return True

    async def _remove(self, path: str, stuck: dict[str, str]) -> bool:
        """Remove what belongs to nobody; tells whether that was possible.

        Something that another user owns, or that the file system does not let go, must not
        keep anybody from publishing: it is told, counted, and tried again by the next sweep.
        """
        try:
            if path.startswith(f"{self._layout.trash}/"):
                await self._disk.remove(path)
            else:
                await self._move_away(path)
        except OSError as error:
            stuck[path] = error.strerror or str(error)
            events.emit(Stuck(path=path, reason=stuck[path]))
            return False
        return True

    def _report(
        self,
        scan: Scan,
        view: View,
        versions: list[OnDisk],
        deleted: tuple[int, ...],
        rubbish: tuple[str, ...],
        stuck: dict[str, str],
        reserve_bytes: int,
    ) -> Report:
        left = [one for one in versions if one.version not in deleted]
        other = scan.other(self._layout, {*rubbish})
        held = holds(left, view.pins(), view.acknowledgements(), view.now_s)
        used, budget = used_bytes(left, other), self._retention.max_bytes
        missing = max(0, used + reserve_bytes - budget) if budget else 0
        beyond = [
            one
            for one, items in scan.versions.items()
            if _is_beyond(one, view)
            and any(item.name == MANIFEST for item in items)
            and self._layout.version(one) not in rubbish
        ]
        gone = ({self._layout.version(one) for one in deleted} | {*rubbish}) - stuck.keys()
        freed = scan.bytes_without(self._layout) - scan.bytes_without(self._layout, gone)
        return Report(
            deleted, rubbish, used, missing, tuple(held), freed, tuple(sorted(beyond)), stuck
        )

    def _rubbish(self, scan: Scan, view: View) -> tuple[str, ...]:
        """Paths that belong to nobody."""
        layout = self._layout
        living = {member.id for member in view.members if member.until_s > view.now_s}
        found = [f"{layout.trash}/{name}" for name in scan.trash]
        for name in scan.drafts:
            epoch = epoch_of(name)
            if epoch is None:
                continue
            # Numbers only grow, so what was begun below the head can never be finished.
            late = view.head is not None and int(name.split("-")[1]) <= view.head
            if late or epoch < view.epoch:
                found.append(f"{layout.drafts}/{name}")
        found += [f"{layout.staging}/{name}" for name in scan.staging if name not in living]
        found += [
            layout.version(one)
            for one, items in scan.versions.items()
            if one not in view.versions
            and view.head is not None
            and one <= view.head
            and self._may_be_ours(items)
        ]
        return tuple(found)

    def _may_be_ours(self, items: list[Item]) -> bool:
        """Whether a folder is a version of ours, or what is left of one.

        Without a ledger an empty one may be another trainer's, who has just made it.
        """
        return _ours({item.name for item in items}) and bool(items or self._channel.has_ledger)

    async def _move_away(self, path: str) -> None:
        """Rename a folder out of sight, then remove it.

        Drafts too: a publisher that was replaced could otherwise give its draft a name while
        we take the files out of it.
        """
        nonce = f"{self._channel.runtime.random.getrandbits(32):08x}"
        away = self._layout.rubbish(number(path.rpartition("/")[2]), nonce)
        try:
            await self._disk.rename(path, away)
        except FileNotFoundError:
            return  # somebody else was faster
        faults.point(RENAMED)
        await self._channel.sync_base()
        await self._disk.remove(away)

    async def _clear_beyond(
        self, scan: Scan, view: View, *, dry_run: bool = False
    ) -> tuple[int, ...]:
        """Empty what replaced publishers left beyond the head, through the folders themselves.

        Such a number may be published at any time, so the name proves nothing. What is
        emptied is the folder that was looked into, and only an empty folder is removed by
        name. Returns which numbers those were.
        """
        cleared = []
        marked = self._channel.has_ledger
        for one, items in scan.versions.items():
            if not _is_beyond(one, view) or not self._may_be_ours(items):
                continue
            path = self._layout.version(one)
            if await clear(self._disk, path, view.epoch - 1, marked=marked, dry_run=dry_run):
                if not dry_run:
                    await self._disk.remove_empty(path)
                cleared.append(one)
        return tuple(cleared)


def _is_beyond(one: int, view: View) -> bool:
    """Whether this number was never published and still may be."""
    return one not in view.versions and (view.head is None or one > view.head)


async def clear(
    disk: Disk, path: str, epoch: int, *, marked: bool = True, dry_run: bool = False
) -> bool:
    """Empty a version's folder that was never committed and cannot be any more.

    Only what a publisher up to `epoch` has written is touched, and only with `marked` what
    bears the marker: without a ledger that is the commit. The markers go first and the
    manifest last, so an interrupted clearing is recognised. Tells whether the folder is
    (or was) ours to clear.
    """
    try:
        folder = await disk.folder(path)
    except FileNotFoundError:
        return True
    async with folder:
        items = await folder.items()
        names = [item.name for item in items]
        if not names:
            return True
        if not _ours(set(names)) or any(item.is_folder for item in items):
            return False
        try:
            if MANIFEST in names:
                raw = await folder.read(MANIFEST, MAX_MANIFEST_BYTES)
                if decode(raw, path).epoch > epoch:
                    return False
        except FileNotFoundError:
            return True  # somebody else is emptying it
        except (Corrupt, TooNew):
            return False
        except OSError as error:
            if error.errno not in NOT_A_FILE:
                raise
            return False
        if dry_run:
            return marked or STABLE not in names
        if not marked:
            await folder.unlink(MARKER)  # from here on its writer cannot mark it any more
            if any(item.name == STABLE for item in await folder.items()):
                return False
        # In this order, and each synced before the next: without a marker nobody takes it
        # for a version (nor can its writer mark it any more), and as long as anything is
        # there the manifest tells whose it is.
        others = [name for name in names if name not in (MARKER, STABLE, MANIFEST)]
        for group in ((MARKER, STABLE), others, (MANIFEST,)):
            for name in group:
                await folder.unlink(name)
            await folder.sync()
        return True


def _ours(names: set[str]) -> bool:
    """Whether a folder with these names is a version of ours, or what is left of one."""
    return MANIFEST in names or not names


def on_disk(scan: Scan, view: View) -> list[OnDisk]:
    """The versions of the book with the files that they have."""
    return [OnDisk(one, files_of(scan.versions.get(one, ()))) for one in view.versions]


def files_of(items: Iterable[Item]) -> dict[int, int]:
    """The files among what lies in a folder: bytes by inode."""
    return {item.inode: item.bytes for item in items if not item.is_folder}
