"""Electing a leader, with a token that fences off its predecessors.

    <prefix>/leader   Leader(holder, token), bound to the holder's lease
    <prefix>/token    Token(last), the last token that was ever given; never deleted

Whoever writes the leader's record in one transaction with the next token leads. Promises:

- tokens only grow, and no two leaderships have the same one;
- an effect whose transaction carries `Leadership.guard` happens only while that
  leadership's record is there: a leader that was paused beyond its lease changes nothing;
- when the leader dies, a candidate leads within the lease's time.

A candidate recognises its own record by the *lease* on it, so a lost answer ("did my
transaction commit?") and a restart under the same name are never confused.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import msgspec

from holdfast.errors import Compacted, LeaseLost, Retriable, UnknownOutcome
from holdfast.ledger.leases import Keeper
from holdfast.ledger.records import Record, Stored, decode, put
from holdfast.ledger.runtime import Runtime
from holdfast.ledger.types import (
    Batch,
    Compare,
    Delete,
    Entry,
    Op,
    absent,
    check_key,
    same_life,
    unchanged,
)
from holdfast.retry import Pauses, Policy

__all__ = ["Acquire", "Election", "Held", "Leader", "Leadership", "Token", "Wait", "decide"]

# A candidate must not sleep through the vacancy that it waits for.
_PACE = Policy(base_s=0.15, factor=1.0, jitter=2 / 3)


class Leader(Record, frozen=True, kw_only=True):
    """Who leads, and with which token."""

    holder: str
    token: int


class Token(Record, frozen=True, kw_only=True):
    """The last token that was given."""

    last: int


class Held(msgspec.Struct, frozen=True):
    """We lead."""

    entry: Entry
    token: int


class Acquire(msgspec.Struct, frozen=True):
    """Nobody leads: try this transaction."""

    compare: tuple[Compare, ...]
    then: tuple[Op, ...]


class Wait(msgspec.Struct, frozen=True):
    """Somebody else leads: wait until their record goes."""

    holder: str


def decide(
    leader: Stored[Leader] | None, token: Stored[Token] | None, prefix: str, name: str, lease: int
) -> Held | Acquire | Wait:
    """Decide what a candidate does. Pure."""
    if leader is not None:
        if leader.entry.lease == lease:
            return Held(leader.entry, leader.record.token)
        return Wait(leader.record.holder)
    last = token.record.last if token else 0
    leader_key, token_key = f"{prefix}/leader", f"{prefix}/token"
    return Acquire(
        (absent(leader_key), unchanged(token.entry) if token else absent(token_key)),
        (
            put(leader_key, Leader(holder=name, token=last + 1), lease=lease),
            put(token_key, Token(last=last + 1), over=token.entry if token else None),
        ),
    )


class Leadership:
    """One term of leading. Effects go through transactions that carry `guard`."""

    def __init__(self, token: int, entry: Entry, keeper: Keeper) -> None:
        self.token = token
        self.entry = entry
        self.guard = same_life(entry)
        self._keeper = keeper

    @property
    def lost(self) -> asyncio.Event:
        """Set when this leadership has ended, as far as we can tell."""
        return self._keeper.lost

    def believes(self) -> bool:
        """Whether we should still be leading, by our own clock."""
        return self._keeper.believes()


class Election:
    """A candidate. `async with election.lead() as leadership` waits until it is elected."""

    def __init__(
        self, runtime: Runtime, prefix: str, name: str, *, ttl_s: float | None = None
    ) -> None:
        """`ttl_s` is the lease of a leader; without it, the ledger's `ledger_lease_s`."""
        check_key(prefix)
        self._runtime = runtime
        self._prefix = prefix
        self._name = name
        self._ttl_s = ttl_s

    @contextlib.asynccontextmanager
    async def lead(self) -> AsyncIterator[Leadership]:
        """Wait to be elected; leaving the context resigns."""
        while True:
            async with Keeper(self._runtime, self._ttl_s) as keeper:
                held = await self._campaign(keeper)
                if held is None:
                    continue  # the lease ended meanwhile: begin with a new one
                try:
                    yield Leadership(held.token, held.entry, keeper)
                finally:
                    await self._resign(held)
                return

    async def _campaign(self, keeper: Keeper) -> Held | None:
        """Run until elected, or until the lease has ended (None)."""
        pauses = Pauses(self._runtime, _PACE)
        while keeper.believes():
            try:
                view = await self._runtime.ledger.range(self._prefix + "/")
                verdict = self._decide(view.entries, keeper.id)
                if isinstance(verdict, Held):
                    return verdict
                if isinstance(verdict, Acquire):
                    # Whatever the answer is, the next reading tells who leads.
                    await self._runtime.ledger.txn(verdict.compare, verdict.then)
                else:
                    await self._until_vacant(view.revision + 1, keeper)
            except LeaseLost:
                return None
            except (Retriable, UnknownOutcome, Compacted) as error:
                await pauses.wait(error)
        return None

    def _decide(self, entries: Sequence[Entry], lease: int) -> Held | Acquire | Wait:
        leader: Stored[Leader] | None = None
        token: Stored[Token] | None = None
        for entry in entries:
            if entry.key == f"{self._prefix}/leader":
                leader = Stored(entry, decode(Leader, entry))
            elif entry.key == f"{self._prefix}/token":
                token = Stored(entry, decode(Token, entry))
        return decide(leader, token, self._prefix, self._name, lease)

    async def _until_vacant(self, start: int, keeper: Keeper) -> None:
        """Wait until the leader's record is deleted or our own lease has ended."""
        async with self._runtime.ledger.watch(f"{self._prefix}/leader", start=start) as watch:
            vacant = self._runtime.spawn(_deleted(watch), name="vacant")
            ended = self._runtime.spawn(keeper.lost.wait(), name="ended")
            try:
                await asyncio.wait((vacant, ended), return_when=asyncio.FIRST_COMPLETED)
                if vacant.done():
                    vacant.result()
            finally:
                vacant.cancel()
                ended.cancel()

    async def _resign(self, held: Held) -> None:
        """Delete our own record, never a successor's."""
        with contextlib.suppress(Retriable, UnknownOutcome):  # it goes with its lease anyway
            await self._runtime.ledger.txn(
                [same_life(held.entry)], [Delete(f"{self._prefix}/leader")]
            )


async def _deleted(watch: AsyncIterator[Batch]) -> None:
    async for batch in watch:
        if any(event.entry is None for event in batch.events):
            return
