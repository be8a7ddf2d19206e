"""Subscribing: pin a version before opening it, acknowledge it after loading it.

    async with Subscriber(root, ledger, "policy", "replica-0") as subscriber:
        async with subscriber.pin() as pin:
            pin.load_into(model.state_dict())
            await subscriber.acknowledge(pin.number)

Pinning is: record it under our lease → open all files → ask the book whether our lease still
counts → compare every byte with the manifest. Descriptors outlive a deletion, so what
was opened while the lease counted is whole. A lease that ended in between is told from a
missing file, and the version is pinned again.

A subscriber whose lease ended (it was stopped, or cut off) takes a new seat by itself and
reports there what it still serves; its old pins have ended.
"""

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Self

import msgspec

from holdfast import faults
from holdfast.errors import (
    Corrupt,
    Gone,
    HoldfastError,
    LeaseLost,
    Mistake,
    NotFound,
    Retriable,
    TimedOut,
    UnknownOutcome,
)
from holdfast.ledger import Ledger
from holdfast.retry import AGAIN, MAX_S, Policy, insist
from holdfast.text import plural, several
from holdfast.timeouts import DEFAULTS
from holdfast.weights import about, foreign
from holdfast.weights.book import Seat
from holdfast.weights.channel import Channel
from holdfast.weights.disk import Folder, OpenFile
from holdfast.weights.layout import check_name, check_version
from holdfast.weights.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest, decode, digest
from holdfast.weights.pin import Pin
from holdfast.weights.policy import Needs
from holdfast.weights.records import Consumer, Swept, Told, Version
from holdfast.weights.trouble import NOT_A_FILE, translate
from holdfast.weights.writing import check_files, close_files, open_files

__all__ = ["Subscriber"]

LEASE_S = DEFAULTS.consumer_lease_s
_NO_FILE = (errno.ENOENT, errno.ENOTDIR, *NOT_A_FILE)
"""Nothing, or a link, a folder, a pipe or a socket, is where a file was."""
PATIENCE = Policy(attempts=20, base_s=0.1, max_s=2.0, deadline_s=MAX_S)
"""A call to the ledger has its own limit, so the number of attempts bounds these too."""

PINNED = faults.declare("weights.pin.recorded", "pinned in the book, no file open")
OPENED = faults.declare("weights.pin.opened", "all files open, lease not checked again")
CHECKED = faults.declare("weights.pin.checked", "lease checked, bytes not verified")
LOADED = faults.declare("weights.acknowledge.before", "loaded, not acknowledged")
ACKNOWLEDGED = faults.declare("weights.acknowledge.after", "acknowledged")


class Subscriber:
    """One consumer of one channel.

    `needs="every"`: nothing newer than what it acknowledged is deleted while it lives.
    `needs="latest"`: it only ever wants the newest, so versions in between may go.
    """

    def __init__(
        self,
        root: str | Path,
        ledger: Ledger | None,
        channel: str = "policy",
        consumer: str = "consumer",
        *,
        needs: Needs = "every",
        address: str = "",
        run: str = "default",
        lease_s: float = LEASE_S,
        at: Channel | None = None,
    ) -> None:
        self.channel = at or Channel(root, ledger, channel, run=run)
        self._runtime = self.channel.runtime
        self._book = self.channel.book(check_name("consumer", consumer))
        self.name = consumer
        self._lease_s = lease_s
        self._seat: Seat | None = None
        self._sitting = asyncio.Lock()
        self._told = Consumer(name=consumer, needs=needs, floor=0, address=address)
        self._loaded: dict[int, str] = {}
        self._tending: asyncio.Task[None] | None = None

    # ---- life ----------------------------------------------------------------

    async def __aenter__(self) -> Self:
        try:
            await self._arrive()
        except OSError as error:
            raise translate(error, f"{self.channel.layout.base} cannot be opened") from error
        await self._sit()
        self._tending = self._runtime.spawn(self._tend(), name=f"seat of {self.name}")
        return self

    async def _arrive(self) -> None:
        """Look at the folder. With a ledger it is made by whoever publishes, not by us."""
        if not self.channel.has_disk:
            return
        await about.check_book(self.channel)
        try:
            (await self.channel.disk.folder(self.channel.layout.base)).close()
        except FileNotFoundError:
            self.channel.warn(
                "%s waits at %s, where nothing was published yet", self.name, self._where()
            )
        if not self.channel.has_ledger:
            await self.channel.make()

    def _where(self) -> str:
        """Where we look, for people: whoever waits in vain may have come to the wrong place."""
        url = self.channel.ledger_url
        ledger = "marker files" if url is None else url or "the ledger"
        return f"{self.channel.layout.base} ({ledger}, run {self.channel.run})"

    async def __aexit__(self, *_: object) -> None:
        if self._tending is not None:
            self._tending.cancel()
        if self._seat is not None:
            await self._seat.leave()

    async def _sit(self) -> Seat:
        """Our seat; a new one if we have lost it."""
        async with self._sitting:
            last = self._seat
            if last is None or last.lost.is_set():
                seat = self._book.seat(self._told, self._lease_s)
                await seat.join()
                self._seat = seat
                if last is not None:
                    await last.leave()
            assert self._seat is not None
            return self._seat

    async def _tend(self) -> None:
        """Come back by ourselves after our lease has ended, whatever is in the way for now."""
        while True:
            assert self._seat is not None
            await self._seat.lost.wait()
            told: set[str] = set()

            def tell(error: Exception, told: set[str] = told) -> None:
                if not isinstance(error, (*AGAIN, LeaseLost)) and str(error) not in told:
                    self.channel.warn("%s cannot take its seat again: %s", self.name, error)
                    told.add(str(error))

            await insist(self._runtime, self._sit, on=(HoldfastError, *AGAIN), failed=tell)

    # ---- looking -------------------------------------------------------------

    def believes(self) -> bool:
        """Whether our seat should still count, by our own clock: serve only while it does."""
        return self._seat is not None and self._seat.believes()

    @property
    def seat_id(self) -> str:
        """What names this life of ours; another one after our lease has ended."""
        return self._seat.id if self._seat is not None else ""

    @property
    def acknowledged(self) -> int | None:
        """The version that we have acknowledged."""
        return self._told.acknowledged

    async def latest(self) -> Version | None:
        """The newest version that may be loaded, or None."""
        return (await self._book.view()).newest()

    async def wait_for(self, version: int, timeout_s: float | None = None) -> Version:
        """Wait until this version is published. Raises `Gone` when it was skipped or deleted."""
        check_version(version)

        async def arrived(head: int | None) -> Version | None:
            if head is None or head < version:
                return None
            found = await self._book.lookup(version)
            if isinstance(found, Version):
                return found
            what = "was deleted" if isinstance(found, Swept) else "was never published"
            raise Gone(f"version {version} {what}: the newest is {head}", version=version)

        return await self._wait(arrived, timeout_s, f"version {version}")

    async def wait_newer(self, than: int | None, timeout_s: float | None = None) -> Version:
        """Wait for any version above `than` (None: for any at all); returns the newest."""

        async def arrived(head: int | None) -> Version | None:
            if head is None or (than is not None and head <= than):
                return None
            found = (await self._book.view()).newest()
            return found if found and (than is None or found.version > than) else None

        return await self._wait(arrived, timeout_s, "a newer version")

    async def _wait(
        self,
        arrived: Callable[[int | None], Awaitable[Version | None]],
        timeout_s: float | None,
        what: str,
    ) -> Version:
        """Ask `arrived` whenever the head moves, until it has an answer."""

        async def follow() -> Version:
            async with contextlib.aclosing(self._book.heads()) as heads:
                async for head in heads:
                    if (found := await arrived(head)) is not None:
                        return found
            raise AssertionError("heads go on for ever")

        try:
            async with asyncio.timeout(timeout_s):
                return await insist(self._runtime, follow, on=Retriable)
        except TimeoutError:
            if (found := await self._look_once(arrived)) is not None:
                return found
            raise TimedOut(
                f"{what} was not published within {timeout_s} s at {self._where()}: "
                f"{await self._known()}"
            ) from None

    async def _look_once(
        self, arrived: Callable[[int | None], Awaitable[Version | None]]
    ) -> Version | None:
        """What there is by now: a process that was stopped had no time to look."""
        with contextlib.suppress(Retriable, TimeoutError):
            async with asyncio.timeout(self.channel.timeouts.last_look_s):
                return await arrived((await self._book.view()).head)
        return None

    async def _known(self) -> str:
        """What there is instead of what somebody waits for."""
        try:
            async with asyncio.timeout(self.channel.timeouts.last_look_s):
                view = await self._book.view()
        except (HoldfastError, TimeoutError) as error:
            return f"it does not answer {error}".rstrip()
        if not view.versions:
            who = ": no publisher was ever there" if view.epoch == 0 else " yet"
            return f"nothing was published{who}"
        if (newest := view.newest()) is None:
            return f"all {plural(len(view.versions), 'version')} are marked as damaged"
        return f"the newest is {newest.version}"

    # ---- pinning -------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def pin(self, version: int | None = None) -> AsyncIterator[Pin]:
        """Open a version, verified; nobody deletes it while our lease lasts.

        Without a number, the newest. Raises `NotFound` when nothing was published, `Gone`
        when the version was deleted, `Corrupt` (naming file and tensor) when its bytes are
        not what was published.
        """
        if version is not None:
            check_version(version)
        seat, pin = await self._pin(version)
        try:
            yield pin
        finally:
            try:
                await pin.close()
            finally:
                await self._unpin(seat, pin.number)

    async def _pin(self, version: int | None) -> tuple[Seat, Pin]:
        async def once() -> tuple[Seat, Pin]:
            seat = await self._sit()
            number = version if version is not None else await self._newest()
            record = await seat.pin(number)
            faults.point(PINNED)
            try:
                return seat, await self._open(seat, record)
            except BaseException:
                await self._unpin(seat, number)
                raise

        # The newest may go before we have pinned it: then there is a newer one.
        again = (*AGAIN, Gone if version is None else LeaseLost)
        return await PATIENCE.acall(once, on=again, clock=self._runtime)

    async def _newest(self) -> int:
        newest = await self.latest()
        if newest is None:
            raise NotFound(
                f"there is nothing to load at {self._where()}, {await self._known()}: use "
                "`wait_newer(None)`"
            )
        return newest.version

    async def _open(self, seat: Seat, record: Version) -> Pin:
        """Open all files, make sure that we still hold them, and compare every byte."""
        path = self.channel.layout.version(record.version)
        files: dict[str, OpenFile] = {}
        problem: HoldfastError | None = None
        manifest: Manifest | None = None
        try:
            async with await self.channel.disk.folder(path) as folder:
                manifest, files = await _read(folder, path, record)
        except FileNotFoundError as error:
            problem = (
                Corrupt(f"{path}: {error.filename or 'a file'} is missing")
                if record.manifest
                else Gone(f"{path} was deleted")
            )
        except OSError as error:
            raise translate(error, f"version {record.version} cannot be opened") from error
        except HoldfastError as error:
            problem = error
        try:
            faults.point(OPENED)
            if not await seat.holds(record.version):
                raise LeaseLost(f"the lease of {self.name} ended while it opened {path}")
            if problem is not None:
                problem.version = record.version
                raise problem
            faults.point(CHECKED)
            if manifest is None:
                manifest = await foreign.describe(self.channel.disk, record.version, files)
                await self._check_unchanged(record, files)
            else:
                await check_files(self.channel.disk, manifest, files)
            self._loaded[record.version] = record.content
            return Pin(self.channel, seat, record, manifest, files)
        except BaseException:
            close_files(files)
            raise

    async def _check_unchanged(self, record: Version, files: Mapping[str, OpenFile]) -> None:
        """Raise `Conflict` when a foreign trainer writes a version again that we have opened."""
        if await self._book.lookup(record.version) != record or foreign.changed(files):
            raise foreign.rewritten(record.version)

    async def _unpin(self, seat: Seat, number: int) -> None:
        """Give up a pin; if that does not work it ends with the lease."""
        with contextlib.suppress(Retriable, UnknownOutcome, LeaseLost):
            await seat.unpin(number)

    # ---- telling -------------------------------------------------------------

    async def acknowledge(self, version: int) -> None:
        """Tell that this version is loaded: from now on we may serve it.

        Serve it only after this returns. Acknowledging twice does no harm.
        """
        if version not in self._loaded:
            raise Mistake(f"{self.name} acknowledges version {version}, which it never pinned")
        faults.point(LOADED)
        await self.report(Told(acknowledged=version))
        faults.point(ACKNOWLEDGED)
        # Older ones can be pinned again if they are wanted again.
        self._loaded = {n: content for n, content in self._loaded.items() if n >= version}

    async def report(self, told: Told, *, withdraw: bool = False) -> None:
        """Tell what is loaded aside, what is served (None: as before), what went wrong.

        `withdraw` tells that nothing is served any more.
        """
        served = told.acknowledged
        content = "" if served is None else self._loaded.get(served, "")
        if not withdraw and served in (None, self._told.acknowledged):
            served, content = self._told.acknowledged, self._told.content
        told = msgspec.structs.replace(told, acknowledged=served, content=content)

        async def once() -> None:
            seat = await self._sit()
            await seat.report(told)
            # If it was lost in this moment the new one, perhaps on its way, does not know of it.
            if seat is not self._seat or seat.lost.is_set():
                raise LeaseLost(f"{self.name} lost its lease while it reported")
            # What is staged is pinned, and a pin ends with its seat.
            brought = msgspec.structs.replace(told, staged=None)
            self._told = msgspec.structs.replace(brought.on(self._told), floor=0)

        await PATIENCE.acall(once, on=(*AGAIN, LeaseLost), clock=self._runtime)


async def _read(
    folder: Folder, path: str, record: Version
) -> tuple[Manifest | None, dict[str, OpenFile]]:
    """Open the files of a version; without a manifest, all that are there."""
    if not record.manifest:
        return None, await foreign.open_version(folder, record.version)
    manifest: Manifest | None = None
    try:
        raw = await folder.read(MANIFEST, MAX_MANIFEST_BYTES)
        if digest(raw) != record.manifest:
            raise Corrupt(f"{path}/{MANIFEST} is not what was published")
        manifest = decode(raw, f"{path}/{MANIFEST}")
        return manifest, await open_files(folder, (entry.name for entry in manifest.files))
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
        raise Corrupt(
            f"{path}: {_lacking(manifest, error.filename)} is not the file that was published: "
            f"{error.strerror}"
        ) from error


def _lacking(manifest: Manifest | None, file: object) -> str:
    """A file that cannot be had, with the tensors that were in it."""
    tensors = [one.name for one in manifest.tensors if one.file == file] if manifest else []
    if not tensors:
        return str(file or "a file")
    return f"{file} (with tensor {several(tensors, 3)})"
