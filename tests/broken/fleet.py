"""The fleet with one rule left out each."""

import functools
from collections.abc import Callable, Iterable

import msgspec

from broken.variant import Make, variant
from holdfast.contrib.fleets.fleet import Fleet
from holdfast.contrib.fleets.follower import Follower, Plan
from holdfast.contrib.fleets.plan import advance, begin, servable
from holdfast.contrib.fleets.replica import Replica
from holdfast.errors import Gone
from holdfast.ledger import Entry, absent, unchanged
from holdfast.ledger.records import put
from holdfast.sim.protocols.fleet import FleetProtocol
from holdfast.weights.records import Consumer, Target

__all__ = ["BROKEN"]


def _skip_hold(target: Target, members: Iterable[Consumer], waited_s: float) -> Target | None:
    """A version is switched to while others are still served."""
    following = advance(target, members, waited_s)
    if following is None or following.phase != "holding":
        return following
    idle = [msgspec.structs.replace(one, held=target.round) for one in members]
    return advance(following, idle, 0.0)


def _skip_hold_in_mix(
    target: Target, members: Iterable[Consumer], waited_s: float
) -> Target | None:
    """Where a mix is allowed nobody is waited for who serves what is older than that."""
    return (_skip_hold if target.mix else advance)(target, members, waited_s)


class _Blind(Follower):
    """The target is changed without comparing it with what was read."""

    async def drive(self) -> None:
        """Take the next step over whatever is there."""
        following = self._plan(self.target, self.members, self._runtime.now() - self._since_s)
        if following is not None:
            await self._runtime.ledger.txn([], [put(self._keys.target, following)])


class _NoDrain(Replica):
    """What is served is changed while callers are being answered."""

    async def _close_door(self, still: Callable[[], bool] = lambda: True) -> bool:
        del still
        await super()._close_door(lambda: False)
        return True


class _HeldEarly(Replica):
    """A replica says that it has stopped, and then stops."""

    async def _guard(self) -> None:
        target = self._follower.target
        if target.phase == "holding" and self._held != target.round:
            self._held = target.round
            await self._tell()
        await super()._guard()


class _Unacknowledged(Replica):
    """A replica serves what it has loaded, before it has acknowledged it."""

    def serving(self) -> int | None:
        """What is loaded, as soon as the target allows it."""
        there = self._loaded in servable(self._follower.target)
        return self._loaded if there and self._subscriber.believes() else None


class _Hearsay(Replica):
    """The door is opened by what was heard of the target, perhaps before the present seat."""

    async def _open_door(self) -> None:
        async def heard() -> Target:
            return self._follower.target

        self._follower.read = heard  # type: ignore[method-assign]
        await super()._open_door()


class _AnySeat(Replica):
    """After a lease has ended the door stays open for the next seat."""

    def _counts(self) -> bool:
        return self._subscriber.believes()


class _NoClock(Replica):
    """A replica that is cut off serves on after its lease has ended by its own clock."""

    def _counts(self) -> bool:
        return self._seat == self._subscriber.seat_id


class _NoRestore(Replica):
    """After a failed switch it goes on with whatever the engine holds."""

    async def _go_back(self, version: int | None) -> None:
        self._loaded = version


class _NoTouch(Fleet):
    """A round begins without touching its version's record, so a sweep may take it."""

    async def _write(
        self, entry: Entry | None, target: Target, version: int, rollback: bool
    ) -> int | None:
        del rollback
        if await self._runtime.ledger.get(self._keys.version(version)) is None:
            raise Gone(f"version {version} is not there to be served")
        begun = msgspec.structs.replace(begin(target, version), **self._policy.model_dump())
        txn = await self._runtime.ledger.txn(
            [unchanged(entry) if entry else absent(self._keys.target)],
            [put(self._keys.target, begun, over=entry)],
        )
        return begun.round if txn.succeeded else None


class _Hasty(Fleet):
    """The owner hears that an update is done when its round has begun."""

    async def _finish(self, number: int) -> tuple[Target, list[Consumer]]:
        del number
        target, members = await self._look()
        return msgspec.structs.replace(target, allowed=(target.staging or 0,)), members


_with = functools.partial(variant, FleetProtocol)


def _follow(mistake: object, follower: Callable[..., Follower]) -> Make:
    """Everybody who follows the target does it in another way."""
    return _with(
        mistake,
        fleet=functools.partial(Fleet, follower=follower),
        replica=functools.partial(Replica, follower=follower),
    )


def _plan(plan: Plan) -> Make:
    return _follow(plan, functools.partial(Follower, plan=plan))


BROKEN: dict[str, Make] = {
    "": _plan(_skip_hold),
    "mix": _plan(_skip_hold_in_mix),
    "compare": _follow(_Blind, _Blind),
    "drain": _with(replica=_NoDrain),
    "held": _with(replica=_HeldEarly),
    "acknowledge": _with(replica=_Unacknowledged),
    "hearsay": _with(replica=_Hearsay),
    "seat": _with(replica=_AnySeat),
    "clock": _with(replica=_NoClock),
    "restore": _with(replica=_NoRestore),
    "touch": _with(fleet=_NoTouch),
    "hasty": _with(fleet=_Hasty),
}
