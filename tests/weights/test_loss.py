"""Engines that lose what they serve: another process that is killed, at every step."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import kids
from holdfast import proc
from holdfast.contrib.fleets.fleet import FleetPolicy
from holdfast.contrib.fleets.replica import Engine, Replica
from holdfast.errors import Unavailable
from holdfast.weights import Pin
from kids import Kid
from patience import auntil
from weights.family import HERE, refused
from weights.fleet_child import number
from weights.test_fleet import POLICY, House, here, house


class ProcessEngine(Engine):
    """Another process holds what is served. `may_start` says whether it may be started again."""

    def __init__(self) -> None:
        self.kid: Kid | None = None
        self.may_start = True
        self.fragile = ""
        """The call in which the next process kills itself."""
        self.started = 0
        self._turn = asyncio.Lock()
        self._lives = contextlib.ExitStack()
        self._watching: list[asyncio.Task[None]] = []

    async def revive(self) -> None:
        """See `Engine.revive`."""
        if self.kid is not None and self.kid.child.alive():
            return
        if not self.may_start:
            raise Unavailable("the process may not be started yet")
        child = kids.start(HERE / "fleet_child.py", "engine", folder=HERE, fragile=self.fragile)
        self.fragile = ""
        self.started += 1
        self.kid = self._lives.enter_context(child)
        self._lives.callback(_close_input, self.kid.child)
        self._watching.append(asyncio.create_task(self._watch(self.kid.child)))

    async def _watch(self, child: proc.Child) -> None:
        while child.alive():
            await asyncio.sleep(0.01)
        self.lose()

    async def stage(self, pin: Pin) -> None:
        """See `Engine.stage`."""
        await self.call("stage", path=await pin.stage())

    async def switch(self, pin: Pin) -> None:
        """See `Engine.switch`. Fails when the process that had it staged is gone."""
        if await self.call("switch") != number(pin.number):
            raise RuntimeError("it was not staged in this process")

    async def call(self, do: str, **fields: str) -> float:
        """Ask the process; what it holds afterwards."""
        assert self.kid is not None
        async with self._turn:
            try:
                self.kid.tell(json.dumps({"do": do, **fields}))
                held: float = (await self.kid.ahear(do))["held"]
            except (OSError, AssertionError) as error:
                raise Unavailable(f"the process is gone: {error}") from error
            return held

    def kill(self) -> None:
        """SIGKILL; it is noticed a moment later."""
        assert self.kid is not None
        self.kid.child.process.kill()

    async def close(self) -> None:
        """End all processes."""
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        self._lives.close()


def _close_input(child: proc.Child) -> None:
    """Closing says once more that what was told last could not be written."""
    assert child.process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        child.process.stdin.close()


@contextlib.asynccontextmanager
async def remote(
    home: House, name: str, kind: type[ProcessEngine] = ProcessEngine
) -> AsyncIterator[tuple[Replica, ProcessEngine]]:
    """A replica whose engine is another process."""
    engine = kind()
    try:
        async with (
            home.subscriber(name, f"there:{name}") as subscriber,
            Replica(subscriber, engine) as replica,
        ):
            yield replica, engine
    finally:
        await engine.close()


async def come_to(home: House, version: int, addresses: list[str]) -> None:
    """Wait until just these are offered for a version."""

    async def offered() -> bool:
        return sorted(await home.fleet.addresses(version)) == addresses

    await auntil(offered)


async def answers(replica: Replica, engine: ProcessEngine, version: int) -> None:
    async with replica.admit() as now:
        assert now == version
        assert await engine.call("ask") == number(version)


async def test_what_was_lost_is_withdrawn_and_comes_back(tmp_path: Path) -> None:
    """A killed engine is not offered while its replica lives on; another process is loaded
    and offered again, with the same version and under the same lease."""
    async with house(tmp_path) as home, here(home, 1), remote(home, "far") as (replica, engine):
        await home.publish(1)
        assert len((await home.fleet.update(1)).serving) == 2
        await come_to(home, 1, ["here:0", "there:far"])
        await answers(replica, engine, 1)
        seat = replica._subscriber.seat_id
        for life in (1, 2):
            engine.may_start = False
            engine.kill()
            await come_to(home, 1, ["here:0"])
            assert replica.serving() is None
            assert replica._subscriber.acknowledged is None
            await refused(replica.admit(timeout_s=0.1), Unavailable)
            engine.may_start = True
            await come_to(home, 1, ["here:0", "there:far"])
            await answers(replica, engine, 1)
            assert engine.started == life + 1
        assert replica._subscriber.seat_id == seat


async def test_a_fleet_goes_on_without_what_was_lost(tmp_path: Path) -> None:
    """Who has lost what it served keeps nobody from the next version, and joins with that."""
    async with house(tmp_path) as home, here(home, 1), remote(home, "far") as (replica, engine):
        await home.publish(1)
        await home.fleet.update(1)
        engine.may_start = False
        engine.kill()
        await come_to(home, 1, ["here:0"])
        await home.publish(2)
        began = time.monotonic()
        assert "far" in (await home.fleet.update(2)).left_behind
        assert time.monotonic() - began < POLICY.stage_s, "it was waited for"
        engine.may_start = True
        await come_to(home, 2, ["here:0", "there:far"])
        await answers(replica, engine, 2)


async def test_whoever_is_inside_is_waited_for(tmp_path: Path) -> None:
    """After a loss nobody is let in; what was acknowledged counts until the last has left, so
    that no round overtakes an answer that is under way."""
    policy = FleetPolicy(stage_s=POLICY.stage_s, hold_s=0.5)
    async with (
        house(tmp_path, policy=policy) as home,
        here(home, 1),
        remote(home, "far") as (replica, engine),
    ):
        await home.publish(1)
        await home.fleet.update(1)
        await home.publish(2)
        async with replica.admit():
            engine.kill()
            await auntil(lambda: engine.losses == 1)
            assert replica.serving() is None
            with pytest.raises(Unavailable, match="far did not stop"):
                await home.fleet.update(2)
            assert replica._subscriber.acknowledged == 1
        await home.fleet.update(2)
        await come_to(home, 2, ["here:0", "there:far"])
        await answers(replica, engine, 2)


async def test_what_was_staged_is_lost_as_well(tmp_path: Path) -> None:
    """Killed between staging and switching: the version is staged again in the new process."""
    async with (
        house(tmp_path) as home,
        here(home, 1) as [near],
        remote(home, "far") as (replica, engine),
    ):
        await home.publish(1)
        await home.fleet.update(1)
        await home.publish(2)
        async with near.admit():
            update = asyncio.create_task(home.fleet.update(2))
            await home.witness.until(lambda: home.witness.target.phase == "holding")
            engine.kill()
            await auntil(lambda: engine.started == 2)
        await update
        await come_to(home, 2, ["here:0", "there:far"])
        await answers(replica, engine, 2)


class Fading(ProcessEngine):
    """Loses everything at the very end of its first switch, without an error."""

    async def switch(self, pin: Pin) -> None:
        """See `Engine.switch`."""
        await super().switch(pin)
        if self.started == 1:
            self.kill()
            await auntil(lambda: self.losses == 1)


@pytest.mark.parametrize("call", ["stage", "switch", "the end of a switch"])
async def test_killed_while_it_loads(tmp_path: Path, call: str) -> None:
    """An engine that dies in the middle of a call is loaded again in a new life; what was lost at
    the very end of a call is not served either, though nothing has failed."""
    kind = Fading if call == "the end of a switch" else ProcessEngine
    async with house(tmp_path) as home, remote(home, "far", kind) as (replica, engine):
        engine.fragile = call
        await home.publish(1)
        await home.fleet.update(1)
        await come_to(home, 1, ["there:far"])
        await answers(replica, engine, 1)
        assert engine.started == 2
