"""The ledger's interface: shared truth in one place.

Six parts of Holdfast are written against this file. What every back end keeps:

- **Revisions only grow.** A transaction that changes something makes exactly one.
- **A transaction is all or nothing**, also when a process dies in the middle of it.
- **Reads are linearizable**: what was committed before a read began is seen by it.
- **A range is one moment.** However many pages it takes, it is read at one revision.
- **A watch misses nothing**, is ordered, and delivers each transaction whole; where
  history is no longer kept it says so (`Compacted`) instead of leaving a gap.
- **A lease that ended is never revived**, and the keys bound to it are deleted by an
  ordinary transaction, which watches see.
- **A call that fails says what happened**: `Unavailable` and the other `Retriable`
  errors mean "took no effect"; `UnknownOutcome` means "may have taken effect".

The limits of `types.py` hold for every back end, `memory:` too. A cancelled call may
still take effect, like any call whose answer was lost.

Leases make things fast, not safe: a paused process does not notice that its lease has
ended. What must not happen twice is guarded by a comparison in the transaction itself.
"""

import abc
import asyncio
from collections.abc import AsyncIterator, Generator, Sequence
from typing import Self

from holdfast.errors import Compacted, Conflict, Mistake
from holdfast.ledger.types import (
    Batch,
    Compare,
    Entry,
    Lease,
    LeaseInfo,
    Op,
    Page,
    Range,
    Txn,
    check_key,
    check_ttl,
    check_txn,
)
from holdfast.timeouts import DEFAULTS, Timeouts

PAGE_ENTRIES = 1000
_RESTARTS_MAX = 5


class Watch(abc.ABC):
    """An ordered stream of what changes below a prefix. Close it, or use `async with`.

    Iterating raises `Compacted` when the wanted history is no longer kept (read the range
    again and watch from there). It ends when the watch is closed, and not before; when the
    ledger is closed under it, it raises `Mistake`.
    """

    @abc.abstractmethod
    async def __anext__(self) -> Batch:
        """Wait for the next transaction that changed something below the prefix."""

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Stop watching. Closing twice does no harm."""

    def __aiter__(self) -> Self:
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class Ledger(abc.ABC):
    """Ordered keys, revisions, transactions, leases, watches.

    Open one with `await holdfast.ledger.open(url)` or `async with holdfast.ledger.open(url)`.
    An object belongs to one event loop; `holdfast.ledger.open_sync` is for code without one.
    """

    url: str = ""
    """What leads others on this machine to the same ledger: without the password, with paths
    made absolute. Empty when it was not made by `open`."""

    timeouts: Timeouts = DEFAULTS
    """The times that this ledger keeps, and everything that is built on it: leases, updates,
    elections, rendezvous."""

    # ---- life ----------------------------------------------------------------

    @abc.abstractmethod
    async def start(self) -> None:
        """Reach the back end, or raise one clear error. Starting twice does no harm."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Let go of connections and files. Leases live on until they end by themselves."""

    def __await__(self) -> Generator[object, None, Self]:
        return self.__aenter__().__await__()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ---- reading -------------------------------------------------------------

    async def get(self, key: str) -> Entry | None:
        """Return the entry, or None when there is no such key."""
        check_key(key)
        return await self._get(key)

    async def range(self, prefix: str, *, revision: int = 0) -> Range:
        """Return everything below a prefix, at one revision (the newest, if 0).

        `prefix` is compared letter by letter: end it with '/' to mean a folder.
        """
        for _ in range(_RESTARTS_MAX):
            entries: list[Entry] = []
            try:
                async for page in self.pages(prefix, revision=revision):
                    entries.extend(page.entries)
                return Range(tuple(entries), page.revision)
            except Compacted:
                if revision:
                    raise
                await asyncio.sleep(0)
        raise Conflict(
            f"{prefix} was compacted {_RESTARTS_MAX} times while it was read: compact less often"
        )

    async def pages(
        self, prefix: str, *, revision: int = 0, limit: int = PAGE_ENTRIES
    ) -> AsyncIterator[Page]:
        """Read a prefix page by page, all pages at one revision."""
        check_key(prefix)
        if limit < 1 or revision < 0:
            raise Mistake("a page needs a limit of at least 1 and a revision of at least 0")
        after = ""
        while True:
            page = await self._page(prefix, after, limit, revision)
            yield page
            if not page.more:
                return
            after, revision = page.entries[-1].key, page.revision

    # ---- writing -------------------------------------------------------------

    async def txn(
        self,
        compare: Sequence[Compare] = (),
        then: Sequence[Op] = (),
        otherwise: Sequence[Op] = (),
    ) -> Txn:
        """If every condition holds do `then`, else do `otherwise`; all or nothing.

        Raises `LeaseLost`, and changes nothing, when a Put names a lease that has ended.
        """
        check_txn(compare, then, otherwise)
        return await self._txn(compare, then, otherwise)

    # ---- leases --------------------------------------------------------------

    async def grant(self, ttl_s: float) -> Lease:
        """Begin a lease. The answer has the time to live that really holds."""
        check_ttl(ttl_s)
        return await self._grant(ttl_s)

    @abc.abstractmethod
    async def keep_alive(self, lease: int) -> float:
        """Let the lease begin again; return its full time to live. Raises `LeaseLost`."""

    @abc.abstractmethod
    async def revoke(self, lease: int) -> None:
        """End a lease and delete its keys. Ending one that has ended does no harm."""

    @abc.abstractmethod
    async def lease_info(self, lease: int) -> LeaseInfo:
        """Tell how long a lease still lasts and what is bound to it. Raises `LeaseLost`."""

    @abc.abstractmethod
    async def leases(self) -> tuple[int, ...]:
        """All living leases, in the order of their numbers."""

    # ---- following -----------------------------------------------------------

    def watch(self, prefix: str, *, start: int) -> Watch:
        """Follow what changes below a prefix, from revision `start` on (inclusive).

        To miss nothing, read the range first and watch from `range.revision + 1`
        (`holdfast.ledger.follow` does both).
        """
        check_key(prefix)
        if start < 1:
            raise Mistake(f"a watch starts at revision 1 or later, not at {start}")
        return self._watch(prefix, start)

    @abc.abstractmethod
    async def compact(self, revision: int) -> None:
        """Forget history up to `revision`. Entries that are there stay.

        Watches begin after `revision` at the earliest; ranges can still be read at it.
        """

    async def inspect(self) -> Sequence[str]:
        """Look for damage inside the back end; returns what is wrong, in words."""
        return ()

    # ---- what a back end supplies ---------------------------------------------

    @abc.abstractmethod
    async def _get(self, key: str) -> Entry | None: ...

    @abc.abstractmethod
    async def _page(self, prefix: str, after: str, limit: int, revision: int) -> Page: ...

    @abc.abstractmethod
    async def _txn(
        self, compare: Sequence[Compare], then: Sequence[Op], otherwise: Sequence[Op]
    ) -> Txn: ...

    @abc.abstractmethod
    async def _grant(self, ttl_s: float) -> Lease: ...

    @abc.abstractmethod
    def _watch(self, prefix: str, start: int) -> Watch: ...
