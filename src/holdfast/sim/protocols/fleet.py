"""A fleet of replicas goes from version to version while callers are answered.

n0 publishes, updates the fleet, now and then takes it back, and sweeps; n1 to n3 are replicas
whose engines fail now and then; each is asked all the time. Every other schedule allows a mix
of two versions. Versions are records without files: `weights` is the protocol about files.
Invariants:

1. a replica answers only with a version that it has acknowledged, and with its bytes;
2. what is served does not change while somebody is being answered;
3. nobody is answered by a version that the fleet had left behind when somebody was answered
   before him (as long as the replica's clock is not slow and its lease was not taken away
   behind its back: a replica stops serving by its own clock);
4. the fleet's owner is told that a version is served only when it may be;
5. what the fleet loads or serves is not given up by a sweep.

At the end every replica serves the last version.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from holdfast.contrib.fleets.fleet import Fleet, FleetPolicy
from holdfast.contrib.fleets.replica import Engine, Replica
from holdfast.errors import Gone, LeaseLost, Mistake, Retriable
from holdfast.ledger import Batch, Runtime, absent, unchanged
from holdfast.ledger.records import decode, put
from holdfast.retry import AGAIN, insist
from holdfast.sim.protocol import Protocol, Violation
from holdfast.sim.times import TIMES
from holdfast.sim.world import Node
from holdfast.weights.book import Seat
from holdfast.weights.channel import Channel
from holdfast.weights.pin import Pin
from holdfast.weights.policy import OnDisk, Retention, deletable
from holdfast.weights.records import Consumer, Head, Keys, Target, Version
from holdfast.weights.subscriber import Subscriber

__all__ = ["FleetProtocol"]

CHANNEL = "policy"
LAST = 2
KEYS = Keys("default", CHANNEL)


class FleetProtocol(Protocol):
    """The sound protocol, with the parts that it is given."""

    nodes = 4
    steps = 750
    policy = FleetPolicy(stage_s=20.0, hold_s=TIMES.fleet_hold_s)

    def __init__(
        self,
        fleet: Callable[..., Fleet] = Fleet,
        replica: Callable[..., Replica] = Replica,
    ) -> None:
        self._fleet = fleet
        self._replica = replica
        self._acknowledged: set[tuple[str, int]] = set()
        self._allowed: list[tuple[int, ...]] = [()]
        self._answered = 0
        """Up to which of `_allowed` callers have seen the fleet move on."""
        self._updated = -1
        self._target = Target()
        self._replicas: dict[str, dict[Node, Replica]] = {"n1": {}, "n2": {}, "n3": {}}
        self._over = False

    async def run(self, runtime: Node, name: str) -> None:
        """One process, by its name."""
        channel = _Channel("/", None, CHANNEL, runtime=runtime)
        if name == "n0":
            await self._own(channel, runtime)
        else:
            await self._serve(channel, runtime, name)

    # ---- the owner -----------------------------------------------------------

    async def _own(self, channel: Channel, runtime: Node) -> None:
        policy = self.policy.model_copy(update={"mix": runtime.world.seed % 2})
        sweeping = runtime.spawn(self._sweep(channel), name="sweeps")
        try:
            async with self._fleet(runtime.ledger, CHANNEL, policy, runtime=runtime) as fleet:
                # Whatever comes late is let in: the owner stays until all serve the last.
                while not self.settled():
                    await insist(
                        runtime,
                        lambda: self._move(channel, runtime, fleet),
                        on=(Gone, Mistake, *AGAIN),
                    )
        finally:
            sweeping.cancel()
            await asyncio.gather(sweeping, return_exceptions=True)

    async def _move(self, channel: Channel, runtime: Node, fleet: Fleet) -> None:
        """Publish the next version, or bring one to the fleet."""
        there = (await channel.book("n0").view()).versions
        newest, luck = max(there, default=-1), runtime.random.random()
        healed = runtime.world.healed
        if newest < LAST or (luck < 0.3 and not healed):
            await _publish(runtime)
            return
        if luck < 0.7 or healed:
            if healed and newest in self._target.allowed[:1] and self._updated == newest:
                await runtime.sleep(2.0)
                return
            await fleet.update(newest)
            if newest not in {one for allowed in self._allowed for one in allowed}:
                raise Violation(f"the update to {newest} was reported and is not")
            self._updated = newest
        else:
            await fleet.update(runtime.random.choice(sorted(there)), rollback=True)

    async def _sweep(self, channel: Channel) -> None:
        """Give up what nobody needs, all the time."""
        runtime, book = channel.runtime, channel.book("n0")
        while True:
            await runtime.sleep(1 + runtime.random.random() * 4)
            with contextlib.suppress(*AGAIN):
                view = await book.view()
                versions = [OnDisk(number, {}) for number in view.versions]
                for number in deletable(
                    versions,
                    view.pins(),
                    view.acknowledgements(),
                    Retention(keep_last=1),
                    view.now_s,
                ):
                    await book.forget(view, number)

    # ---- a replica -----------------------------------------------------------

    async def _serve(self, channel: Channel, runtime: Node, name: str) -> None:
        given: Any = {"needs": "latest", "address": f"at-{name}", "at": channel}
        lease_s = TIMES.consumer_lease_s
        subscriber = _Subscriber("", None, "", name, lease_s=lease_s, **given)
        engine = _Engine(runtime)
        while not self.settled():
            with contextlib.suppress(LeaseLost, *AGAIN):
                async with subscriber, self._replica(subscriber, engine) as replica:
                    self._replicas[name][runtime] = replica
                    while not self.settled():
                        with contextlib.suppress(Retriable):
                            await self._answer(runtime, name, replica, engine)

    async def _answer(self, runtime: Node, name: str, replica: Replica, engine: "_Engine") -> None:
        async with replica.admit(timeout_s=20.0) as version:
            seat = replica._subscriber._seat
            assert seat is not None
            self._judge(runtime, name, version, engine, seat)
            await runtime.sleep(runtime.random.random() * 2)
            if engine.serves != version:
                raise Violation(f"{name} changed from {version} to {engine.serves} in an answer")
            if replica._subscriber._seat is seat and seat.believes():
                # Otherwise nobody could wait for the end of the answer.
                self._judge(runtime, name, version, engine, seat)
        await runtime.sleep(runtime.random.random())

    # ---- the invariants ------------------------------------------------------

    def _judge(
        self, runtime: Node, name: str, version: int, engine: "_Engine", seat: Seat
    ) -> None:
        if (name, version) not in self._acknowledged:
            raise Violation(f"{name} answers with {version}, which it has not acknowledged")
        if engine.serves != version:
            raise Violation(f"{name} says {version} and has {engine.serves}")
        taken = int(seat.id.rpartition("-")[2]) in self.taken
        if runtime.rate < 1 or taken:
            return  # it cannot know
        for later in range(self._answered, len(self._allowed)):
            if version in self._allowed[later]:
                self._answered = later
                return
        raise Violation(
            f"{name} answers with {version}, and callers have seen {self._allowed[-1]}"
        )

    def observe(self, batch: Batch) -> None:
        """Take note of what was acknowledged, and look at every new target and every replica."""
        for some in self._replicas.values():
            for node, replica in some.items():
                if not node.dead:
                    replica.standing().validate()
        for event in batch.events:
            if event.entry is None:
                self._see_swept(event.key)
            elif event.key.startswith(KEYS.consumers):
                record = decode(Consumer, event.entry)
                if record.acknowledged is not None:
                    self._acknowledged.add((record.name, record.acknowledged))
            elif event.key == KEYS.target:
                self._see_target(decode(Target, event.entry))

    def _see_target(self, target: Target) -> None:
        if target.round < self._target.round or len(target.allowed) > target.mix + 1:
            raise Violation(f"the target went from {self._target} to {target}")
        if target.staging is not None and self.truth.get(KEYS.version(target.staging)) is None:
            raise Violation(f"the fleet is to load {target.staging}, which was given up")
        self._target = target
        if target.allowed != self._allowed[-1]:
            self._allowed.append(target.allowed)

    def _see_swept(self, key: str) -> None:
        if key.startswith(KEYS.versions):
            number = int(key.removeprefix(KEYS.versions))
            if number in (*self._target.allowed, self._target.staging):
                raise Violation(f"version {number} was given up while the fleet uses it")

    def settled(self) -> bool:
        """Everybody serves the last version, and no faults are left to be survived."""
        self._over = self._over or (
            self.world.healed
            and self._updated >= LAST
            and all(
                any(not node.dead and one.serving() == self._updated for node, one in some.items())
                for some in self._replicas.values()
            )
        )
        return self._over


async def _publish(runtime: Runtime) -> None:
    """Record the next version. If the answer is lost, it is published or it is not."""
    entry = await runtime.ledger.get(KEYS.head)
    number = decode(Head, entry).version + 1 if entry else 0
    version = Version(
        version=number,
        parent=None,
        epoch=1,
        content=str(number),
        manifest=str(number),
        bytes=1,
        published_s=0.0,
    )
    await runtime.ledger.txn(
        [unchanged(entry) if entry else absent(KEYS.head)],
        [
            put(KEYS.version(number), version),
            put(KEYS.head, Head(version=number, content=version.content), over=entry),
        ],
    )


class _Channel(Channel):
    """A channel without files."""

    async def make(self) -> None:
        """There is nothing to make."""


class _Subscriber(Subscriber):
    """Pins in the ledger, and asks as always whether the lease still counts."""

    async def _open(self, seat: Seat, record: Version) -> Pin:
        if not await seat.holds(record.version):
            raise LeaseLost(f"the lease of {self.name} ended")
        self._loaded[record.version] = record.content
        return _Pin(seat, record)


class _Pin(Pin):
    """A pinned version: its number is all there is."""

    def __init__(self, seat: Seat, record: Version) -> None:
        self.version = record
        self._seat = seat

    async def close(self) -> None:
        """Nothing is open."""


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
        self._aside = pin.number

    async def switch(self, pin: Pin) -> None:
        """See `Engine.switch`: in between it holds nothing that anybody should see."""
        self.serves = None
        await self._work()
        assert self._aside == pin.number
        self.serves = self._aside

    async def _work(self) -> None:
        await self._node.sleep(self._node.random.random())
        if self._node.random.random() < self._rate and not self._node.world.healed:
            raise RuntimeError("the engine has no memory left")
