"""Publishing and subscribing for code without an event loop, such as a training loop.

    with open_publisher(root, "sqlite:///run.db", "policy") as publisher:
        publisher.publish(step, model.state_dict())

    with open_subscriber(root, "sqlite:///run.db", "policy", "replica-0") as subscriber:
        with subscriber.pin() as pin:
            pin.load_into(model.state_dict())
            subscriber.acknowledge(pin.number)

One thread with an event loop does the work and keeps the leases alive; every call here waits
for its answer. `url=None` means marker files alone. A process that forks afterwards must
open its own.
"""

import contextlib
from collections.abc import Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

from holdfast.ledger import open as open_ledger
from holdfast.loopthread import LoopThread
from holdfast.weights.pin import Pin
from holdfast.weights.policy import Needs, Retention
from holdfast.weights.publisher import CarriedFiles, Publisher
from holdfast.weights.records import Swept, Version
from holdfast.weights.subscriber import LEASE_S, Subscriber
from holdfast.weights.sweep import Report
from holdfast.weights.writing import Kind

__all__ = ["SyncPublisher", "SyncSubscriber", "open_publisher", "open_subscriber"]

T = TypeVar("T")


def open_publisher(
    root: str | Path,
    url: str | None,
    channel: str = "policy",
    retention: Retention | None = None,
    *,
    run: str = "default",
    name: str = "publisher",
) -> "SyncPublisher":
    """Take over publishing on a channel. Close it, or use `with`."""
    loop = _Loop()

    async def opened() -> Publisher:
        ledger = await loop.stack.enter_async_context(open_ledger(url)) if url else None
        publisher = Publisher(root, ledger, channel, retention, run=run, name=name)
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

    def sweep(self, *, dry_run: bool = False) -> Report:
        """See `Publisher.sweep`."""
        return self._loop.run(self._publisher.sweep(dry_run=dry_run))


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
    def pin(self, version: int | None = None) -> Iterator[Pin]:
        """See `Subscriber.pin`. The pin's `check` and `stage` are for event loops: use ours."""
        held = self._subscriber.pin(version)
        pin = self._loop.run(held.__aenter__())
        try:
            yield pin
        finally:
            self._loop.run(held.__aexit__(None, None, None))

    def check(self, pin: Pin) -> None:
        """See `Pin.check`."""
        self._loop.run(pin.check())

    def stage(self, pin: Pin) -> str:
        """See `Pin.stage`."""
        return self._loop.run(pin.stage())

    def acknowledge(self, version: int) -> None:
        """See `Subscriber.acknowledge`."""
        self._loop.run(self._subscriber.acknowledge(version))
