"""The queue for code without an event loop, such as a training loop.

    with open_queue("shm://run-7", "sqlite:///run.db", "rollouts", ["train"]) as queue:
        with queue.claim("train", 64) as batch:
            values = batch.fetch()
            batch.acknowledge()

One thread with an event loop does the work and keeps the lease alive; every call here waits
for its answer. A process that forks afterwards must open its own.
"""

import contextlib
import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from holdfast.ledger import open as open_ledger
from holdfast.loopthread import LoopThread, waiting
from holdfast.timeouts import DEFAULTS, Timeouts
from holdfast.transfer.queue.batch import Batch
from holdfast.transfer.queue.queue import Queue, Tasks
from holdfast.transfer.queue.records import Sample
from holdfast.transfer.store import Store
from holdfast.transfer.url import connect

__all__ = ["SyncBatch", "SyncQueue", "open_queue"]

P = ParamSpec("P")
T = TypeVar("T")
Coro = Coroutine[Any, Any, T]


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
    lease_s: float | None = None,
    timeouts: Timeouts = DEFAULTS,
) -> "SyncQueue":
    """Take part in a queue. Close it, or use `with`. A store given by its URL is closed, too."""
    loop, stack = LoopThread("holdfast-queue"), contextlib.AsyncExitStack()

    async def opened() -> Queue:
        place = connect(store, timeouts=timeouts) if isinstance(store, str) else store
        if place is not store:
            stack.enter_context(place)
        ledger = await stack.enter_async_context(open_ledger(ledger_url, timeouts=timeouts))
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


def _claiming(
    method: Callable[Concatenate[Any, P], Coro[Batch]],
) -> Callable[Concatenate[Any, P], "SyncBatch"]:
    claim = waiting(method)

    @functools.wraps(method)
    def call(self: "SyncQueue", /, *args: P.args, **how: P.kwargs) -> "SyncBatch":
        return SyncBatch(self, claim(self, *args, **how))

    return call


class SyncQueue:
    """A queue whose calls wait. Made by `open_queue`."""

    def __init__(self, loop: LoopThread, stack: contextlib.AsyncExitStack, queue: Queue) -> None:
        self._loop = loop
        self._stack = stack
        self.twin = self.queue = queue

    put = waiting(Queue.put)
    put_fields = waiting(Queue.put_fields)
    claim = _claiming(Queue.claim)
    samples = waiting(Queue.samples)
    tidy = waiting(Queue.tidy)

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

    def run(self, work: Coro[T]) -> T:
        """Run something in the queue's own event loop, and wait for it."""
        return self._loop.run(work)

    def behind(self) -> dict[str, int]:
        """See `Queue.behind`."""
        return self.queue.behind()


class SyncBatch:
    """A batch whose calls wait. Its properties are those of `Batch`."""

    def __init__(self, queue: SyncQueue, batch: Batch) -> None:
        self.run = queue.run
        self.twin = self.batch = batch
        self.samples: list[Sample] = batch.samples
        self.already, self.dropped = batch.already, batch.dropped

    fetch = waiting(Batch.fetch)
    acknowledge = waiting(Batch.acknowledge)
    release = waiting(Batch.release)

    @property
    def keys(self) -> list[str]:
        """See `Batch.keys`."""
        return self.batch.keys

    def __len__(self) -> int:
        return len(self.batch)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
