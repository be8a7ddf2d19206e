"""Publishing and subscribing for code without an event loop, such as a training loop.

    with open_publisher(root, "sqlite:///run.db", "policy") as publisher:
        publisher.publish(step, model.state_dict())

    with open_subscriber(root, "sqlite:///run.db", "policy", "replica-0") as subscriber:
        with subscriber.pin() as pin:
            pin.load_into(model.state_dict())
            subscriber.acknowledge(pin.number)

The same calls as in an event loop, without `await`. One thread with an event loop does the
work and keeps the leases alive; every call here waits for its answer. `url=None` means marker
files alone. A process that forks afterwards must open its own.
"""

import contextlib
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from holdfast.ledger import Compare, Ledger
from holdfast.ledger import open as open_ledger
from holdfast.loopthread import LoopThread, waiting
from holdfast.weights.local import LocalDisk
from holdfast.weights.pin import Pin
from holdfast.weights.policy import Needs, Retention
from holdfast.weights.publisher import SHARD_BYTES, Publisher
from holdfast.weights.subscriber import LEASE_S, Subscriber
from holdfast.weights.writing import Part, Ticket, write_part

__all__ = ["SyncPin", "SyncPublisher", "SyncSubscriber", "open_publisher", "open_subscriber"]

T = TypeVar("T")
Twin = TypeVar("Twin", Publisher, Subscriber)


def open_publisher(
    root: str | Path,
    url: str | None,
    channel: str = "policy",
    retention: Retention | None = None,
    *,
    run: str = "default",
    name: str = "publisher",
    guards: Sequence[Compare] = (),
    shard_bytes: int = SHARD_BYTES,
) -> "SyncPublisher":
    """Take over publishing on a channel. Close it, or use `with`."""
    how: Any = {"run": run, "name": name, "guards": guards, "shard_bytes": shard_bytes}
    return SyncPublisher(url, lambda led: Publisher(root, led, channel, retention, **how))


def open_subscriber(
    root: str | Path,
    url: str | None,
    channel: str = "policy",
    consumer: str = "consumer",
    *,
    needs: Needs = "every",
    address: str = "",
    run: str = "default",
    lease_s: float = LEASE_S,
) -> "SyncSubscriber":
    """Join a channel as a consumer. Close it, or use `with`."""
    how: Any = {"needs": needs, "address": address, "run": run, "lease_s": lease_s}
    return SyncSubscriber(url, lambda led: Subscriber(root, led, channel, consumer, **how))


class _Opened(Generic[Twin]):
    """A thread with an event loop, and what was opened in it."""

    def __init__(self, url: str | None, make: Callable[[Ledger | None], Twin]) -> None:
        self._loop = LoopThread("holdfast-weights-loop")
        self._stack = contextlib.AsyncExitStack()
        try:
            self.twin: Twin = self.run(self._open(url, make))
        except BaseException:
            self.close()
            raise

    async def _open(self, url: str | None, make: Callable[[Ledger | None], Twin]) -> Twin:
        ledger = await self._stack.enter_async_context(open_ledger(url)) if url else None
        return await self._stack.enter_async_context(make(ledger))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something in our own event loop, and wait for it."""
        return self._loop.run(work)

    def close(self) -> None:
        """Leave, and end the thread. Closing twice does no harm."""
        if not self._loop.stopped:
            try:
                self.run(self._stack.aclose())
            finally:
                self._loop.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SyncPublisher(_Opened[Publisher]):
    """The same calls as `Publisher`, each returning when it is done."""

    next_version = waiting(Publisher.next_version)
    publish = waiting(Publisher.publish)
    begin = waiting(Publisher.begin)
    finish = waiting(Publisher.finish)
    sweep = waiting(Publisher.sweep)

    @property
    def epoch(self) -> int:
        """See `Publisher.epoch`."""
        return self.twin.epoch

    def write_part(self, ticket: Ticket, rank: int, tensors: Mapping[str, object]) -> Part:
        """See `holdfast.weights.write_part`, for the rank that has the publisher.

        Others have none: `asyncio.run(write_part(LocalDisk(), ticket, rank, tensors))`.
        """
        return self.run(write_part(LocalDisk(), ticket, rank, tensors))


class SyncPin:
    """The same calls as `Pin`, each returning when it is done."""

    check = waiting(Pin.check)
    stage = waiting(Pin.stage)

    def __init__(self, loop: LoopThread, pin: Pin) -> None:
        self.run, self.twin = loop.run, pin
        self.version, self.manifest = pin.version, pin.manifest
        self.number, self.verified, self.names = pin.number, pin.verified, pin.names
        # These read what is open, and wait for nobody.
        self.raw, self.numpy, self.torch, self.carried = pin.raw, pin.numpy, pin.torch, pin.carried
        self.state_dict, self.load_into, self.fits = pin.state_dict, pin.load_into, pin.fits

    @property
    def lost(self) -> bool:
        """See `Pin.lost`."""
        return self.twin.lost


class SyncSubscriber(_Opened[Subscriber]):
    """The same calls as `Subscriber`, each returning when it is done."""

    latest = waiting(Subscriber.latest)
    wait_for = waiting(Subscriber.wait_for)
    wait_newer = waiting(Subscriber.wait_newer)
    acknowledge = waiting(Subscriber.acknowledge)

    @contextlib.contextmanager
    def pin(self, version: int | None = None) -> Iterator[SyncPin]:
        """See `Subscriber.pin`."""
        held = self.twin.pin(version)
        pin = self.run(held.__aenter__())
        try:
            yield SyncPin(self._loop, pin)
        finally:
            self.run(held.__aexit__(None, None, None))

    @property
    def acknowledged(self) -> int | None:
        """See `Subscriber.acknowledged`."""
        return self.twin.acknowledged
