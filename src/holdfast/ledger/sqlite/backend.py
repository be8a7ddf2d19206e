"""The embedded ledger for asyncio.

Reads, and writes when nobody else is writing, run right where they are called: they take
tens of microseconds, less than handing them to a thread would. When another process holds
the lock, or with `sync=full` (where every commit waits for the disk), writes go to one
thread, which waits and then commits everything that has gathered meanwhile at once.
"""

import asyncio
import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import apsw

from holdfast.errors import HoldfastError, Mistake, Retriable, Unavailable, UnknownOutcome
from holdfast.ledger.base import Ledger, Watch
from holdfast.ledger.sqlite.bells import Bell, bell_folder
from holdfast.ledger.sqlite.engine import Engine
from holdfast.ledger.sqlite.write import Write
from holdfast.ledger.types import Batch, Compare, Entry, Lease, LeaseInfo, Op, Page, Txn
from holdfast.timeouts import DEFAULTS, Timeouts

__all__ = ["SqliteLedger"]

T = TypeVar("T")

_GROUP_MAX = 256
_BREATH_S = 0.002
"""How long calls may follow each other without a pause: no wait, and no setting."""
_FOLD_PAGES = 4000
_FOLD_COMMITS_MIN = 16
"""Between two tries: a slow reader may be in the way."""

_Job = tuple[Callable[[Write], Any], "asyncio.Future[Any] | None"]
_FOLD: _Job = (lambda _: None, None)
"""Stands in the queue for "fold the log into the file"."""


class SqliteLedger(Ledger):
    """One process's connection to the file."""

    def __init__(
        self, path: Path, *, full_sync: bool = False, timeouts: Timeouts = DEFAULTS
    ) -> None:
        self.path = path.absolute()  # the process may change its folder
        self._full_sync = full_sync
        self.timeouts = timeouts
        self._engine: Engine | None = None
        self._pid = 0

    async def start(self) -> None:
        """Open the file, making it if it is new."""
        if self._engine is not None:
            return
        self.timeouts.check()
        self._engine = Engine(self.path, full_sync=self._full_sync, timeouts=self.timeouts)
        self._pid = os.getpid()
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._queued = 0
        self._breath = 0.0
        self._commits = 0
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._bells: dict[str, Bell] = {}
        self._thread = threading.Thread(target=self._work, name="holdfast-ledger", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        """Finish what is under way and close the file."""
        if self._engine is None:
            return
        if self._pid != os.getpid():
            return  # forked: the file, the bells and the thread are the parent's
        engine, self._engine = self._engine, None
        for bell in self._bells.values():
            for event in bell.listeners:
                event.set()
            bell.close()
        self._bells.clear()
        self._jobs.put(None)
        await self._loop.run_in_executor(None, self._thread.join)
        engine.close()

    def _opened(self) -> Engine:
        if self._engine is None:
            raise Mistake("this ledger object is not open: use 'async with ledger.open(url)'")
        if self._pid != os.getpid():
            raise Mistake(
                "this ledger was opened before a fork: open it after forking, or use spawn"
            )
        return self._engine

    # ---- writing -------------------------------------------------------------

    async def _write(self, job: Callable[[Write], T]) -> T:
        await self._breathe()
        engine = self._opened()
        if not self._full_sync and not self._queued and self._lock.acquire(blocking=False):
            try:
                result = engine.write([job], wait=False)[0]
            except apsw.BusyError:
                pass  # another process is writing: let the thread wait for it
            else:
                self._count(1)
                if isinstance(result, Exception):
                    raise result
                return result
            finally:
                self._lock.release()
        future: asyncio.Future[T] = self._loop.create_future()
        self._queued += 1
        self._jobs.put((job, future))
        return await future

    async def _breathe(self) -> None:
        """Let the other tasks run now and then: calls here need not wait for anything, and
        whoever makes one after the other would keep the loop from renewing leases."""
        now = time.monotonic()
        if now - self._breath > _BREATH_S:
            await asyncio.sleep(0)
            self._breath = time.monotonic()

    def _count(self, commits: int) -> None:
        self._commits += commits
        if self._commits >= _FOLD_COMMITS_MIN and self._opened().log_pages >= _FOLD_PAGES:
            self._commits = 0
            self._jobs.put(_FOLD)

    def _work(self) -> None:
        """The thread: gather what is waiting, commit it at once, hand out the answers."""
        while (first := self._jobs.get()) is not None:
            group = [] if first is _FOLD else [first]
            fold = first is _FOLD
            while len(group) < _GROUP_MAX and not self._jobs.empty():
                job = self._jobs.get()
                if job is None:
                    self._jobs.put(None)
                    break
                if job is _FOLD:
                    fold = True
                else:
                    group.append(job)
            if group:
                self._hand_out(group, self._commit(group))
            if fold:
                self._fold()

    def _commit(self, group: list[_Job]) -> list[Any]:
        engine = self._engine
        if engine is None:
            return [Unavailable("the ledger was closed before this call was carried out")] * len(
                group
            )
        try:
            with self._lock:
                return engine.write([job for job, _ in group], wait=True)
        except (Retriable, UnknownOutcome) as error:
            return [error] * len(group)
        except Exception as error:  # noqa: BLE001 -- one job's fault must not stop the others
            if len(group) == 1:
                return [error]
            return [result for job in group for result in self._commit([job])]

    def _fold(self) -> None:
        """Fold the write-ahead log into the file. If it cannot be now, then later."""
        engine = self._engine
        if engine is not None:
            with contextlib.suppress(HoldfastError):
                engine.checkpoint()

    def _hand_out(self, group: list[_Job], results: list[Any]) -> None:
        def deliver() -> None:
            self._queued -= len(group)
            for (_, future), result in zip(group, results, strict=True):
                if future is None or future.done():  # its caller was cancelled
                    continue
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)
            if self._engine is not None:
                self._count(1)

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(deliver)

    async def _sweep(self) -> Engine:
        """End leases whose time is up before reading, so that no reader sees them."""
        await self._breathe()
        engine = self._opened()
        if engine.lease_due():
            await self._write(lambda _: None)
        return engine

    async def _txn(
        self, compare: Sequence[Compare], then: Sequence[Op], otherwise: Sequence[Op]
    ) -> Txn:
        return await self._write(lambda write: write.txn(compare, then, otherwise))

    async def _grant(self, ttl_s: float) -> Lease:
        return Lease(await self._write(lambda write: write.grant(ttl_s)), ttl_s)

    async def keep_alive(self, lease: int) -> float:
        """See `Ledger.keep_alive`."""
        return await self._write(lambda write: write.keep_alive(lease))

    async def revoke(self, lease: int) -> None:
        """See `Ledger.revoke`."""
        await self._write(lambda write: write.revoke(lease))

    async def compact(self, revision: int) -> None:
        """See `Ledger.compact`."""
        await self._write(lambda write: write.compact(revision))

    # ---- reading -------------------------------------------------------------

    async def _get(self, key: str) -> Entry | None:
        return (await self._sweep()).get(key)

    async def _page(self, prefix: str, after: str, limit: int, revision: int) -> Page:
        return (await self._sweep()).page(prefix, after, limit, revision)

    async def lease_info(self, lease: int) -> LeaseInfo:
        """See `Ledger.lease_info`."""
        return (await self._sweep()).lease_info(lease)

    async def leases(self) -> tuple[int, ...]:
        """See `Ledger.leases`."""
        return (await self._sweep()).leases()

    async def inspect(self) -> Sequence[str]:
        """See `Ledger.inspect`."""
        return self._opened().inspect()

    # ---- following -----------------------------------------------------------

    def _watch(self, prefix: str, start: int) -> Watch:
        self._opened()
        return _SqliteWatch(self, prefix, start)

    def listen(self, prefix: str, event: asyncio.Event) -> None:
        """Set `event` when something below `prefix` changes in any process."""
        bell = self._bells.get(prefix)
        if bell is None:
            try:
                bell = self._bells[prefix] = Bell(bell_folder(self.path), prefix)
            except OSError as error:
                raise Unavailable(f"no further watch can be opened here: {error}") from error
        bell.listeners.add(event)

    def unlisten(self, prefix: str, event: asyncio.Event) -> None:
        """Undo `listen`; the last listener takes the bell down."""
        bell = self._bells.get(prefix)
        if bell is None:
            return
        bell.listeners.discard(event)
        if not bell.listeners:
            del self._bells[prefix]
            bell.close()

    async def changes(self, prefix: str, start: int) -> tuple[list[Batch], int]:
        """What a watch has to deliver now, and where it goes on."""
        with contextlib.suppress(Retriable):  # somebody else can end those leases, later
            await self._sweep()
        return self._opened().changes(prefix, start)

    def pause_s(self) -> float:
        """How long a watch may sleep: to the back stop or to the end of the next lease."""
        backstop_s = self.timeouts.watch_backstop_s
        deadline_s = self._opened().next_deadline_s()
        return backstop_s if deadline_s is None else min(backstop_s, max(0.0, deadline_s) + 0.001)


class _SqliteWatch(Watch):
    def __init__(self, ledger: SqliteLedger, prefix: str, start: int) -> None:
        self._ledger = ledger
        self._prefix = prefix
        self._next = start
        self._ready: list[Batch] = []
        self._rung = asyncio.Event()
        self._closed = False
        ledger.listen(prefix, self._rung)

    async def __anext__(self) -> Batch:
        while not self._ready:
            if self._closed:
                raise StopAsyncIteration
            self._rung.clear()
            batches, self._next = await self._ledger.changes(self._prefix, self._next)
            self._ready = batches[::-1]
            if not batches:
                await self._sleep()
        return self._ready.pop()

    async def _sleep(self) -> None:
        timer = asyncio.get_running_loop().call_later(self._ledger.pause_s(), self._rung.set)
        try:
            await self._rung.wait()
        finally:
            timer.cancel()

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self._ledger.unlisten(self._prefix, self._rung)
            self._rung.set()
