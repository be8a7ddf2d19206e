"""`memory:`: a ledger inside one process, for tests and for trying things out.

`memory:` is a new one each time, `memory:NAME` is shared by everybody in the process
who asks for that name, also from other threads and event loops. Nothing is kept when the
process ends. Leases end on time even when nobody calls: a timer runs per ledger object.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from holdfast.errors import Compacted, Mistake
from holdfast.ledger.base import Ledger, Watch
from holdfast.ledger.mvcc import Store
from holdfast.ledger.types import Batch, Compare, Entry, Lease, LeaseInfo, Op, Page, Txn

__all__ = ["Hub", "MemoryLedger", "shared_hub"]

T = TypeVar("T")
_KEEP_UP = 1000
_hubs: dict[str, "Hub"] = {}


class Hub:
    """One store, and everybody who waits for it to change."""

    def __init__(self) -> None:
        self.store = Store()
        self.lock = threading.Lock()
        self.bells: set[_Bell] = set()
        """Each is rung whenever something below its prefix changes."""

    def ring(self, since: int) -> None:
        """Wake those whose prefix changed after revision `since`."""
        if self.store.revision == since or not self.bells:
            return
        try:
            batches = self.store.changes("/", since + 1)
        except Compacted:  # more happened at once than history holds: everybody must look
            self.ring_all()
            return
        changed = [event.key for batch in batches for event in batch.events]
        # Whoever waits for something rare looks now and then, and so keeps up with history.
        often = self.store.revision // _KEEP_UP != since // _KEEP_UP
        for bell in tuple(self.bells):
            if often or any(key.startswith(bell.prefix) for key in changed):
                bell.ring()

    def ring_all(self) -> None:
        """Wake everybody."""
        for bell in tuple(self.bells):
            bell.ring()


def shared_hub(name: str) -> Hub:
    """The hub that everybody in this process shares under `name`."""
    return _hubs.setdefault(name, Hub())


class _Bell:
    """Wakes a watch, from whichever thread the change was made in."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def ring(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self) -> None:
        await self._event.wait()
        self._event.clear()


class MemoryLedger(Ledger):
    """A view of a hub that belongs to one event loop."""

    def __init__(self, hub: Hub | None = None) -> None:
        self._hub = hub or Hub()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    async def start(self) -> None:
        """Nothing has to be reached."""

    async def close(self) -> None:
        """End the timer; the store lives on while somebody holds the hub."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._hub.ring_all()  # our own watches look, and find us closed

    def _do(self, act: Callable[[Store, float], T]) -> T:
        """Run one step on the store: first end the leases whose time is up."""
        if self._closed:
            raise Mistake("this ledger object has been closed: open another one")
        with self._hub.lock:
            now = time.monotonic()
            before = self._hub.store.revision
            self._hub.store.expire(now)
            try:
                return act(self._hub.store, now)
            finally:
                self._hub.ring(before)

    def expire_later(self) -> None:
        """Wake up when the next lease ends, so that watches hear of it in time."""
        deadline = self._do(lambda store, _: store.next_deadline())
        if self._timer is not None:
            self._timer.cancel()
        if deadline is not None:
            delay_s = max(0.0, deadline - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        if not self._closed:
            self.expire_later()

    async def _get(self, key: str) -> Entry | None:
        return self._do(lambda store, _: store.get(key))

    async def _page(self, prefix: str, after: str, limit: int, revision: int) -> Page:
        return self._do(lambda store, _: store.page(prefix, after, limit, revision))

    async def _txn(
        self, compare: Sequence[Compare], then: Sequence[Op], otherwise: Sequence[Op]
    ) -> Txn:
        return self._do(lambda store, _: store.txn(compare, then, otherwise))

    async def _grant(self, ttl_s: float) -> Lease:
        lease = Lease(self._do(lambda store, now: store.grant(ttl_s, now)), ttl_s)
        self.expire_later()
        return lease

    async def keep_alive(self, lease: int) -> float:
        """See `Ledger.keep_alive`."""
        return self._do(lambda store, now: store.keep_alive(lease, now))

    async def revoke(self, lease: int) -> None:
        """See `Ledger.revoke`."""
        self._do(lambda store, _: store.revoke(lease))

    async def lease_info(self, lease: int) -> LeaseInfo:
        """See `Ledger.lease_info`."""
        return self._do(lambda store, now: store.lease_info(lease, now))

    async def leases(self) -> tuple[int, ...]:
        """See `Ledger.leases`."""
        return self._do(lambda store, _: store.leases())

    async def compact(self, revision: int) -> None:
        """See `Ledger.compact`."""
        self._do(lambda store, _: store.compact(revision))

    def _watch(self, prefix: str, start: int) -> Watch:
        return _MemoryWatch(self, self._hub, prefix, start)

    def changes(self, prefix: str, start: int) -> tuple[list[Batch], int]:
        """What a watch has to deliver now, and where it goes on."""
        return self._do(
            lambda store, _: (store.changes(prefix, start), max(start, store.revision + 1))
        )


class _MemoryWatch(Watch):
    def __init__(self, ledger: MemoryLedger, hub: Hub, prefix: str, start: int) -> None:
        self._ledger = ledger
        self._hub = hub
        self._prefix = prefix
        self._next = start
        self._ready: list[Batch] = []
        self._bell = _Bell(prefix)
        self._closed = False
        hub.bells.add(self._bell)

    async def __anext__(self) -> Batch:
        while not self._ready:
            if self._closed:
                raise StopAsyncIteration
            batches, self._next = self._ledger.changes(self._prefix, self._next)
            self._ready = batches[::-1]
            if not batches:
                # Whoever granted a lease may be gone when it ends.
                self._ledger.expire_later()
                await self._bell.wait()
        return self._ready.pop()

    async def aclose(self) -> None:
        self._closed = True
        self._hub.bells.discard(self._bell)
        self._bell.ring()
