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
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from holdfast.ledger import Compare
from holdfast.ledger import open as open_ledger
from holdfast.loopthread import LoopThread
from holdfast.weights.local import LocalDisk
from holdfast.weights.manifest import Manifest
from holdfast.weights.pin import Pin
from holdfast.weights.policy import Needs, Retention
from holdfast.weights.publisher import SHARD_BYTES, CarriedFiles, Publisher
from holdfast.weights.records import Swept, Version
from holdfast.weights.subscriber import LEASE_S, Subscriber
from holdfast.weights.sweep import Report
from holdfast.weights.writing import Kind, Part, Ticket, write_part

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

__all__ = ["SyncPin", "SyncPublisher", "SyncSubscriber", "open_publisher", "open_subscriber"]

T = TypeVar("T")


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
    loop = _Loop()

    async def opened() -> Publisher:
        ledger = await loop.stack.enter_async_context(open_ledger(url)) if url else None
        publisher = Publisher(
            root,
            ledger,
            channel,
            retention,
            run=run,
            name=name,
            guards=guards,
            shard_bytes=shard_bytes,
        )
        return await loop.stack.enter_async_context(publisher)

    return SyncPublisher(loop, loop.begin(opened()))


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
    loop = _Loop()

    async def opened() -> Subscriber:
        ledger = await loop.stack.enter_async_context(open_ledger(url)) if url else None
        subscriber = Subscriber(
            root,
            ledger,
            channel,
            consumer,
            needs=needs,
            address=address,
            run=run,
            lease_s=lease_s,
        )
        return await loop.stack.enter_async_context(subscriber)

    return SyncSubscriber(loop, loop.begin(opened()))


class _Loop(LoopThread):
    """An event loop, and what was opened in it."""

    def __init__(self) -> None:
        super().__init__("holdfast-weights-loop")
        self.stack = contextlib.AsyncExitStack()

    def begin(self, work: Coroutine[Any, Any, T]) -> T:
        """Run what opens things; when it fails everything is closed again."""
        try:
            return self.run(work)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close what was opened, and end the thread. Closing twice does no harm."""
        if self.stopped:
            return
        try:
            self.run(self.stack.aclose())
        finally:
            self.stop()


class _Opened:
    """What is closed with its thread."""

    def __init__(self, loop: _Loop) -> None:
        self._loop = loop

    def close(self) -> None:
        """Leave. Closing twice does no harm."""
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SyncPublisher(_Opened):
    """The same calls as `Publisher`, each returning when it is done."""

    def __init__(self, loop: _Loop, publisher: Publisher) -> None:
        super().__init__(loop)
        self._publisher = publisher

    @property
    def epoch(self) -> int:
        """See `Publisher.epoch`."""
        return self._publisher.epoch

    def next_version(self) -> int:
        """See `Publisher.next_version`."""
        return self._loop.run(self._publisher.next_version())

    def publish(
        self,
        step: int,
        tensors: Mapping[str, object],
        *,
        files: CarriedFiles | None = None,
        kind: Kind = "model",
    ) -> Version | Swept:
        """See `Publisher.publish`."""
        return self._loop.run(self._publisher.publish(step, tensors, files=files, kind=kind))

    def begin(self, step: int, *, kind: Kind = "model", new_bytes: int = 0) -> Ticket:
        """See `Publisher.begin`."""
        return self._loop.run(self._publisher.begin(step, kind=kind, new_bytes=new_bytes))

    def write_part(self, ticket: Ticket, rank: int, tensors: Mapping[str, object]) -> Part:
        """See `holdfast.weights.write_part`, for the rank that has the publisher.

        Others have none: `asyncio.run(write_part(LocalDisk(), ticket, rank, tensors))`.
        """
        return self._loop.run(write_part(LocalDisk(), ticket, rank, tensors))

    def finish(self, ticket: Ticket, ranks: int, *, files: CarriedFiles | None = None) -> Version:
        """See `Publisher.finish`."""
        return self._loop.run(self._publisher.finish(ticket, ranks, files=files))

    def sweep(self, *, dry_run: bool = False) -> Report:
        """See `Publisher.sweep`."""
        return self._loop.run(self._publisher.sweep(dry_run=dry_run))


class SyncPin:
    """The same calls as `Pin`, each returning when it is done."""

    def __init__(self, loop: _Loop, pin: Pin) -> None:
        self._loop = loop
        self._pin = pin

    @property
    def version(self) -> Version:
        """The record of the pinned version."""
        return self._pin.version

    @property
    def manifest(self) -> Manifest:
        """What it consists of."""
        return self._pin.manifest

    @property
    def number(self) -> int:
        """See `Pin.number`."""
        return self._pin.number

    @property
    def verified(self) -> bool:
        """See `Pin.verified`."""
        return self._pin.verified

    @property
    def names(self) -> tuple[str, ...]:
        """See `Pin.names`."""
        return self._pin.names

    @property
    def lost(self) -> bool:
        """See `Pin.lost`."""
        return self._pin.lost

    def check(self) -> None:
        """See `Pin.check`."""
        self._loop.run(self._pin.check())

    def stage(self) -> str:
        """See `Pin.stage`."""
        return self._loop.run(self._pin.stage())

    def raw(self, name: str) -> memoryview:
        """See `Pin.raw`."""
        return self._pin.raw(name)

    def numpy(self, name: str) -> "np.ndarray[Any, Any]":
        """See `Pin.numpy`."""
        return self._pin.numpy(name)

    def torch(self, name: str) -> "Tensor":
        """See `Pin.torch`."""
        return self._pin.torch(name)

    def state_dict(self) -> "dict[str, Tensor]":
        """See `Pin.state_dict`."""
        return self._pin.state_dict()

    def load_into(self, target: "Mapping[str, Tensor]") -> None:
        """See `Pin.load_into`."""
        self._pin.load_into(target)

    def fits(self, target: "Mapping[str, Tensor]") -> "dict[str, Tensor]":
        """See `Pin.fits`."""
        return self._pin.fits(target)

    def carried(self, name: str) -> bytes:
        """See `Pin.carried`."""
        return self._pin.carried(name)


class SyncSubscriber(_Opened):
    """The same calls as `Subscriber`, each returning when it is done."""

    def __init__(self, loop: _Loop, subscriber: Subscriber) -> None:
        super().__init__(loop)
        self._subscriber = subscriber

    def latest(self) -> Version | None:
        """See `Subscriber.latest`."""
        return self._loop.run(self._subscriber.latest())

    def wait_for(self, version: int, timeout_s: float | None = None) -> Version:
        """See `Subscriber.wait_for`."""
        return self._loop.run(self._subscriber.wait_for(version, timeout_s))

    def wait_newer(self, than: int | None, timeout_s: float | None = None) -> Version:
        """See `Subscriber.wait_newer`."""
        return self._loop.run(self._subscriber.wait_newer(than, timeout_s))

    @contextlib.contextmanager
    def pin(self, version: int | None = None) -> Iterator[SyncPin]:
        """See `Subscriber.pin`."""
        held = self._subscriber.pin(version)
        pin = self._loop.run(held.__aenter__())
        try:
            yield SyncPin(self._loop, pin)
        finally:
            self._loop.run(held.__aexit__(None, None, None))

    @property
    def acknowledged(self) -> int | None:
        """See `Subscriber.acknowledged`."""
        return self._subscriber.acknowledged

    def acknowledge(self, version: int) -> None:
        """See `Subscriber.acknowledge`."""
        self._loop.run(self._subscriber.acknowledge(version))
