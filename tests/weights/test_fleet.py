"""Fleets of real processes: killed, stopped, given what they cannot load, asked all the time.

Every answer is checked: its version was acknowledged by that life of that replica before, its
number is right for that version, and it is no version that the fleet had left behind.
"""

import asyncio
import contextlib
import json
import random
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import kids
from holdfast import ledger, proc
from holdfast.contrib.fleets.fleet import Fleet, FleetPolicy
from holdfast.contrib.fleets.replica import Engine, ModuleEngine, Replica
from holdfast.errors import HoldfastError, Mistake, Unavailable
from holdfast.ledger import Ledger, LiveRuntime, follow
from holdfast.ledger.records import decode
from holdfast.servers import EtcdServer
from holdfast.weights import Pin, Publisher, Subscriber
from holdfast.weights.records import Consumer, Keys, Target
from kids import Kid
from patience import auntil
from weights.family import HERE, flip, refused
from weights.fleet_child import ITEMS, number, weights

KEYS = Keys("default", "policy")
LEASE_S = 1.5
POLICY = FleetPolicy(stage_s=15.0, hold_s=10.0)
LIMIT_S = 30.0
REFUSED = 2
"""The version that the third replica cannot load."""
PATIENCE_S = 1.0
"""How long a caller waits for an answer: less than replicas are stopped."""


class Answer(msgspec.Struct):
    """What a caller was told."""

    name: str
    seat: str
    version: int
    begun: float
    ended: float
    numbers: tuple[float, float]
    revision: int = 0
    """Of the ledger when the caller had the answer, if that was looked up."""


class Witness:
    """Follows the ledger: who acknowledged what, and in which order versions were allowed."""

    def __init__(self, led: Ledger) -> None:
        self._ledger = led
        self.acknowledged: dict[tuple[str, int], int] = {}
        """(seat, version) -> the revision of its acknowledgement."""
        self.target = Target()
        self.allowed: list[tuple[int, ...]] = [()]
        self.phases: list[str] = []
        self.revision = 0
        self._moved = asyncio.Event()

    async def run(self) -> None:
        """Follow for ever."""
        async with contextlib.aclosing(follow(LiveRuntime(self._ledger), KEYS.live)) as steps:
            async for step in steps:
                for key, entry in step.entries.items():
                    if key.startswith(KEYS.consumers):
                        record = decode(Consumer, entry)
                        if record.acknowledged is not None:
                            seat = f"{record.name}-{key.rpartition('/')[2]}"
                            self.acknowledged.setdefault(
                                (seat, record.acknowledged), entry.mod_revision
                            )
                    elif key == KEYS.target:
                        self._see(decode(Target, entry))
                self.revision = step.revision
                self._moved.set()

    def _see(self, target: Target) -> None:
        self.target = target
        if target.allowed != self.allowed[-1]:
            self.allowed.append(target.allowed)
        self.phases.append(target.phase)

    async def until(self, what: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        """Wait until something is true of what was seen."""
        async with asyncio.timeout(limit_s):
            while not what():
                self._moved.clear()
                await self._moved.wait()


class House:
    """A channel, its fleet and its callers, in this process; replicas as children or here."""

    def __init__(self, folder: Path, led: Ledger, url: str, policy: FleetPolicy) -> None:
        self.root, self.url, self.ledger = str(folder / "weights"), url, led
        self.publisher = Publisher(self.root, led, "policy")
        self.fleet = Fleet(led, "policy", policy)
        self.witness = Witness(led)
        self.held: list[proc.HeldPort] = []
        self.answers: list[Answer] = []
        self.refused = 0

    async def publish(self, version: int) -> None:
        """Publish a version of the children's module."""
        await self.publisher.publish(version, {"w": np.array(weights(version), np.float32)})

    def replica(self, index: int, refuses: tuple[int, ...] = ()) -> Any:
        """A replica process."""
        how = {"port": self.held[index].port, "lease_s": LEASE_S, "refuses": refuses}
        return self.start("replica", root=self.root, name=f"r{index}", **how)

    def start(self, what: str, **args: Any) -> contextlib.AbstractContextManager[Kid]:
        """A child that reaches the ledger."""
        return kids.start(
            HERE / "fleet_child.py", what, folder=Path(self.root), url=self.url, **args
        )

    def subscriber(self, name: str, address: str) -> Subscriber:
        """A consumer in this process that answers at an address."""
        how: dict[str, Any] = {"needs": "latest", "address": address, "lease_s": LEASE_S}
        return Subscriber(self.root, self.ledger, "policy", name, **how)

    async def call(self, seed: int) -> None:
        """Ask replicas for ever: those that are offered, and any that there ever was."""
        luck = random.Random(seed)
        while True:
            offered = await self.fleet.addresses()
            anybody = [f"127.0.0.1:{one.port}" for one in self.held]
            for _ in range(luck.randrange(1, 6)):  # the list gets stale meanwhile
                places = anybody if luck.random() < 0.4 or not offered else offered
                work_s = luck.choice((0.0, 0.01, 0.1))
                await self.ask(luck.choice(places), work_s, luck.choice((0.0, 0.5)))

    async def ask(self, address: str, work_s: float = 0.0, wait_s: float = 0.0) -> Answer | None:
        """Ask one replica, and keep what it says."""
        host, _, port = address.partition(":")
        try:
            reader, writer = await asyncio.open_connection(host, int(port))
        except OSError:
            await asyncio.sleep(0.02)
            return None
        try:
            writer.write(json.dumps({"work_s": work_s, "wait_s": wait_s}).encode() + b"\n")
            async with asyncio.timeout(PATIENCE_S):
                line = await reader.readline()
        except (OSError, TimeoutError):
            return None
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        if not line or "refused" in (raw := json.loads(line)):
            self.refused += 1
            return None
        answer = msgspec.convert(raw, Answer)
        if (answer.seat, answer.version) not in self.witness.acknowledged:
            answer.revision = (await self.ledger.range(KEYS.consumers)).revision
        self.answers.append(answer)
        return answer

    async def offered(self, version: int, count: int) -> None:
        """Wait until so many replicas are offered for this version."""

        async def are_offered() -> bool:
            return len(await self.fleet.addresses(version)) == count

        await auntil(are_offered)

    async def judge(self, mix: int) -> None:
        """Check every answer."""
        last = max((one.revision for one in self.answers), default=0)
        await self.witness.until(lambda: self.witness.revision >= last)
        for one in self.answers:
            assert one.numbers == (number(one.version),) * 2, one
            told = self.witness.acknowledged.get((one.seat, one.version))
            assert told is not None, f"never acknowledged: {one}"
            assert not one.revision or told <= one.revision, f"acknowledged later: {one}"
        assert all(len(allowed) <= mix + 1 for allowed in self.witness.allowed)
        rank: dict[int, int] = {}
        for allowed in self.witness.allowed[1:]:
            rank.setdefault(allowed[0], len(rank))
        ends = sorted(self.answers, key=lambda one: one.ended)
        seen, newest = 0, ends[0]
        for one in sorted(self.answers, key=lambda one: one.begun):
            while ends[seen].ended < one.begun:
                newest = max(newest, ends[seen], key=lambda answer: rank[answer.version])
                seen += 1
            behind = rank[newest.version] - rank[one.version]
            assert newest.ended >= one.begun or behind <= mix, f"{one} began after {newest}"


@contextlib.asynccontextmanager
async def house(
    folder: Path, url: str = "", policy: FleetPolicy = POLICY, *, replicas: int = 0
) -> AsyncIterator[House]:
    """A new channel. Callers and witness end with it."""
    url = url or f"sqlite:///{folder}/ledger.db"
    async with ledger.open(url) as led:
        found = House(folder, led, url, policy)
        found.held = [proc.HeldPort() for _ in range(replicas)]
        watching = asyncio.create_task(found.witness.run())
        async with found.publisher, found.fleet:
            try:
                yield found
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)


@contextlib.asynccontextmanager
async def under_load(home: House) -> AsyncIterator[None]:
    """Four callers ask all the time; a caller that fails ends the test."""
    tasks = [asyncio.create_task(home.call(seed)) for seed in range(4)]
    try:
        yield
        for task in tasks:
            if task.done():
                await task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Slow(Engine):
    """An engine in this process. Every step takes a moment."""

    def __init__(self, moment_s: float = 0.0) -> None:
        self.moment_s = moment_s

    async def stage(self, pin: Pin) -> None:
        """See `Engine.stage`."""
        await asyncio.sleep(self.moment_s)

    async def switch(self, pin: Pin) -> None:
        """See `Engine.switch`."""
        await asyncio.sleep(self.moment_s)


@contextlib.asynccontextmanager
async def here(home: House, count: int, moment_s: float = 0.0) -> AsyncIterator[list[Replica]]:
    """Replicas in this process, each with a lease of its own."""
    async with contextlib.AsyncExitStack() as stack:
        found = []
        for index in range(count):
            subscriber = home.subscriber(f"r{index}", f"here:{index}")
            await stack.enter_async_context(subscriber)
            replica = Replica(subscriber, Slow(moment_s))
            found.append(await stack.enter_async_context(replica))
        yield found


async def test_a_module_follows_its_fleet(tmp_path: Path) -> None:
    """A torch module in this process computes with each version after its update; what does
    not fit leaves it as it is, and the owner reads why at once.
    """
    module = torch.nn.Linear(ITEMS, 1, bias=False).requires_grad_(False)
    async with house(tmp_path) as home:
        subscriber = home.subscriber("module", "here:0")
        async with subscriber, Replica(subscriber, ModuleEngine(module)) as replica:
            await refused(replica.admit(timeout_s=0.1), Unavailable)
            for version in (1, 2):
                row = torch.tensor([weights(version)])
                await home.publisher.publish(version, {"weight": row})
                assert (await home.fleet.update(version)).serving == ("module",)
                async with replica.admit() as served:
                    assert served == version
                    assert float(module(torch.ones(ITEMS))) == number(version)
            await home.publisher.publish(3, {"weight": torch.zeros(2, 2)})
            with pytest.raises(Unavailable, match=r"module: Mistake.*does not fit"):
                await home.fleet.update(3)
            async with replica.admit() as served:
                assert served == 2
                assert float(module(torch.ones(ITEMS))) == number(2)
            with pytest.raises(Mistake, match="rollback"):
                await home.fleet.update(1)


async def test_a_corrupt_version_changes_nothing(tmp_path: Path) -> None:
    """A byte flipped on disk: the update fails, everybody serves on; tried again it fails again
    with the same reason. When the byte is right the next try works: an old failure does not count.
    """
    async with house(tmp_path) as home, here(home, 3) as replicas:
        await home.publish(1)
        assert len((await home.fleet.update(1)).serving) == 3
        await home.publish(2)
        [shard] = Path(home.root).glob("policy/step_2/*.safetensors")
        flip(shard, shard.stat().st_size - 1)
        for _ in range(2):
            with pytest.raises(Unavailable, match="Corrupt"):
                await home.fleet.update(2)
            assert len(await home.fleet.addresses(1)) == 3
            assert await home.fleet.addresses(2) == []
            for replica in replicas:
                async with replica.admit() as served:
                    assert served == 1
        flip(shard, shard.stat().st_size - 1)
        assert len((await home.fleet.update(2)).serving) == 3
        assert home.witness.target.allowed == (2,)


async def test_a_slow_caller_fails_the_round_and_not_its_replica(tmp_path: Path) -> None:
    """Somebody does not leave in time: the round fails, and that replica serves on at once,
    also for others; when he has left, the next round works.
    """
    policy = FleetPolicy(stage_s=5.0, hold_s=0.5)
    async with house(tmp_path, policy=policy) as home, here(home, 2) as replicas:
        await home.publish(1)
        await home.fleet.update(1)
        await home.publish(2)
        async with replicas[0].admit():
            with pytest.raises(Unavailable, match="r0 did not stop"):
                await home.fleet.update(2)
            async with replicas[0].admit(timeout_s=5.0) as served:
                assert served == 1
        await home.fleet.update(2)
        assert len(await home.fleet.addresses(2)) == 2


@pytest.mark.parametrize("phase", ["staging", "holding", "serving"])
async def test_the_owner_is_killed(tmp_path: Path, phase: str) -> None:
    """SIGKILL in each phase of a round: the replicas finish it, and a new owner goes on."""
    async with house(tmp_path) as home, here(home, 3, moment_s=0.15) as replicas:
        await home.publish(1)
        await home.fleet.update(1)
        await home.publish(2)
        async with contextlib.AsyncExitStack() as inside:
            await inside.enter_async_context(replicas[0].admit())
            with home.start("owner", version=2, stage_s=15.0, hold_s=10.0) as kid:
                if phase != "serving":
                    await home.witness.until(lambda: home.witness.target.phase == phase)
                else:
                    await home.witness.until(lambda: home.witness.target.phase == "holding")
                    await inside.aclose()
                    await home.witness.until(lambda: home.witness.target.phase == phase)
                kid.child.kill_group()
        await home.witness.until(lambda: home.witness.target.phase == "idle")
        assert home.witness.target.allowed == (2,)
        await home.offered(2, 3)
        await home.publish(3)
        assert len((await home.fleet.update(3)).serving) == 3


@pytest.fixture(
    params=["sqlite", pytest.param("etcd", marks=[pytest.mark.long, pytest.mark.etcd])]
)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A ledger beside the channel, or a real etcd."""
    if request.param == "sqlite":
        yield ""
        return
    with EtcdServer(tmp_path / "etcd") as server:
        yield f"etcd://{server.host}:{server.port}"


async def test_a_killed_replica_comes_back(tmp_path: Path, url: str) -> None:
    """It is not offered while it is away, and again only when it serves the right version."""
    async with house(tmp_path, url, replicas=2) as home:
        await home.publish(1)
        with home.replica(0) as first, home.replica(1) as second:
            await asyncio.gather(first.ahear("ready"), second.ahear("ready"))
            async with under_load(home):
                await home.fleet.update(1)
                await home.offered(1, 2)
                second.child.kill_group()
                await home.publish(2)
                assert (await home.fleet.update(2)).serving == ("r0",)
                assert await home.fleet.addresses() == [f"127.0.0.1:{home.held[0].port}"]
                with home.replica(1) as again:
                    await again.ahear("ready")
                    await home.offered(2, 2)
                    answer = None
                    while answer is None:
                        answer = await home.ask(f"127.0.0.1:{home.held[1].port}", wait_s=0.5)
                    assert answer.version == 2
        await home.judge(mix=0)


class Storm:
    """Three replicas under load while versions roll and things happen to them."""

    def __init__(self, home: House, seed: int) -> None:
        self.home = home
        self.luck = random.Random(seed)
        self._lives: dict[int, contextlib.ExitStack] = {}
        self._kids: dict[int, Kid] = {}

    async def start(self, index: int) -> None:
        """Start a replica, or start it again."""
        if index in self._lives:
            self._lives[index].close()
        self._lives[index] = contextlib.ExitStack()
        kid = self.home.replica(index, (REFUSED,) if index == 2 else ())
        self._kids[index] = self._lives[index].enter_context(kid)
        await self._kids[index].ahear("ready", LIMIT_S)

    async def kill(self, index: int) -> None:
        """SIGKILL; it comes back after a while."""
        self._kids[index].child.kill_group()
        await asyncio.sleep(self.luck.random())
        await self.start(index)

    async def stop(self, index: int) -> None:
        """SIGSTOP until the others answer with the next version, then go on."""
        child, home = self._kids[index].child, self.home
        last = home.witness.allowed[-1]
        child.signal(signal.SIGSTOP)
        async with asyncio.timeout(LIMIT_S):
            while home.witness.allowed[-1] == last or (
                home.answers[-1].version != home.witness.allowed[-1][0]
            ):
                await asyncio.sleep(0.02)
        # Many wait at its port, so that it is asked before it has heard of anything.
        address = f"127.0.0.1:{home.held[index].port}"
        waiting = [asyncio.create_task(home.ask(address)) for _ in range(30)]
        await asyncio.sleep(0.1)
        child.signal(signal.SIGCONT)
        await asyncio.gather(*waiting)

    async def update(self, version: int) -> None:
        """Bring a version to the fleet, as often as it takes."""
        async with asyncio.timeout(2 * LIMIT_S):
            while True:
                try:
                    await self.home.fleet.update(version)
                    return
                except HoldfastError:
                    await asyncio.sleep(0.1)

    def close(self) -> None:
        """End all replicas."""
        for life in self._lives.values():
            life.close()


@pytest.mark.long
@pytest.mark.parametrize("mix", [0, 1])
async def test_a_storm(tmp_path: Path, mix: int) -> None:
    """Three replicas under load while versions roll; any two are killed or stopped beyond their
    leases, one cannot load a version: every answer is by an acknowledged version, and none by a
    version that was left behind. Without a mix and with one.
    """
    luck = random.Random(mix)
    serving = [0, 1]  # the third may be left behind, and is not to be waited for
    kinds: tuple[list[str], ...] = (["kill"], ["stop"], ["kill", "stop"], ["kill", "kill"], [])
    plan: list[dict[int, str]] = [{}, {0: "kill"}, {1: "stop"}]
    for _ in range(6):
        what = luck.choice(kinds)
        plan.append(dict(zip([luck.choice(serving), 2], what, strict=False)))
    plan.append({})
    print(f"mix {mix}: {plan}")
    policy = POLICY.model_copy(update={"mix": mix})
    async with house(tmp_path, policy=policy, replicas=3) as home:
        storm = Storm(home, mix)
        try:
            await asyncio.gather(*(storm.start(index) for index in range(3)))
            async with under_load(home):
                for version, happens in enumerate(plan, 1):
                    await home.publish(version)
                    acts = [getattr(storm, what)(index) for index, what in happens.items()]
                    await asyncio.gather(storm.update(version), *acts)
                    if version == REFUSED:
                        picky = f"127.0.0.1:{home.held[2].port}"
                        assert picky not in await home.fleet.addresses(version)
                        assert mix or picky not in await home.fleet.addresses()
                await home.offered(len(plan), 3)
                await asyncio.sleep(0.2)
        finally:
            storm.close()
        await home.judge(mix)
        assert {one.version for one in home.answers} >= {1, len(plan)}
        assert {one.name for one in home.answers} == {"r0", "r1", "r2"}
        assert len(home.answers) > 200
