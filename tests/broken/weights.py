"""The weights with one rule left out each."""

import functools
from collections.abc import Sequence
from typing import Any

import msgspec

from broken.variant import Make, variant
from holdfast.ledger import Compare, Delete, Op
from holdfast.ledger.records import put
from holdfast.sim.protocols.weights import WeightsProtocol
from holdfast.weights.book import Seat, View
from holdfast.weights.disk import Folder
from holdfast.weights.ledger_book import LedgerBook
from holdfast.weights.ledger_seat import LedgerSeat
from holdfast.weights.manifest import STABLE, Manifest
from holdfast.weights.pin import Pin
from holdfast.weights.policy import Retention
from holdfast.weights.publisher import Publisher
from holdfast.weights.records import Consumer, Swept, Version
from holdfast.weights.subscriber import Subscriber
from holdfast.weights.sweep import Report, Scan, Sweeper
from holdfast.weights.writing import Ticket, read_manifest

__all__ = ["BROKEN"]


class _NoPins(Sweeper):
    """The sweep does not look at pins and acknowledgements."""

    async def sweep(self, reserve_bytes: int = 0, *, dry_run: bool = False) -> Report:
        """Sweep as if there were no consumers, but leave their staging folders."""
        read, self._rubbish = self._book.view, lambda *_: ()  # type: ignore[method-assign]

        async def view() -> View:
            return msgspec.structs.replace(await read(), members=())

        self._book.view = view  # type: ignore[method-assign]
        try:
            return await super().sweep(reserve_bytes, dry_run=dry_run)
        finally:
            self._book.view = read  # type: ignore[method-assign]


class _BlindSweep(LedgerBook):
    """A version is given up without comparing whether somebody has pinned it since."""

    async def forget(self, view: View, number: int) -> bool:
        """Delete the record, whatever it is by now."""
        version, key = view.versions[number], self._keys.version(number)
        swept = Swept(version=number, epoch=version.epoch, content=version.content)
        await self._runtime.ledger.txn([], [Delete(key), put(self._keys.swept(number), swept)])
        return True


class _NoTouch(LedgerSeat):
    """Pinning does not touch the version's record, so a sweep does not notice it."""

    async def _write(
        self, record: Consumer, compare: Sequence[Compare] = (), ops: Sequence[Op] = ()
    ) -> bool:
        del ops
        return await super()._write(record, compare)


class _NoLeaseCheck(Subscriber):
    """After the files were opened nobody asks whether the lease still counts."""

    async def _open(self, seat: Seat, record: Version) -> Pin:
        async def always(_: int) -> bool:
            return True

        seat.holds = always  # type: ignore[assignment, method-assign]
        return await super()._open(seat, record)


class _ForgetsAcknowledged(Subscriber):
    """A seat that replaces another does not bring along what was acknowledged on that one."""

    async def _sit(self) -> Seat:
        self._told = msgspec.structs.replace(self._told, acknowledged=None, content="")
        return await super()._sit()


class _MarkerFirst(Publisher):
    """The folder gets its name and the marker before it is complete."""

    async def _seal(self, folder: Folder, ticket: Ticket, *args: Any) -> tuple[Manifest, str]:
        await self._place(ticket)
        await folder.write(STABLE, [b"early\n"])
        return await super()._seal(folder, ticket, *args)

    async def _show(self, folder: Folder, ticket: Ticket) -> None:
        pass


class _NoDraftSync(Publisher):
    """The names in the draft are not made durable before it gets its own."""

    async def _seal(self, folder: Folder, *args: Any) -> tuple[Manifest, str]:
        folder.sync = _nothing  # type: ignore[method-assign]
        return await super()._seal(folder, *args)


async def _nothing() -> None:
    pass


class _NoParentSync(Publisher):
    """The name of the version is not made durable before it is recorded."""

    async def _show(self, folder: Folder, ticket: Ticket) -> None:
        self._channel.sync_base = _nothing  # type: ignore[method-assign]
        await super()._show(folder, ticket)


class _NoEpoch(LedgerBook):
    """Publishing does not compare the epoch."""

    async def _try_commit(self, key: str, version: Version) -> None:
        assert self._writer is not None
        current = await self._runtime.ledger.get(self._keys.writer)
        assert current is not None
        self._writer.entry = current
        self._writer.record = msgspec.json.decode(current.value, type=type(self._writer.record))
        await super()._try_commit(key, version)


class _KeepsOne(Sweeper):
    """The sweep keeps one version where the policy says two."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._retention = Retention(keep_last=1)


class _KeepsStaging(Sweeper):
    """Staging folders are not swept when the lease of their consumer has ended."""

    def _rubbish(self, scan: Scan, view: View) -> tuple[str, ...]:
        scan.staging = {}
        return super()._rubbish(scan, view)


class _SweepsStaging(Sweeper):
    """Staging folders are swept, whoever lives."""

    def _rubbish(self, scan: Scan, view: View) -> tuple[str, ...]:
        return super()._rubbish(scan, msgspec.structs.replace(view, members=()))


class _BookFirst(Sweeper):
    """The book is read before the disk is listed."""

    async def scan(self) -> Scan:
        """Read the book now, and give that to whoever asks next."""
        early, read = await self._book.view(), self._book.view

        async def view() -> View:
            self._book.view = read  # type: ignore[method-assign]
            return early

        self._book.view = view  # type: ignore[method-assign]
        return await super().scan()


class _MovesLeftovers(Sweeper):
    """What lies beyond the head is moved away by its name."""

    async def _clear_beyond(
        self, scan: Scan, view: View, *, dry_run: bool = False
    ) -> tuple[int, ...]:
        del dry_run
        for one in scan.versions:
            if one not in view.versions and (view.head is None or one > view.head):
                path = self._layout.version(one)
                async with await self._disk.folder(path) as folder:
                    if (await read_manifest(folder, path)).epoch >= view.epoch:
                        continue
                await self._move_away(path)
        return ()


_with = functools.partial(variant, WeightsProtocol)

BROKEN: dict[str, Make] = {
    "": _with(sweeper=_NoPins),
    "compare": _with(book=_BlindSweep),
    "touch": _with(_NoTouch, book=functools.partial(LedgerBook, seat=_NoTouch)),
    "lease": _with(subscriber=_NoLeaseCheck),
    "acknowledge": _with(subscriber=_ForgetsAcknowledged),
    "marker": _with(publisher=_MarkerFirst),
    "epoch": _with(book=_NoEpoch),
    "last": _with(sweeper=_KeepsOne),
    "staging": _with(sweeper=_KeepsStaging),
    "staged": _with(sweeper=_SweepsStaging),
    "sync": _with(publisher=_NoDraftSync),
    "parent": _with(publisher=_NoParentSync),
    "order": _with(sweeper=_BookFirst),
    "leftovers": _with(sweeper=_MovesLeftovers),
}
