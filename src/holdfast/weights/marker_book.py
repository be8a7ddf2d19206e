"""The book without a ledger: marker files on a shared file system, and nothing else.

For people who only have a shared file system, and perhaps a trainer that is not ours. Which
files there are is told in `markers.py`, how a consumer lives and pins in `marker_seat.py`.

What holds as with a ledger:

- A version that is seen has its STABLE, so it is complete; what is loaded of ours is verified
  against its manifest.
- A version is never deleted under a live consumer that pins it, serves it or waits for it,
  however long a sweep is stopped in the middle: it first writes `swept/N`, from when on nobody
  can pin N, and only then looks who needs it. `swept/N` is never taken back: a version that
  was pinned at that very moment stays until it is let go, and is not pinned by others.
- A consumer whose heartbeat stopped for its lease holds nothing, and finds out. Numbers are
  not used again (`HEAD`, `swept/`).
- Epochs are unique: a file with the epoch's number is made, which only one can do.

What is weaker:

- **One live publisher.** STABLE is the commit, and a file system cannot compare an epoch while
  it is written: a publisher that was stopped after it had looked, and replaced, can still show
  a version when it wakes up. It is told (`Fenced`) right after. Fences from outside (a job's
  epoch) cannot be had at all.
- **The manifest vouches for itself.** Its hash is computed from the file, so a folder that was
  replaced whole, manifest and all, is not noticed.
- **A view is not one moment.** Files are read one after the other; what matters is read again
  in the order that makes it safe.
- **Time.** Leases are counted by the file system's clock. If that goes backwards, or the times
  of files do (a server that lost power), a consumer can be taken for dead without its learning
  of it. Where clients stamp the times of files by their own clocks, these must agree to much
  less than a lease.
- **Names must be seen at once.** What one host has made or renamed must be there for another
  that looks afterwards: so it is on local disks, CephFS, Lustre and GPFS; on NFS only without
  caches of names and attributes (`lookupcache=none,noac`).
- **News come by looking**, every `marker_poll_s`.
- A consumer that is not ours and only writes LOADED_STEP cannot pin: it is trusted to load
  nothing below its number, and counts as dead `foreign_lease_s` after it last wrote.
- A version of a trainer that is not ours has no manifest: only its structure is checked (see
  `foreign.py`). It is not deleted unless `sweep_foreign` says so (`holdfast weights sweep
  --foreign`), but its trainer may delete it at any time, and may use its number again. What
  was swept is not loaded again, even if its trainer does.
- There is no fleet target: a fleet needs a ledger.

One folder has one book: use it either with a ledger or without.
"""

import contextlib
from collections.abc import AsyncGenerator

import msgspec

from holdfast.errors import Conflict, Corrupt, Fenced, Mistake, NoRoom, Unavailable, UnknownOutcome
from holdfast.ledger import Runtime
from holdfast.retry import Policy
from holdfast.timeouts import DEFAULTS
from holdfast.weights.book import Book, Seat, View
from holdfast.weights.disk import Disk
from holdfast.weights.layout import Layout
from holdfast.weights.marker_seat import MarkerSeat, bury
from holdfast.weights.markers import HEAD, Markers, life, telling
from holdfast.weights.policy import needed
from holdfast.weights.records import Consumer, Head, Mark, Swept, Version, Writer
from holdfast.weights.trouble import FULL

__all__ = ["MarkerBook"]

CLAIMING = Policy(attempts=40, base_s=0.005, max_s=0.2, jitter=1.0)
"""Jitter, so that several who take over at once get out of each other's way."""
RESERVE = "reserve"
RESERVE_BYTES = 64 << 10
"""Room that is kept for giving up a version when the disk is full."""


class MarkerBook(Book):
    """A channel's book in marker files."""

    def __init__(
        self,
        runtime: Runtime,
        disk: Disk,
        layout: Layout,
        name: str,
        *,
        sweep_foreign: bool = False,
        reading: bool = False,
    ) -> None:
        self._runtime = runtime
        self._disk = disk
        self._layout = layout
        self._name = name
        self._sweep_foreign = sweep_foreign
        self._markers = Markers(disk, layout, reading=reading)
        self.epoch = 0

    # ---- publishing ----------------------------------------------------------

    async def open_writer(self, *, again: bool = False) -> None:
        """See `Book.open_writer`: without a ledger, looking and taking are two steps."""
        if again:
            await self.check_writer()
        with telling(f"{self._name} cannot take over publishing"):
            self.epoch = await CLAIMING.acall(self._claim, on=Conflict, clock=self._runtime)
            head, recorded = await self._markers.head(), await self._markers.recorded()
            if head is not None and (recorded is None or recorded.version < head):
                # A publisher died between the marker and this file.
                await self._record_head(head)
        await self._tidy()

    async def _claim(self) -> int:
        """Make the file of an epoch that nobody had, and that is the newest."""
        nonce = f"{self._runtime.random.getrandbits(64):016x}"
        found = await self._markers.versions()
        used = [one.version.epoch for one in found.values()]
        epoch = max([0, *used, *await self._markers.listed(self._layout.writers)]) + 1
        with contextlib.suppress(FileExistsError):
            async with await self._disk.folder(self._layout.writers) as folder:
                raw = msgspec.json.encode(Writer(epoch=epoch, name=self._name, nonce=nonce))
                await folder.write(str(epoch), [raw])
                await folder.sync()
            # Somebody who was slow may get a number that was used and removed before.
            if epoch == await self._newest_epoch():
                return epoch
        raise Conflict(f"others kept taking over publishing from {self._name}: are there many?")

    async def _newest_epoch(self) -> int:
        return max(await self._markers.listed(self._layout.writers), default=0)

    async def check_writer(self) -> None:
        """See `Book.check_writer`."""
        if self.epoch == 0:
            raise Mistake("this publisher is not open: use `async with`")
        with telling(f"{self._name} cannot see whether it may still publish"):
            newest = await self._newest_epoch()
        if newest != self.epoch:
            raise Fenced(
                f"{await self._who(newest)} has taken over publishing from {self._name}, "
                f"epoch {self.epoch}: stop",
                epoch=self.epoch,
            )

    async def _who(self, epoch: int) -> str:
        """Who has an epoch, for people."""
        with contextlib.suppress(OSError, Corrupt):
            writer = await self._markers.writer(epoch)
            return f"{writer.name}, epoch {epoch}," if writer else "somebody"
        return "somebody"

    async def commit(self, version: Version) -> None:
        """See `Book.commit`. The marker is there already: this finds out whether it counts."""
        try:
            await self._commit(version)
        except (OSError, Unavailable, NoRoom) as error:
            raise UnknownOutcome(
                f"version {version.version} can be seen, but not all of it was recorded "
                f"({error}): publish it again, with the same contents",
                version=version.version,
            ) from error
        await self._tidy()

    async def _commit(self, version: Version) -> None:
        await self.check_writer()
        recorded = await self._markers.recorded()
        if recorded is not None and recorded.version > version.version:
            raise Mistake(
                f"version {version.version} is not the next one: {recorded.version} is newer",
                version=version.version,
            )
        found = await self._markers.find(version.version)
        if found is None or found.version.manifest != version.manifest:
            raise Fenced(
                f"{self._layout.version(version.version)} is no longer what {self._name} "
                "has put there: are two trainers running?",
                epoch=self.epoch,
                version=version.version,
            )
        await self._record_head(version.version, version.content)

    async def _record_head(self, number: int, content: str = "") -> None:
        async with await self._disk.folder(self._layout.hidden) as folder:
            await folder.put(HEAD, msgspec.json.encode(Head(version=number, content=content)))

    async def _tidy(self) -> None:
        """Remove what is left of dead consumers, old epochs and versions that are gone."""
        # What cannot be removed now is found again by the next one who tidies up.
        with contextlib.suppress(OSError):
            now_s, members = await self._markers.members()
            for member in members:
                if member.until_s <= now_s and life(member.id) is not None:
                    await bury(self._markers, member.id)
            async with await self._disk.folder(self._layout.writers) as folder:
                for epoch in await self._markers.listed(self._layout.writers):
                    if epoch < self.epoch:
                        await folder.unlink(str(epoch))
            async with await self._disk.folder(self._layout.marks) as folder:
                for number in await self._markers.listed(self._layout.marks):
                    if await self._markers.find(number) is None:
                        await folder.unlink(str(number))
            async with await self._disk.folder(self._layout.hidden) as folder:
                if not any(item.name == RESERVE for item in await folder.items()):
                    await folder.write(RESERVE, [bytes(RESERVE_BYTES)])

    # ---- reading -------------------------------------------------------------

    async def view(self) -> View:
        """See `Book.view`."""
        with telling(f"{self._layout.base} cannot be read"):
            epoch = await self._newest_epoch()
            recorded = await self._markers.recorded()
            found = await self._markers.versions()
            now_s, members = await self._markers.members()
        head = max([*found, *([recorded.version] if recorded else [])], default=None)
        return View(
            head,
            epoch,
            {number: one.version for number, one in found.items()},
            members,
            {number: one.problem for number, one in found.items() if one.problem},
            now_s=now_s,
        )

    async def lookup(self, number: int) -> Version | Swept | None:
        """See `Book.lookup`."""
        with telling(f"version {number} cannot be looked for"):
            # In this order: what is given up between the two is found by the second.
            found = await self._markers.find(number)
            swept = await self._markers.swept(number)
        return swept or (found.version if found else None)

    async def changes(self) -> AsyncGenerator[View, None]:
        """See `Book.changes`."""
        last: object = None
        while True:
            view = await self.view()
            living = [(one.id, one.record) for one in view.members if one.until_s > view.now_s]
            now = (view.head, view.epoch, view.versions, living, view.marks)
            if now != last:
                last = now
                yield view
            await self._pause()

    async def heads(self) -> AsyncGenerator[int | None, None]:
        """See `Book.heads`."""
        while True:
            with telling(f"{self._layout.base} cannot be read"):
                head = await self._markers.head()
            # Also when it is the same: it may have been written anew while somebody looked.
            yield head
            await self._pause()

    async def _pause(self) -> None:
        # Jitter, so that a fleet does not look all at once.
        jitter = 0.75 + 0.5 * self._runtime.random.random()
        await self._runtime.sleep(DEFAULTS.marker_poll_s * jitter)

    # ---- giving up -----------------------------------------------------------

    async def forget(self, view: View, number: int) -> bool:
        """See `Book.forget`."""
        if not self.may_forget(view, number):
            return False
        assert view.head is not None
        version = view.versions[number]
        with telling(f"version {number} cannot be given up"):
            if await self._markers.swept(number) is None:
                # Looking first spares a version that somebody needs since the view.
                if await self._needed(number, view.head):
                    return False
                await self._put_swept(
                    Swept(version=number, epoch=version.epoch, content=version.content)
                )
            # Whoever pins it after this line finds `swept`; whoever did before is found here.
            if await self._needed(number, view.head):
                return False
            async with await self._disk.folder(self._layout.marks) as folder:
                await folder.unlink(str(number))
        return True

    def may_forget(self, view: View, number: int) -> bool:
        """See `Book.may_forget`: the newest stays, and what is not ours unless we are told."""
        ours = view.versions[number].manifest or self._sweep_foreign
        return bool(ours) and view.head is not None and number < view.head

    async def _put_swept(self, swept: Swept) -> None:
        """Record it, also on a full disk: deleting is how room is made there."""
        raw = msgspec.json.encode(swept)
        async with await self._disk.folder(self._layout.swept) as folder:
            try:
                await folder.put(str(swept.version), raw)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                async with await self._disk.folder(self._layout.hidden) as hidden:
                    await hidden.unlink(RESERVE)
                await folder.put(str(swept.version), raw)

    async def _needed(self, number: int, head: int) -> bool:
        now_s, members = await self._markers.members()
        now = View(head, 0, {}, members, {}, now_s=now_s)
        return number in needed((number, head), now.pins(), now.acknowledgements(), now_s)

    async def mark(self, number: int, reason: str) -> None:
        """See `Book.mark`."""
        with telling(f"version {number} cannot be marked"):
            if await self._markers.find(number) is not None:
                async with await self._disk.folder(self._layout.marks) as folder:
                    await folder.put(str(number), msgspec.json.encode(Mark(reason=reason[:2000])))

    # ---- consumers -----------------------------------------------------------

    def seat(self, consumer: Consumer, lease_s: float) -> Seat:
        """See `Book.seat`."""
        return MarkerSeat(self._runtime, self._markers, consumer, lease_s)
