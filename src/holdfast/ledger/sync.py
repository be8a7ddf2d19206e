"""The ledger for code without an event loop.

    with holdfast.ledger.open_sync("sqlite:///run.db") as ledger:
        ledger.txn([absent("/job")], [Put("/job", b"mine")])

One thread with an event loop runs the ordinary ledger; every call here hands its work to
that thread and waits for the answer. May be used from several threads at once.
"""

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, Self, TypeVar

from holdfast.ledger.base import Ledger, Watch
from holdfast.ledger.types import Batch, Compare, Entry, Lease, LeaseInfo, Op, Range, Txn
from holdfast.ledger.url import open as open_async
from holdfast.loopthread import LoopThread

__all__ = ["SyncLedger", "SyncWatch", "open_sync"]

T = TypeVar("T")


def open_sync(url: str) -> "SyncLedger":
    """Open a ledger and return once it is reached. Close it, or use `with`."""
    return SyncLedger(open_async(url))


class SyncLedger:
    """The same calls as `Ledger`, each returning when it is done."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._thread = LoopThread("holdfast-ledger-loop")
        try:
            self.run(ledger.start())
        except BaseException:
            self._thread.stop()
            raise

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something in the ledger's own event loop, and wait for it."""
        return self._thread.run(work)

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self._thread.stopped

    def close(self) -> None:
        """See `Ledger.close`. Closing twice does no harm."""
        if not self._thread.stopped:
            self.run(self._ledger.close())
            self._thread.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self, key: str) -> Entry | None:
        """See `Ledger.get`."""
        return self.run(self._ledger.get(key))

    def range(self, prefix: str, *, revision: int = 0) -> Range:
        """See `Ledger.range`."""
        return self.run(self._ledger.range(prefix, revision=revision))

    def txn(
        self,
        compare: Sequence[Compare] = (),
        then: Sequence[Op] = (),
        otherwise: Sequence[Op] = (),
    ) -> Txn:
        """See `Ledger.txn`."""
        return self.run(self._ledger.txn(compare, then, otherwise))

    def grant(self, ttl_s: float) -> Lease:
        """See `Ledger.grant`."""
        return self.run(self._ledger.grant(ttl_s))

    def keep_alive(self, lease: int) -> float:
        """See `Ledger.keep_alive`."""
        return self.run(self._ledger.keep_alive(lease))

    def revoke(self, lease: int) -> None:
        """See `Ledger.revoke`."""
        self.run(self._ledger.revoke(lease))

    def lease_info(self, lease: int) -> LeaseInfo:
        """See `Ledger.lease_info`."""
        return self.run(self._ledger.lease_info(lease))

    def leases(self) -> tuple[int, ...]:
        """See `Ledger.leases`."""
        return self.run(self._ledger.leases())

    def compact(self, revision: int) -> None:
        """See `Ledger.compact`."""
        self.run(self._ledger.compact(revision))

    def watch(self, prefix: str, *, start: int) -> "SyncWatch":
        """See `Ledger.watch`."""

        async def begin() -> Watch:
            return self._ledger.watch(prefix, start=start)

        return SyncWatch(self, self.run(begin()))


class SyncWatch:
    """An iterator over batches; `next(timeout_s)` waits for a limited time."""

    def __init__(self, ledger: SyncLedger, watch: Watch) -> None:
        self._ledger = ledger
        self._watch = watch
        self._pending: asyncio.Task[Batch] | None = None
        self._turn = asyncio.Lock()  # two threads may ask at once

    def next(self, timeout_s: float | None = None) -> Batch | None:
        """The next batch, or None when nothing changed for `timeout_s`; nothing is missed."""
        return self._ledger.run(self._next(timeout_s))

    async def _next(self, timeout_s: float | None) -> Batch | None:
        # The waiting task outlives a time-out: cancelling it could swallow a batch.
        async with self._turn:
            if self._pending is None:
                self._pending = asyncio.ensure_future(anext(self._watch))
            done, _ = await asyncio.wait((self._pending,), timeout=timeout_s)
            if not done:
                return None
            task, self._pending = self._pending, None
            return task.result()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        try:
            batch = self.next()
        except StopAsyncIteration:
            raise StopIteration from None
        assert batch is not None
        return batch

    def close(self) -> None:
        """Stop watching. Does no harm when the ledger has been closed before."""
        if not self._ledger.closed:
            self._ledger.run(self._close())

    async def _close(self) -> None:
        await self._watch.aclose()  # which ends whoever waits for it
        task = self._pending
        if task is not None:
            await asyncio.wait((task,))
            if not task.cancelled():
                task.exception()  # asked for, so that nobody complains about it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
