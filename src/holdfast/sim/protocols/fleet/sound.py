"""A fleet of replicas goes from version to version while callers are answered.

n0 publishes and updates the fleet, n1 to n4 are replicas whose engines fail now and then;
each is asked all the time. Invariants:

1. a replica answers only with a version that it has acknowledged, and with its bytes;
2. what is served does not change while somebody is being answered;
3. without a mix in the policy, nobody is answered by an older version once somebody was
   answered by a newer one (as long as the replica's clock is not slow and its lease was not
   taken away behind its back: a replica stops serving by its own clock);
4. the fleet's owner is told that a version is served only when it may be.

At the end every replica serves the last version.
"""

import contextlib

import numpy as np

from holdfast.errors import Gone, LeaseLost, Mistake, Retriable, UnknownOutcome
from holdfast.ledger import Batch, Runtime
from holdfast.ledger.records import decode
from holdfast.sim.protocol import Protocol, Violation
from holdfast.sim.world import Node
from holdfast.weights.channel import Channel
from holdfast.weights.fleet import Fleet, FleetPolicy
from holdfast.weights.pin import Pin
from holdfast.weights.publisher import Publisher
from holdfast.weights.records import Consumer, Keys, Target
from holdfast.weights.replica import Engine, Replica
from holdfast.weights.subscriber import Subscriber

__all__ = ["FleetProtocol"]

ROOT, CHANNEL = "/w", "policy"
LAST = 2
LEASE_S = 10.0
KEYS = Keys("default", CHANNEL)


class FleetProtocol(Protocol):
    """The sound protocol. Broken variants replace one part each."""

    disk = True
    steps = 1200
    fleet: type[Fleet] = Fleet
    replica: type[Replica] = Replica
    subscriber: type[Subscriber] = Subscriber
    policy = FleetPolicy(stage_s=40.0, hold_s=25.0)

    def __init__(self) -> None:
        self._acknowledged: set[tuple[str, int]] = set()
        self._answered = -1
        self._updated = -1
        self._target = Target()
        self._replicas: dict[str, Replica] = {}

    async def run(self, runtime: Runtime, name: str) -> None:
        """One process, by its name."""
        assert isinstance(runtime, Node)
        channel = Channel(ROOT, None, CHANNEL, runtime=runtime, disk=runtime.disk)
        if name == "n0":
            await self._own(channel)
        else:
            await self._serve(channel, name)

    async def _own(self, channel: Channel) -> None:
        runtime = channel.runtime
        publisher = Publisher("", None, "", at=channel)
        async with (
            publisher,
            self.fleet(runtime.ledger, CHANNEL, self.policy, runtime=runtime) as fleet,
        ):
            while self._updated < LAST:
                try:
                    newest = (await publisher._book.view()).newest()
                    if newest is None or (
                        newest.version < LAST and self._updated >= newest.version
                    ):
                        version = await publisher.next_version()
                        await publisher.publish(version, {"w": np.array([version])})
                        continue
                    done = await fleet.update(newest.version)
                    if newest.version not in self._target.allowed:
                        raise Violation(f"the update to {newest.version} was reported and is not")
                    self._updated = max(self._updated, done.version)
                except (Retriable, UnknownOutcome, Gone, Mistake):
                    await runtime.sleep(1 + runtime.random.random())
            # Whatever comes late is let in: the owner stays until everybody serves the last.
            while not self.settled():
                await runtime.sleep(2.0)

    async def _serve(self, channel: Channel, name: str) -> None:
        runtime = channel.runtime
        assert isinstance(runtime, Node)
        subscriber = self.subscriber(
            "", None, "", name, needs="latest", address=f"at-{name}", lease_s=LEASE_S, at=channel
        )
        engine = _Engine(runtime)
        while not self.settled():
            with contextlib.suppress(Retriable, UnknownOutcome, LeaseLost):
                async with subscriber, self.replica(subscriber, engine) as replica:
                    self._replicas[name] = replica
                    while not self.settled():
                        with contextlib.suppress(Retriable):
                            await self._answer(runtime, name, replica, engine)

    async def _answer(self, runtime: Node, name: str, replica: Replica, engine: "_Engine") -> None:
        async with replica.admit(timeout_s=20.0) as version:
            self._judge(runtime, name, version, engine, replica)
            await runtime.sleep(runtime.random.random() * 2)
            if engine.serves != version:
                raise Violation(f"{name} changed from {version} to {engine.serves} in an answer")
        await runtime.sleep(runtime.random.random())

    def _judge(
        self, runtime: Node, name: str, version: int, engine: "_Engine", replica: Replica
    ) -> None:
        if (name, version) not in self._acknowledged:
            raise Violation(f"{name} answers with {version}, which it has not acknowledged")
        if engine.serves != version:
            raise Violation(f"{name} says {version} and has {engine.serves}")
        if replica.serving() != version:
            return
        seat = replica._subscriber._seat
        assert seat is not None
        taken = int(seat.id.rpartition("-")[2]) in self.taken
        if runtime.rate < 1 or taken:
            return  # it cannot know
        if version < self._answered:
            raise Violation(f"{name} answers with {version} after {self._answered} was served")
        self._answered = version

    def observe(self, batch: Batch) -> None:
        """Take note of what was acknowledged, and look at every new target."""
        for event in batch.events:
            if event.entry is None:
                continue
            if event.key.startswith(KEYS.consumers):
                record = decode(Consumer, event.entry)
                if record.acknowledged is not None:
                    self._acknowledged.add((record.name, record.acknowledged))
            elif event.key == KEYS.target:
                target = decode(Target, event.entry)
                if target.round < self._target.round or len(target.allowed) > target.mix + 1:
                    raise Violation(f"the target went from {self._target} to {target}")
                self._target = target

    def settled(self) -> bool:
        """Everybody serves the last version."""
        return self._updated >= LAST and all(
            name in self._replicas and self._replicas[name].serving() == self._updated
            for name in ("n1", "n2", "n3", "n4")
        )


class _Engine(Engine):
    """Holds one number. Staging and switching take time, and fail now and then."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._aside: int | None = None
        self._rate = node.random.choice((0.0, 0.0, 0.1, 0.3))
        self.serves: int | None = None

    async def stage(self, pin: Pin) -> None:
        """See `Engine.stage`."""
        await self._work()
        self._aside = int(pin.numpy("w")[0])

    async def switch(self, pin: Pin) -> None:
        """See `Engine.switch`: in between it holds nothing that anybody should see."""
        self.serves = None
        await self._work()
        assert self._aside == pin.number
        self.serves = self._aside

    async def _work(self) -> None:
        await self._node.sleep(self._node.random.random() * 2)
        if self._node.random.random() < self._rate and not self._node.world.healed:
            raise RuntimeError("the engine has no memory left")
