"""The queue for code without an event loop, such as a training loop.

    with open_queue("shm://run-7", "sqlite:///run.db", "rollouts", ["train"]) as queue:
        with queue.claim("train", 64) as batch:
            values = batch.fetch()
            batch.acknowledge()

One thread with an event loop does the work and keeps the lease alive; every call here waits
for its answer. A process that forks afterwards must open its own.
"""

import contextlib
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, Self, TypeVar

from holdfast.ledger import open as open_ledger
from holdfast.loopthread import LoopThread
from holdfast.transfer.queue.batch import Batch
from holdfast.transfer.queue.desk import CALL_S
from holdfast.transfer.queue.putting import Item
from holdfast.transfer.queue.queue import LEASE_S, Queue, Tasks
from holdfast.transfer.queue.records import Sample
from holdfast.transfer.queue.samplers import Sampler, in_order
from holdfast.transfer.store import Store
from holdfast.transfer.url import connect

__all__ = ["SyncBatch", "SyncQueue", "open_queue"]

T = TypeVar("T")


def open_queue(
    store: Store | str,
    ledger_url: str,
    name: str,
    tasks: Tasks | None = None,
    *,
    run: str = "default",
    member: str = "member",
    max_samples: int = 100_000,
    max_bytes: int = 1 << 40,
    lease_s: float = LEASE_S,
) -> "SyncQueue":
    """Take part in a queue. Close it, or use `with`. A store given by its URL is closed, too."""
    loop, stack = LoopThread("holdfast-queue"), contextlib.AsyncExitStack()

    async def opened() -> Queue:
        place = stack.enter_context(connect(store)) if isinstance(store, str) else store
        ledger = await stack.enter_async_context(open_ledger(ledger_url))
        queue = Queue(
            place,
            ledger,
            name,
            tasks,
            run=run,
            member=member,
            max_samples=max_samples,
            max_bytes=max_bytes,
            lease_s=lease_s,
        )
        return await stack.enter_async_context(queue)

    try:
        queue = loop.run(opened())
    except BaseException:
        loop.run(stack.aclose())
        loop.stop()
        raise
    return SyncQueue(loop, stack, queue)


class SyncQueue:
    """A queue whose calls wait. Made by `open_queue`."""

    def __init__(self, loop: LoopThread, stack: contextlib.AsyncExitStack, queue: Queue) -> None:
        self._loop = loop
        self._stack = stack
        self.queue = queue

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave. What was claimed and not acknowledged is given to others at once."""
        if not self._loop.stopped:
            try:
                self._loop.run(self._stack.aclose())
            finally:
                self._loop.stop()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something in the queue's own event loop, and wait for it."""
        return self._loop.run(work)

    def put(self, items: Sequence[Item], *, timeout_s: float = CALL_S) -> dict[str, bool]:
        """See `Queue.put`."""
        return self._loop.run(self.queue.put(items, timeout_s=timeout_s))

    def put_fields(
        self, fields: Mapping[str, Mapping[str, object]], *, timeout_s: float = CALL_S
    ) -> None:
        """See `Queue.put_fields`."""
        self._loop.run(self.queue.put_fields(fields, timeout_s=timeout_s))

    def claim(
        self,
        task: str,
        n: int | None = None,
        *,
        keys: Sequence[str] | None = None,
        sampler: Sampler = in_order,
        least: int | None = None,
        max_lag: int | None = None,
        version: int | None = None,
        timeout_s: float = CALL_S,
    ) -> "SyncBatch":
        """See `Queue.claim`."""
        batch = self._loop.run(
            self.queue.claim(
                task,
                n,
                keys=keys,
                sampler=sampler,
                least=least,
                max_lag=max_lag,
                version=version,
                timeout_s=timeout_s,
            )
        )
        return SyncBatch(self._loop, batch)

    def samples(self, keys: Iterable[str]) -> list[Sample]:
        """See `Queue.samples`."""
        return self._loop.run(self.queue.samples(keys))

    def behind(self) -> dict[str, int]:
        """See `Queue.behind`."""
        return self.queue.behind()

    def tidy(self) -> None:
        """See `Queue.tidy`."""
        self._loop.run(self.queue.tidy())


class SyncBatch:
    """A batch whose calls wait."""

    def __init__(self, loop: LoopThread, batch: Batch) -> None:
        self._loop = loop
        self.batch = batch

    @property
    def keys(self) -> list[str]:
        """See `Batch.keys`."""
        return self.batch.keys

    @property
    def samples(self) -> list[Sample]:
        """See `Batch.samples`."""
        return self.batch.samples

    @property
    def already(self) -> list[str]:
        """See `Batch.already`."""
        return self.batch.already

    @property
    def dropped(self) -> list[str]:
        """See `Batch.dropped`."""
        return self.batch.dropped

    def __len__(self) -> int:
        return len(self.batch)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def fetch(self, fields: Iterable[str] | None = None) -> list[dict[str, Any]]:
        """See `Batch.fetch`."""
        return self._loop.run(self.batch.fetch(fields))

    def acknowledge(self, keys: Iterable[str] | None = None) -> None:
        """See `Batch.acknowledge`."""
        self._loop.run(self.batch.acknowledge(keys))

    def release(self) -> None:
        """See `Batch.release`."""
        self._loop.run(self.batch.release())
