"""A fleet: all replicas of a channel go from one version to the next together.

    fleet = Fleet(ledger, "policy")
    async with fleet:
        await fleet.update(42)
        addresses = await fleet.addresses()

Replicas are whoever joined the channel as a `Replica` with an address: in this process, in
others, or as the agent of a server that knows nothing of Holdfast. `plan.py` has the
rules; this file begins rounds and waits for their end.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from typing import Self

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from holdfast.contrib.fleets.follower import Follower, members_of, target_of
from holdfast.contrib.fleets.plan import begin, offered
from holdfast.errors import (
    Conflict,
    Fenced,
    Gone,
    Mistake,
    Retriable,
    TimedOut,
    Unavailable,
    UnknownOutcome,
)
from holdfast.ledger import Entry, Ledger, LiveRuntime, Put, Runtime, absent, same_life, unchanged
from holdfast.ledger.records import put
from holdfast.timeouts import DEFAULTS
from holdfast.weights.layout import check_name, check_version
from holdfast.weights.records import Consumer, Keys, Target

__all__ = ["Fleet", "FleetPolicy", "Update"]

PATIENCE = 6
"""How often a new round looks, some 3 s in all, whether old failures were taken back."""


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
    hold_s: float = Field(
        default=DEFAULTS.fleet_hold_s,
        gt=0,
        description="How long stopping may take; more than the lease of a replica.",
    )


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
        follower: Callable[[Runtime, Keys], Follower] = Follower,
    ) -> None:
        self._runtime = runtime or LiveRuntime(ledger)
        self._policy = policy or FleetPolicy()
        check_name("channel", channel)
        self._keys = Keys(check_name("run", run), channel)
        self._follower = follower(self._runtime, self._keys)
        self._following: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._following = self._runtime.spawn(self._follower.run(), name="fleet follows")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)

    async def addresses(self, version: int | None = None) -> list[str]:
        """Whom callers may ask now; with a version, who serves just that.

        Read from the ledger itself, so a replica that was taken out is never offered.
        """
        target, members = await self._look()
        found = [member.address for member in offered(target, members, version)]
        return list(dict.fromkeys(found))  # one that was started again may be there twice

    async def _look(self) -> tuple[Target, list[Consumer]]:
        entries = (await self._runtime.ledger.range(self._keys.live)).entries
        found = next((entry for entry in entries if entry.key == self._keys.target), None)
        return target_of(found), members_of(self._keys, entries)

    async def update(self, version: int, *, attempts: int = 1, rollback: bool = False) -> Update:
        """Bring a version to all replicas; raises `Unavailable` when the round failed.

        A failed round changes nothing for callers. `attempts` is how many rounds to try.
        Going back to an older version than is served must be asked for with `rollback`, so
        that an owner who was away for a while does not do it unawares.
        """
        check_version(version)
        for attempt in itertools.count(1):
            number = await self._begin(version, rollback)
            target, members = await self._finish(number)
            if not target.problem and version in target.allowed:
                return _outcome(version, members)
            if attempt >= attempts:
                problem = target.problem or f"version {version} is not served"
                raise Unavailable(problem, version=version)
            await self._runtime.sleep(min(30.0, 2.0**attempt))
        raise AssertionError("it counts for ever")

    async def _begin(self, version: int, rollback: bool) -> int:
        """Write the target of a new round; returns the round.

        A round that is under way is finished first, or joined when it is just what we want:
        we may have begun it ourselves, and our answer was lost, or we were killed.
        """
        limit_s = self._limit_s()
        deadline_s = self._runtime.now() + limit_s
        attempt = 0
        while True:
            try:
                entry = await self._runtime.ledger.get(self._keys.target)
                target = target_of(entry)
                if target.phase != "idle":
                    if self._is_ours(target, version):
                        return target.round
                    await self._follower.drive()
                elif attempt >= PATIENCE or not await self._stale(version):
                    begun = await self._write(entry, target, version, rollback)
                    if begun is not None:
                        return begun
            except (Retriable, UnknownOutcome):
                pass  # what became of it is seen when the target is read again
            attempt += 1
            if self._runtime.now() >= deadline_s:
                raise Conflict(
                    f"no round could be begun within {limit_s} s: the ledger is away, or another "
                    "owner keeps updating the fleet"
                )
            await self._runtime.sleep(min(1.0, 0.05 * 2 ** min(attempt, 10)))

    def _is_ours(self, target: Target, version: int) -> bool:
        """Whether the round under way brings this version by our policy."""
        coming = target.staging if target.staging is not None else target.allowed[0]
        policy = self._policy.model_dump()
        return coming == version and all(getattr(target, name) == policy[name] for name in policy)

    async def _stale(self, version: int) -> bool:
        """Whether a replica still reports that it failed with this version in an old round.

        It takes that back when it hears of that round's end; the next round would otherwise
        count it as a failure of its own. One that keeps trying keeps saying so.
        """
        target, members = await self._look()
        return version not in target.allowed[:1] and any(
            member.address and member.failed == version for member in members
        )

    async def _write(
        self, entry: Entry | None, target: Target, version: int, rollback: bool
    ) -> int | None:
        """Write a new round over the idle target that was read; None when it has changed."""
        ledger, key = self._runtime.ledger, self._keys.version(version)
        if target.allowed and version < target.allowed[0] and not rollback:
            raise Mistake(
                f"the fleet serves version {target.allowed[0]}: going back to {version} "
                "needs rollback=True",
                version=version,
            )
        there = await ledger.get(key)
        if there is None:
            raise Gone(f"version {version} is not there to be served", version=version)
        begun = msgspec.structs.replace(begin(target, version), **self._policy.model_dump())
        txn = await ledger.txn(
            [unchanged(entry) if entry else absent(self._keys.target), same_life(there)],
            # Touching the version's record keeps a sweep from giving it up now.
            [put(self._keys.target, begun, over=entry), Put(key, there.value)],
        )
        return begun.round if txn.succeeded else None

    async def _finish(self, number: int) -> tuple[Target, list[Consumer]]:
        """Wait for the end of a round, and help it along."""
        limit_s = self._limit_s()
        deadline_s = self._runtime.now() + limit_s
        while True:
            late = self._runtime.now() >= deadline_s  # even then: we may have been stopped
            seen = self._follower.count
            with contextlib.suppress(Retriable, UnknownOutcome):
                target, members = await self._look()
                if target.round != number:
                    raise Fenced(f"round {number} was followed by round {target.round}")
                if target.phase == "idle":
                    return target, members
                await self._follower.drive()
            if late:
                raise TimedOut(f"round {number} of the fleet did not end within {limit_s} s")
            await self._follower.moved(seen)

    def _limit_s(self) -> float:
        """How long a round may take, with something to spare."""
        return self._policy.stage_s + 2 * self._policy.hold_s + 30.0


def _outcome(version: int, members: list[Consumer]) -> Update:
    replicas = [member for member in members if member.address]
    serving = tuple(one.name for one in replicas if one.acknowledged == version)
    behind = tuple(one.name for one in replicas if one.acknowledged != version)
    return Update(version, serving, behind)
