"""One life of a consumer in the ledger: one lease, one record, written only here.

Every write compares what was written last, so a call that arrives late changes nothing, and
goes on while the lease lasts. When it cannot be settled what the ledger holds, the life is
ended: the lease takes everything with it.
"""

import asyncio
import contextlib
from collections.abc import Sequence

import msgspec

from holdfast.errors import (
    Conflict,
    Corrupt,
    Gone,
    HoldfastError,
    LeaseLost,
    NotFound,
    Retriable,
    UnknownOutcome,
)
from holdfast.ledger import (
    Compare,
    Entry,
    Get,
    Keeper,
    Op,
    Put,
    Runtime,
    absent,
    same_life,
    unchanged,
)
from holdfast.ledger.records import decode, load, put
from holdfast.retry import AGAIN, MAX_S, Policy
from holdfast.weights.book import Seat
from holdfast.weights.records import Consumer, Head, Keys, Mark, Told, Version

__all__ = ["PATIENCE", "LedgerSeat", "life"]

PATIENCE = Policy(attempts=40, base_s=0.02, max_s=1.0, deadline_s=MAX_S)
"""A call to the ledger has its own limit, so the number of attempts bounds these too."""


def life(key: str) -> str:
    """What names one life of a consumer outside the ledger."""
    name, _, lease = key.rpartition("/")
    return f"{name.rpartition('/')[2]}-{lease}"


class LedgerSeat(Seat):
    """One life of a consumer: one lease, one record, written only here."""

    def __init__(self, runtime: Runtime, keys: Keys, record: Consumer, lease_s: float) -> None:
        self._runtime = runtime
        self._keys = keys
        self._record = record
        self._keeper = Keeper(runtime, lease_s)
        self._key = ""
        self._entry: Entry | None = None
        self._turn = asyncio.Lock()
        self.id = ""
        self.lost = self._keeper.lost

    def believes(self) -> bool:
        """See `Seat.believes`."""
        return self._keeper.believes()

    async def join(self) -> None:
        """See `Seat.join`."""
        await self._keeper.__aenter__()
        self._key = self._keys.consumer(self._record.name, self._keeper.id)
        self.id = life(self._key)
        try:
            await PATIENCE.acall(self._register, on=AGAIN, clock=self._runtime)
        except BaseException:
            await self.leave()
            raise

    async def _register(self) -> None:
        if not self._keeper.believes():
            raise LeaseLost(f"the lease of {self._record.name} ended before it had joined")
        head = await self._runtime.ledger.get(self._keys.head)
        floor = decode(Head, head).version if head else 0
        record = msgspec.structs.replace(self._record, floor=floor)
        compare, touch = await self._keep(self._record.acknowledged)
        txn = await self._runtime.ledger.txn(
            [
                absent(self._key),
                unchanged(head) if head else absent(self._keys.head),
                *compare,
            ],
            [*touch, put(self._key, record, lease=self._keeper.id), Get(self._key)],
            [Get(self._key)],
        )
        entry = txn.results[-1]
        if entry is None:
            raise Conflict(f"{self._keys.head} kept changing")
        # Registered just now, or by a call whose answer was lost.
        self._entry, self._record = entry, decode(Consumer, entry)

    async def _keep(self, number: int | None) -> tuple[list[Compare], list[Op]]:
        """What keeps a version that is served without a pin, if it is still there.

        Whoever lost a seat may still serve what it has in memory; if nobody has given up the
        files, nobody does from here on.
        """
        if number is None or number in self._record.pins:
            return [], []
        key = self._keys.version(number)
        entry = await self._runtime.ledger.get(key)
        if entry is None:
            return [], []
        return [same_life(entry)], [Put(key, entry.value)]

    async def leave(self) -> None:
        """See `Seat.leave`."""
        await self._keeper.__aexit__()

    async def pin(self, number: int) -> Version:
        """See `Seat.pin`."""
        async with self._turn:
            key = self._keys.version(number)
            entry = await self._runtime.ledger.get(key)
            if entry is None:
                raise await self._missing(number)
            if mark := await load(self._runtime.ledger, self._keys.mark(number), Mark):
                raise Corrupt(f"version {number}: {mark.record.reason}", version=number)
            record = msgspec.structs.replace(self._record, pins=(*self._record.pins, number))
            touch = Put(key, entry.value)
            try:
                there = await self._write(record, [same_life(entry)], [touch])
            except asyncio.CancelledError:
                # It may have taken effect, and nobody else would take it back.
                with contextlib.suppress(HoldfastError):
                    await self._write(self._record)
                raise
            if not there:
                raise await self._missing(number)
            return decode(Version, entry)

    async def _missing(self, number: int) -> Exception:
        """Why there is no version with this number."""
        head = await load(self._runtime.ledger, self._keys.head, Head)
        newest = f"the newest is {head.record.version}" if head else "none was published yet"
        if await self._runtime.ledger.get(self._keys.swept(number)) is not None:
            return Gone(f"version {number} was deleted: {newest}", version=number)
        return NotFound(f"version {number} was not published: {newest}", version=number)

    async def holds(self, number: int) -> bool:
        """See `Seat.holds`."""
        entry = await self._runtime.ledger.get(self._key)
        return entry is not None and number in decode(Consumer, entry).pins

    async def unpin(self, number: int) -> None:
        """See `Seat.unpin`."""
        async with self._turn:
            pins = list(self._record.pins)
            if number in pins:
                pins.remove(number)
                await self._write(msgspec.structs.replace(self._record, pins=tuple(pins)))

    async def report(self, told: Told) -> None:
        """See `Seat.report`."""
        async with self._turn:
            record = told.on(self._record)
            changed = told.acknowledged != self._record.acknowledged
            new = told.acknowledged if changed else None
            while not await self._write(record, *await self._keep(new)):
                pass  # it was given up in this moment: the next look finds it gone

    async def _write(
        self, record: Consumer, compare: Sequence[Compare] = (), ops: Sequence[Op] = ()
    ) -> bool:
        """Make the ledger hold `record`; False when a condition does not hold.

        Goes on while the lease lasts: an answer that was lost is looked for. When it cannot
        be settled the life is ended, because what the ledger holds is then unknown.
        """

        async def once() -> bool:
            assert self._entry is not None
            if not self._keeper.believes():
                raise LeaseLost("it has ended by our own clock")
            txn = await self._runtime.ledger.txn(
                [unchanged(self._entry), *compare],
                [put(self._key, record, lease=self._keeper.id), *ops, Get(self._key)],
                [Get(self._key)],
            )
            entry = txn.results[-1]
            if entry is None:
                raise LeaseLost("its record is gone")
            same = entry.mod_revision == self._entry.mod_revision
            self._entry = entry
            if txn.succeeded or decode(Consumer, entry) == record:
                self._record = record
                return True
            if same:
                return False
            raise Conflict("an earlier call has arrived late")

        try:
            return await PATIENCE.acall(once, on=AGAIN, clock=self._runtime)
        except (LeaseLost, Retriable, UnknownOutcome) as error:
            self.lost.set()
            raise LeaseLost(
                f"{self._record.name} lost its lease: what it had pinned may be deleted; pin again"
            ) from error
