"""Following a fleet: its target and its members, and the next step when we see it first."""

import asyncio
import contextlib
from collections.abc import Callable, Iterable

from holdfast.contrib.fleets.plan import advance
from holdfast.ledger import Entry, Runtime, absent, follow, unchanged
from holdfast.ledger.records import decode, put
from holdfast.ledger.unreadable import Unreadable, readable
from holdfast.timeouts import DEFAULTS
from holdfast.weights.records import Consumer, Keys, Target

__all__ = ["Follower", "Plan", "members_of", "target_of"]

Plan = Callable[[Target, Iterable[Consumer], float], Target | None]
"""The fleet's next target, or None: from the target, the members, and how long it has stood."""


def target_of(entry: Entry | None) -> Target:
    """What stands under a fleet's key; nothing there means that nothing is to be done."""
    return decode(Target, entry) if entry else Target()


def members_of(keys: Keys, entries: Iterable[Entry]) -> list[Consumer]:
    """The consumers among these entries whose records can be read."""
    read = [readable(Consumer, one) for one in entries if one.key.startswith(keys.consumers)]
    return [one for one in read if not isinstance(one, Unreadable)]


class Follower:
    """What the ledger says of a fleet, kept up to date by `run`."""

    def __init__(self, runtime: Runtime, keys: Keys, *, plan: Plan = advance) -> None:
        self._runtime = runtime
        self._plan = plan
        self._keys = keys
        self._entry: Entry | None = None
        self._since_s = 0.0
        self._moved = asyncio.Event()
        self.target = Target()
        self.members: tuple[Consumer, ...] = ()
        self.count = 0
        """How often anything was seen to move; 0 before the first look."""

    async def run(self) -> None:
        """Follow for ever."""
        async with contextlib.aclosing(follow(self._runtime, self._keys.live)) as steps:
            async for step in steps:
                self._take(step.entries)

    def _take(self, entries: dict[str, Entry]) -> None:
        entry = entries.get(self._keys.target)
        if self.count == 0 or entry != self._entry:
            self._entry = entry
            self._since_s = self._runtime.now()
            self.target = target_of(entry)
        self.members = tuple(members_of(self._keys, entries.values()))
        self.count += 1
        self._moved.set()

    def forget(self) -> None:
        """Know nothing any more, until `run` has looked again."""
        self._entry, self.target, self.members = None, Target(), ()

    async def read(self) -> Target:
        """The target as it is now."""
        return target_of(await self._runtime.ledger.get(self._keys.target))

    async def moved(self, seen: int) -> None:
        """Wait until something moved since `count` was `seen`, or it is time to look again."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DEFAULTS.fleet_look_s):
                while self.count == seen:
                    self._moved.clear()
                    await self._moved.wait()

    async def drive(self) -> None:
        """Take the fleet's next step, if it is due and nobody was faster."""
        if self.count == 0:
            return
        entry = self._entry
        following = self._plan(self.target, self.members, self._runtime.now() - self._since_s)
        if following is not None:
            await self._runtime.ledger.txn(
                [unchanged(entry) if entry else absent(self._keys.target)],
                [put(self._keys.target, following, over=entry)],
            )
