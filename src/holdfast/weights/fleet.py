"""A fleet: all replicas of a channel go from one version to the next together.

    fleet = Fleet(ledger, "policy")
    async with fleet:
        await fleet.update(42)
        addresses = await fleet.addresses()

Replicas are whoever joined the channel as a `Replica` with an address: in this process, in
others, or as the agent of a server that knows nothing of Holdfast. `fleet_plan.py` has the
rules; this file begins rounds and waits for their end.
"""

import asyncio
import contextlib
from typing import Self

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from holdfast.errors import (
    Conflict,
    Fenced,
    Gone,
    HoldfastError,
    Mistake,
    Retriable,
    TimedOut,
    Unavailable,
    UnknownOutcome,
)
from holdfast.ledger import Ledger, LiveRuntime, Put, Runtime, absent, same_life, unchanged
from holdfast.ledger.records import decode, put
from holdfast.weights.fleet_plan import begin, offered
from holdfast.weights.follower import Follower
from holdfast.weights.layout import check_name, check_version
from holdfast.weights.records import Consumer, Keys, Target

__all__ = ["Fleet", "FleetPolicy", "Update"]

ATTEMPTS = 40


class FleetPolicy(BaseModel):
    """How a fleet goes from one version to the next."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mix: int = Field(
        default=0,
        ge=0,
        le=8,
        description="How many older versions may be served beside the newest; 0: all replicas "
        "stop for a moment and begin again together.",
    )
    least: int = Field(default=1, ge=1, description="Replicas that must have loaded a version.")
    stage_s: float = Field(default=120.0, gt=0, description="How long loading may take.")
    hold_s: float = Field(default=30.0, gt=0, description="How long stopping may take.")


class Update(msgspec.Struct, frozen=True):
    """How a round ended."""

    version: int
    serving: tuple[str, ...]
    left_behind: tuple[str, ...]
    """Replicas that are alive and do not serve this version; they catch up by themselves."""


class Fleet:
    """The owner of a fleet's target. There may be several; rounds are compared, never mixed."""

    def __init__(
        self,
        ledger: Ledger,
        channel: str = "policy",
        policy: FleetPolicy | None = None,
        *,
        run: str = "default",
        runtime: Runtime | None = None,
    ) -> None:
        self._runtime = runtime or LiveRuntime(ledger)
        self._policy = policy or FleetPolicy()
        check_name("channel", channel)
        self._keys = Keys(check_name("run", run), channel)
        self._follower = Follower(self._runtime, self._keys)
        self._following: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._following = self._runtime.spawn(self._follower.run(), name="fleet follows")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._following is not None:
            self._following.cancel()

    async def addresses(self, version: int | None = None) -> list[str]:
        """Whom callers may ask now; with a version, who serves just that.

        Read from the ledger itself, so a replica that was taken out is never offered.
        """
        target, members = await self._look()
        return [member.address for member in offered(target, members, version)]

    async def _look(self) -> tuple[Target, list[Consumer]]:
        entries = (await self._runtime.ledger.range(self._keys.live)).entries
        target, members = Target(), []
        for entry in entries:
            if entry.key == self._keys.target:
                target = decode(Target, entry)
            elif entry.key.startswith(self._keys.consumers):
                members.append(decode(Consumer, entry))
        return target, members

    async def update(self, version: int, *, attempts: int = 1, rollback: bool = False) -> Update:
        """Bring a version to all replicas; raises `Unavailable` when the round failed.

        A failed round changes nothing for callers. `attempts` is how many rounds to try.
        Going back to an older version than is served must be asked for with `rollback`, so
        that an owner who was away for a while does not do it unawares.
        """
        check_version(version)
        failure: HoldfastError | None = None
        for attempt in range(attempts):
            if attempt:
                await self._runtime.sleep(min(30.0, 2.0**attempt))
            number = await self._begin(version, rollback)
            try:
                return await self._finish(version, number)
            except Unavailable as error:
                failure = error
        assert failure is not None
        raise failure

    async def _begin(self, version: int, rollback: bool) -> int:
        """Write the target of a new round; returns the round."""
        ledger, key = self._runtime.ledger, self._keys.version(version)
        tried: Target | None = None
        for attempt in range(ATTEMPTS):
            if attempt:
                await self._runtime.sleep(min(1.0, 0.05 * 2**attempt))
            try:
                entry = await ledger.get(self._keys.target)
                target = decode(Target, entry) if entry else Target()
                if tried is not None and target == tried:
                    return tried.round  # an answer was lost
                if target.phase != "idle":
                    await self._follower.drive()  # an unfinished round is finished first
                    continue
                if target.allowed and version < target.allowed[0] and not rollback:
                    raise Mistake(
                        f"the fleet serves version {target.allowed[0]}: going back to {version} "
                        "needs rollback=True",
                        version=version,
                    )
                there = await ledger.get(key)
                if there is None:
                    raise Gone(f"version {version} is not there to be served", version=version)
                tried = msgspec.structs.replace(
                    begin(target, version), **self._policy.model_dump()
                )
                txn = await ledger.txn(
                    [
                        unchanged(entry) if entry else absent(self._keys.target),
                        same_life(there),
                    ],
                    # Touching the version's record keeps a sweep from giving it up now.
                    [put(self._keys.target, tried, over=entry), Put(key, there.value)],
                )
                if txn.succeeded:
                    return tried.round
            except (Retriable, UnknownOutcome):
                continue
        raise Conflict("the fleet's target kept changing: is another owner updating it?")

    async def _finish(self, version: int, number: int) -> Update:
        """Wait for the end of a round, and help it along."""
        limit_s = self._policy.stage_s + 2 * self._policy.hold_s + 30.0
        deadline_s = self._runtime.now() + limit_s
        while self._runtime.now() < deadline_s:
            seen = self._follower.count
            with contextlib.suppress(Retriable, UnknownOutcome):
                target, members = await self._look()
                if target.round != number:
                    raise Fenced(f"round {number} was followed by round {target.round}")
                if target.phase == "idle":
                    return _outcome(version, target, members)
                await self._follower.drive()
            await self._follower.moved(seen)
        raise TimedOut(f"round {number} of the fleet did not end within {limit_s} s")


def _outcome(version: int, target: Target, members: list[Consumer]) -> Update:
    if target.problem or version not in target.allowed:
        raise Unavailable(target.problem or f"version {version} is not served", version=version)
    replicas = [member for member in members if member.address]
    serving = tuple(one.name for one in replicas if one.acknowledged == version)
    behind = tuple(one.name for one in replicas if one.acknowledged != version)
    return Update(version, serving, behind)
