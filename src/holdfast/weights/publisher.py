"""Publishing: a version can be seen only when it is complete, verified and recorded.

    async with Publisher(root, ledger, "policy") as publisher:
        await publisher.publish(step, model.state_dict())

The order of one publish, each arrow a point where the process may be killed:

    write and sync files and draft folder → verify → rename → sync parent → marker →
    sync marker and folder → transaction that compares the publisher's epoch

- What happens before the rename is in a folder named by our epoch, which no reader looks at.
- The marker lies ready in the draft and is given its name **through the folder itself**: a
  publisher that was stopped and replaced marks only its own folder, wherever that is now,
  and not at all once somebody has begun to empty it.
- A folder left by an older publisher that never committed is emptied through itself and then
  replaced; a folder of a newer one is never touched (`Fenced`).
- A version exists when the transaction has committed. Publishing the same number again does
  nothing if the contents are the same, and is a mistake if they are not.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Self

from holdfast import events, faults
from holdfast.errors import (
    Conflict,
    Corrupt,
    Fenced,
    HoldfastError,
    Mistake,
    NoRoom,
    Retriable,
    TooLarge,
    UnknownOutcome,
)
from holdfast.ledger import Compare, Ledger
from holdfast.tensors import size
from holdfast.weights import about, shards
from holdfast.weights.channel import Channel
from holdfast.weights.disk import Folder
from holdfast.weights.layout import check_name, check_version
from holdfast.weights.manifest import (
    MANIFEST,
    MARKER,
    STABLE,
    FileEntry,
    Manifest,
    content_hash,
    digest,
    encode,
)
from holdfast.weights.policy import Retention
from holdfast.weights.records import Swept, Version
from holdfast.weights.room import holders, make_room
from holdfast.weights.sweep import Report, Sweeper, clear
from holdfast.weights.trouble import translate
from holdfast.weights.writing import (
    STEMS,
    Kind,
    Part,
    Prepared,
    Ticket,
    check_folder,
    check_tensors,
    prepare,
    read_parts,
    write_carried,
    write_shards,
)

__all__ = ["Publisher"]

SHARD_BYTES = 1 << 30
PLACES = 8
MAX_CARRIED_BYTES = 256 << 20

BEGUN = faults.declare("weights.publish.begun", "draft folder made, nothing in it")
WRITTEN = faults.declare("weights.publish.written", "files and draft folder synced")
VERIFIED = faults.declare("weights.publish.verified", "files read back and compared")
RENAMED = faults.declare("weights.publish.renamed", "renamed to its name, parent not synced")
PLACED = faults.declare("weights.publish.placed", "parent synced, no marker")
MARKED = faults.declare("weights.publish.marked", "marker synced, not in the ledger")
COMMITTED = faults.declare("weights.publish.committed", "in the ledger, nobody told")

CarriedFiles = Mapping[str, bytes | str | Path]
"""Configuration and tokenizer files by name: their bytes, or a path to read."""


class Published(events.Event, frozen=True, tag="weights.published"):
    """A version exists."""

    channel: str
    version: int
    bytes: int
    seconds: float


class SweepFailed(events.Event, frozen=True, tag="weights.sweep_failed"):
    """A version was published, but what it replaces was not swept; the next sweep does it."""

    version: int
    reason: str


class Publisher:
    """Publishes versions to one channel. Opening one fences off whoever published before."""

    def __init__(
        self,
        root: str | Path,
        ledger: Ledger | None,
        channel: str = "policy",
        retention: Retention | None = None,
        *,
        run: str = "default",
        name: str = "publisher",
        guards: Sequence[Compare] = (),
        shard_bytes: int = SHARD_BYTES,
        at: Channel | None = None,
    ) -> None:
        self._channel = at or Channel(root, ledger, channel, run=run)
        self._disk = self._channel.disk
        self._layout = self._channel.layout
        self._book = self._channel.book(check_name("publisher", name), guards)
        self._retention = retention or Retention()
        self._sweeper = Sweeper(self._channel, self._book, self._retention)
        self._shard_bytes = shard_bytes
        self._turn = asyncio.Lock()
        self._in_doubt = False
        self._doubtful: dict[str, Version] = {}
        """By its draft: the version whose commit was in doubt last."""
        self._epochs: set[int] = set()
        """All that were ours."""
        self._failed: list[str] = []

    @property
    def epoch(self) -> int:
        """Which incarnation of the channel's publisher this is."""
        return self._book.epoch

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing is held, so there is nothing to give back."""

    async def open(self) -> None:
        """Take over the channel and clean up what dead publishers have left."""
        try:
            await self._channel.make()
            await self._check_book()
            await self._book.open_writer()
            self._epochs.add(self._book.epoch)
            await about.write(self._channel, self._retention)
            await self._sweeper.sweep()
        except OSError as error:
            raise translate(error, f"the channel {self._layout.base} cannot be opened") from error

    async def _check_book(self) -> None:
        """Refuse a book that is not this folder's: to it, everything here belongs to nobody."""
        await about.check_book(self._channel)
        if (await self._book.view()).is_known():
            return
        scan = await self._sweeper.scan()
        if any(item.name == MANIFEST for items in scan.versions.values() for item in items):
            # A folder is placed only by whoever has taken over: look again, after the folders.
            if (await self._book.view()).is_known():
                return
            raise Mistake(
                f"{self._layout.base} holds versions, but the ledger knows nothing of the channel "
                f"in the run {self._channel.run}: check its URL and the run, or move the folder "
                "away to begin anew"
            )

    async def next_version(self) -> int:
        """A number that was never used: beyond the book, the folders and the trash."""
        scan = await self._sweeper.scan()
        view = await self._book.view()
        used = [*scan.versions, *view.versions, -1 if view.head is None else view.head]
        trash = [name.partition("-")[0] for name in scan.trash]
        used += [int(text) for text in trash if text.isascii() and text.isdecimal()]
        return max(used) + 1

    async def publish(
        self,
        step: int,
        tensors: Mapping[str, object],
        *,
        files: CarriedFiles | None = None,
        kind: Kind = "model",
    ) -> Version | Swept:
        """Publish a state dict as version `step`; returns when everybody can load it.

        `files` are carried along. `kind="adapter"` writes a LoRA adapter in PEFT's layout.
        Publishing again what was published (and perhaps deleted since) does nothing.
        """
        async with self._attempt(step):
            check_tensors(tensors)
            carried = await self._disk.work(_carried, files or {})
            ticket = await self._ticket(step, kind)
            prepared = await prepare(self._disk, ticket, tensors)
            entries = [FileEntry(name, len(data), digest(data)) for name, data in carried.items()]
            content = content_hash(list(prepared.tensors.values()), entries)
            known = await self._book.lookup(step)
            if known is not None:
                return _same(known, content)
            await self._make_room(step, prepared.new_bytes() + _beside(prepared, carried))
            async with self._draft(ticket) as folder:
                files_written = await write_shards(self._disk, folder, ticket, prepared)
                part = Part(0, tuple(files_written), tuple(prepared.tensors.values()))
                return await self._complete(folder, ticket, part, carried)

    async def begin(self, step: int, *, kind: Kind = "model", new_bytes: int = 0) -> Ticket:
        """Begin a version that several ranks write; give the ticket to `write_part`.

        `new_bytes` is about how much all ranks together will write (what they share with the
        version before is not written): so much room is made in the budget beforehand. What
        they have really written is counted in `finish`.
        """
        async with self._attempt(step):
            if await self._book.lookup(step) is not None:
                raise Mistake(f"version {step} was published before", version=step)
            ticket = await self._ticket(step, kind)
            await self._make_room(step, new_bytes)
            await self._disk.make(ticket.path)
            faults.point(BEGUN)
            return ticket

    async def finish(
        self, ticket: Ticket, ranks: int, *, files: CarriedFiles | None = None
    ) -> Version:
        """Publish what `ranks` ranks have written; call it when all of them are done.

        After `UnknownOutcome` call it again: it tells whether the version was published.
        """
        async with self._attempt(ticket.step):
            if ticket.path in self._doubtful:
                return await self._settle(ticket)
            carried = await self._disk.work(_carried, files or {})
            async with self._draft(ticket, new=False) as folder:
                await self._check_next(ticket.step)
                whole = await read_parts(folder, ranks)
                await self._make_room(ticket.step, sum(map(len, carried.values())))
                return await self._complete(folder, ticket, whole, carried)

    async def _make_room(self, step: int, new_bytes: int) -> None:
        times = self._channel.timeouts
        await make_room(self._sweeper, self._book, self._retention, step, new_bytes, times)

    async def _settle(self, ticket: Ticket) -> Version:
        """What became of a version whose commit was in doubt. Nothing of it can arrive now."""
        version = self._doubtful.pop(ticket.path)
        known = await self._book.lookup(ticket.step)
        if isinstance(known, Version) and known.manifest == version.manifest:
            return known
        raise Mistake(
            f"version {ticket.step} was not published, and what was written of it is gone: "
            "begin it again",
            version=ticket.step,
        )

    async def _check_next(self, step: int) -> None:
        """Refuse a ticket whose number was published, or passed, since it was begun.

        Its folder would otherwise be taken for one that was left by a publisher of before.
        """
        head = (await self._book.view()).head
        if head is not None and step <= head:
            raise Mistake(
                f"version {step} cannot be published any more: the newest is {head} since it "
                "was begun; begin a later one",
                version=step,
            )

    async def sweep(self, *, dry_run: bool = False) -> Report:
        """Delete what nobody needs; every publish does this too."""
        async with self._turn:
            await self._book.check_writer()
            return await self._sweeper.sweep(dry_run=dry_run)

    # ---- one publish ---------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _attempt(self, step: int) -> AsyncIterator[None]:
        """One at a time; what the file system says becomes an error of ours."""
        check_version(step)
        async with self._turn:
            if self._book.epoch == 0:
                raise Mistake("this publisher is not open: use `async with`")
            if self._in_doubt:
                # A commit whose outcome we do not know may still arrive: fence it off. But
                # never take back what somebody newer has taken over.
                await self._book.open_writer(again=True)
                self._epochs.add(self._book.epoch)
                self._in_doubt = False
            # Before anything is swept by our policy: what is kept is up to who publishes now.
            await self._book.check_writer()
            try:
                while self._failed:
                    await self._disk.remove(self._failed[-1])
                    self._failed.pop()
                yield
            except (OSError, Corrupt) as error:
                # Files that vanish under us are a sign that somebody newer has cleaned up.
                await self._book.check_writer()
                if isinstance(error, Corrupt):
                    raise
                # Not kept in a name: an error that its own frame refers to is a cycle, and
                # would keep the tensors until the collector comes.
                raise await self._told(error, step) from error

    async def _told(self, error: OSError, step: int) -> HoldfastError:
        """What it means; on a full disk also who keeps how much, if that can be found out."""
        told = translate(error, f"version {step} was not published")
        if isinstance(told, NoRoom):
            with contextlib.suppress(OSError, HoldfastError):
                if held := (await self._sweeper.sweep(dry_run=True)).holds:
                    told = NoRoom(f"{told}. {holders(held)}")
            told.version = step
        return told

    async def _ticket(self, step: int, kind: Kind) -> Ticket:
        """Where a version is written, and what it may share files with."""
        if kind not in STEMS:
            raise Mistake(f"kind is {' or '.join(map(repr, STEMS))}, not {kind!r}")
        view = await self._book.view()
        below = view.head is not None and step < view.head and step not in view.versions
        if below and await self._book.lookup(step) is None:
            raise Mistake(
                f"version {step} is below the newest, {view.head}, and was never published: "
                f"numbers only grow; publish a later one",
                version=step,
            )
        older = [number for number in view.versions if number < step and number not in view.marks]
        parent = max(older, default=None)
        nonce = f"{self._channel.runtime.random.getrandbits(32):08x}"
        return Ticket(
            self._layout.draft(self._book.epoch, step, nonce),
            step,
            self._book.epoch,
            kind,
            parent,
            "" if parent is None else self._layout.version(parent),
            self._shard_bytes,
        )

    @contextlib.asynccontextmanager
    async def _draft(self, ticket: Ticket, *, new: bool = True) -> AsyncIterator[Folder]:
        """The draft's folder; after a failure it is removed, now or with the next try."""
        if ticket.epoch in self._epochs - {self._book.epoch}:
            raise Mistake(
                f"the ticket for version {ticket.step} was given out before the ledger was away, "
                "and what was written of it is fenced off: begin it again",
                version=ticket.step,
            )
        if ticket.epoch != self._book.epoch:
            raise Fenced(
                f"the ticket for version {ticket.step} is of an earlier publisher: begin again",
                epoch=ticket.epoch,
            )
        self._failed.append(ticket.path)
        try:
            if new:
                await self._disk.make(ticket.path)
                faults.point(BEGUN)
            async with await self._open_draft(ticket) as folder:
                yield folder
        except Exception:
            with contextlib.suppress(OSError):
                await self._disk.remove(ticket.path)
                self._failed.remove(ticket.path)
            raise
        self._failed.remove(ticket.path)

    async def _open_draft(self, ticket: Ticket) -> Folder:
        try:
            return await self._disk.folder(ticket.path)
        except FileNotFoundError:
            await self._book.check_writer()
            raise Mistake(
                f"what was written of version {ticket.step} is gone, after a failure or by "
                "hand: begin it again",
                version=ticket.step,
            ) from None

    async def _complete(
        self, folder: Folder, ticket: Ticket, whole: Part, carried: Mapping[str, bytes]
    ) -> Version:
        """Everything from the last shard to the transaction, in the order that matters."""
        began = time.monotonic()
        manifest, hashed = await self._seal(folder, ticket, whole, carried)
        await self._show(folder, ticket)
        try:
            version = await self._record(ticket, manifest, hashed)
        except Fenced:
            # It never became a version: readers that go by the marker must not take it for one.
            # But without a ledger the marker is the commit, and somebody may have pinned it.
            if self._channel.has_ledger:
                await folder.unlink(STABLE)
            raise
        events.emit(
            Published(
                channel=self._channel.name,
                version=ticket.step,
                bytes=version.bytes,
                seconds=time.monotonic() - began,
            )
        )
        await self._tidy(ticket.step)
        return version

    async def _tidy(self, step: int) -> None:
        """Sweep after a publish. The version exists, so trouble here is not its failure."""
        try:
            await self._sweeper.sweep()
        except (OSError, Retriable, UnknownOutcome) as error:
            events.emit(SweepFailed(version=step, reason=str(error)))

    async def _seal(
        self, folder: Folder, ticket: Ticket, whole: Part, carried: Mapping[str, bytes]
    ) -> tuple[Manifest, str]:
        """Complete the draft: all of it is on the disk, and is what the manifest says."""
        extra = await write_carried(folder, carried)
        files, tensors = whole.files, whole.tensors
        if len(files) > 1:
            total = sum(size(tensor.dtype, tensor.shape) for tensor in tensors)
            index = shards.index([(one.name, one.file) for one in tensors], total)
            name = shards.index_file(STEMS[ticket.kind])
            files = (*files, *await write_carried(folder, {name: index}))
        manifest = Manifest(
            step=ticket.step,
            parent=ticket.parent,
            epoch=ticket.epoch,
            kind=ticket.kind,
            files=(*files, *extra),
            tensors=tensors,
            content=content_hash(tensors, extra),
        )
        written = await folder.write(MANIFEST, [encode(manifest)])
        await folder.write(MARKER, [f"{manifest.content}\n".encode()])
        await folder.sync()
        faults.point(WRITTEN)
        await check_folder(self._disk, folder, manifest)
        faults.point(VERIFIED)
        return manifest, written.hash

    async def _show(self, folder: Folder, ticket: Ticket) -> None:
        """Give the draft its name, then the marker."""
        await self._place(ticket)
        faults.point(RENAMED)
        await self._channel.sync_base()
        faults.point(PLACED)
        # Without a ledger the marker is what makes it exist: the last moment to look.
        await self._book.check_writer()
        await folder.rename(MARKER, STABLE)
        await folder.sync()
        faults.point(MARKED)

    async def _record(self, ticket: Ticket, manifest: Manifest, hashed: str) -> Version:
        """Make it exist."""
        version = Version(
            version=ticket.step,
            parent=ticket.parent,
            epoch=ticket.epoch,
            content=manifest.content,
            manifest=hashed,
            bytes=sum(file.bytes for file in manifest.files),
            published_s=self._channel.wall_s(),
        )
        self._in_doubt = True
        try:
            await self._book.commit(version)
        except UnknownOutcome:
            self._doubtful = {ticket.path: version}
            raise
        self._in_doubt = False
        faults.point(COMMITTED)
        return version

    async def _place(self, ticket: Ticket) -> None:
        """Give the draft its name. Whatever is there was never committed, or is newer."""
        target = self._layout.version(ticket.step)
        for _ in range(PLACES):
            try:
                await self._disk.rename(ticket.path, target)
                return
            except NotADirectoryError:
                raise Mistake(
                    f"{target} is in the way and is not a folder but a file or a link: move it "
                    "away",
                    version=ticket.step,
                ) from None
            except FileExistsError:
                await self._book.check_writer()
                marked = self._channel.has_ledger
                if not await clear(self._disk, target, ticket.epoch, marked=marked):
                    raise Mistake(
                        f"{target} is in the way and was not written by this channel's "
                        "publisher, or was published just now by another: move it away, or "
                        "publish another number",
                        version=ticket.step,
                    ) from None
        raise Conflict(f"{target} was filled by others {PLACES} times: are two trainers running?")


def _beside(prepared: Prepared, carried: Mapping[str, bytes]) -> int:
    """At most how much a version needs beside its tensors: headers, index, manifest, marker."""
    names = sum(len(one.name.encode()) + len(one.file) for one in prepared.tensors.values())
    described = 3 * names + 400 * (len(prepared.tensors) + len(prepared.shards) + 2)
    return described + sum(len(data) + 400 for data in carried.values())


def _same(known: Version | Swept, content: str) -> Version | Swept:
    """What was published under this number, if it is the same thing."""
    if known.content != content:
        raise Mistake(
            f"version {known.version} was published with other contents ({known.content}, not "
            f"{content}): a number is never used twice; publish the next one",
            version=known.version,
        )
    return known


def _carried(files: CarriedFiles) -> dict[str, bytes]:
    """Read the files that are carried along; refuse names that could do harm."""
    found: dict[str, bytes] = {}
    for name, given in files.items():
        check_name("carried file", name)
        if name in (MANIFEST, STABLE) or name.endswith((".safetensors", ".index.json")):
            raise Mistake(f"{name!r} is a name that Holdfast writes itself: carry another one")
        data = given if isinstance(given, bytes) else Path(given).read_bytes()
        if len(data) > MAX_CARRIED_BYTES:
            raise TooLarge(f"{name} has {len(data)} bytes; {MAX_CARRIED_BYTES} can be carried")
        found[name] = data
    return found
