"""The ledger for code without an event loop.

    with holdfast.ledger.open_sync("sqlite:///run.db") as ledger:
        ledger.txn([absent("/job")], [Put("/job", b"mine")])

One thread with an event loop runs the ordinary ledger; every call here hands its work to
that thread and waits for the answer. May be used from several threads at once.
"""

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any, Self, TypeVar

from holdfast.ledger.base import Ledger, Watch
from holdfast.ledger.types import Batch
from holdfast.ledger.url import open as open_async
from holdfast.loopthread import LoopThread, waiting
from holdfast.timeouts import DEFAULTS, Timeouts

__all__ = ["SyncLedger", "SyncWatch", "open_sync"]

T = TypeVar("T")


def open_sync(url: str, *, timeouts: Timeouts = DEFAULTS) -> "SyncLedger":
    """Open a ledger and return once it is reached. Close it, or use `with`."""
    return SyncLedger(open_async(url, timeouts=timeouts))


class SyncLedger:
    """The same calls as `Ledger`, each returning when it is done."""

    def __init__(self, ledger: Ledger) -> None:
        self.twin = ledger
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
            self.run(self.twin.close())
            self._thread.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    get = waiting(Ledger.get)
    range = waiting(Ledger.range)
    txn = waiting(Ledger.txn)
    grant = waiting(Ledger.grant)
    keep_alive = waiting(Ledger.keep_alive)
    revoke = waiting(Ledger.revoke)
    lease_info = waiting(Ledger.lease_info)
    leases = waiting(Ledger.leases)
    compact = waiting(Ledger.compact)

    def watch(self, prefix: str, *, start: int) -> "SyncWatch":
        """See `Ledger.watch`."""

        async def begin() -> Watch:
            return self.twin.watch(prefix, start=start)

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
