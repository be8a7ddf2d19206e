"""A node whose workers somebody else looks after: torch's agent.

`attend` starts and stops workers itself. Here the agent does, and only asks now and then: for the
next place (`join`), whether its cycle is over (`stale`). Between the two this object answers for
the node: it keeps the lease, tells the others at once when a new cycle was heard of, and enters
anew when the lease was lost.

Invariants:

- `join` is called only when no worker of this node runs, so coming back from a cycle that still
  runs means that its workers have failed, and ends it for all;
- a place is used once: `join` returns a place in a later cycle than the last;
- every cycle that the node is ready for has a port of its own, on which it listens before it
  tells anybody;
- what ends the run for others (`fail`) compares this life of the node: one that was paused beyond
  its lease ends nothing.

All of it happens in one event loop, except for `stale`, which any thread may ask.
"""

import asyncio
import contextlib
import socket
import time
from functools import partial

import msgspec

from holdfast import retry
from holdfast.contrib.torchrun.options import Options
from holdfast.errors import Fenced, Gone, HoldfastError, LeaseLost
from holdfast.ledger.follow import follow
from holdfast.ledger.records import KEEP, Stored, Verdict, decode, update
from holdfast.ledger.runtime import Runtime
from holdfast.ledger.types import Compare
from holdfast.rendezvous.address import listen
from holdfast.rendezvous.board import Board
from holdfast.rendezvous.decide import Clock, Wait, decide
from holdfast.rendezvous.overview import parked_line, say
from holdfast.rendezvous.probe import ProbeServer, is_alive, trouble
from holdfast.rendezvous.records import Cause, Cycle, Keys, Parked
from holdfast.rendezvous.rendezvous import Place, Rendezvous
from holdfast.timeouts import DEFAULTS

__all__ = ["Ended", "Membership", "TooLate", "fail"]

_WORKERS_FAILED = "its workers failed; the log of its torchrun says how"


class Ended(Exception):  # a control flow within this package
    """The run is over."""

    def __init__(self, cycle: Cycle) -> None:
        super().__init__(cycle.state)
        self.cycle = cycle


class TooLate(Exception):  # a control flow within this package
    """A cycle was open for longer than this node waits."""


class Membership:
    """One node in one run. `close` it, in the end."""

    def __init__(self, runtime: Runtime, options: Options) -> None:
        self._runtime = runtime
        self._options = options
        self._keys = Keys(options.run)
        self._listener: socket.socket | None = None
        self._rendezvous: Rendezvous | None = None
        self._ready = 0
        self._used = 0
        self._head: Stored[Cycle] | None = None
        self._life = 0
        self._watching: asyncio.Task[None] | None = None
        self._stale = False
        self._probes: ProbeServer | None = None
        self._parked: Parked | None = None
        self.place: Place | None = None
        """The last place that `join` has returned."""
        self.took_part = False
        """Whether this node has met the run before it was over."""

    def stale(self) -> bool:
        """Whether the cycle of the last place is over, or the lease on it lost."""
        rendezvous = self._rendezvous
        return self._stale or rendezvous is None or self._runtime.now() >= rendezvous.valid_until

    def take_listener(self) -> socket.socket:
        """The socket on the place's port, for rank 0."""
        listener, self._listener = self._listener, None
        assert listener is not None
        return listener

    # ---- from cycle to cycle ---------------------------------------------------

    async def join(self) -> Place:
        """Wait for a place in the next cycle. A spare waits here, for as long as the run lasts.

        Raises `Ended` when the run is over, `TooLate` when a cycle is open for longer than the
        join time-out, and `Retriable` when the ledger is away for longer.
        """
        await self._end_watch()
        await self.give_up(Cause(kind="failed", detail=_WORKERS_FAILED))
        pauses = retry.Pauses(self._runtime)
        limit = self._runtime.now() + self._options.join_s
        while True:
            try:
                rendezvous = self._rendezvous or await self._enter()
                limit = self._runtime.now() + self._options.join_s
                pauses.reset()
                await self._wait_for_place(rendezvous)
            except LeaseLost:
                await self._leave()
            except retry.AGAIN as error:
                if self._runtime.now() > limit:
                    raise
                await pauses.wait(error)
            else:
                break
        assert self.place is not None
        self._stale = False
        self._watching = self._runtime.spawn(self._watch(), name="torchrun's cycle")
        return self.place

    async def _enter(self) -> Rendezvous:
        options = self._options
        if self._probes is None:
            self._probes = ProbeServer(options.node.address, options.run, options.name)
            await self._probes.start()
        node = msgspec.structs.replace(
            options.node, port=self._new_port(), probe_port=self._probes.port
        )
        rendezvous = Rendezvous(
            self._runtime,
            options.run,
            options.name,
            node,
            options.rules,
            lease_s=options.lease_s,
            is_alive=partial(is_alive, options.run, options.name),
        )
        await rendezvous.__aenter__()
        self._rendezvous = rendezvous
        self._ready = rendezvous.head.record.number
        self.took_part |= not rendezvous.head.record.final
        return rendezvous

    async def _wait_for_place(self, rendezvous: Rendezvous) -> None:
        head = rendezvous.head
        open_since = self._runtime.now()
        while True:
            cycle = head.record
            if cycle.final:
                raise Ended(cycle)
            self._tell_parked(rendezvous, head)
            if cycle.number != self._ready:
                await rendezvous.ready(head, port=self._new_port())
                self._ready = cycle.number
            place = rendezvous.place(head)
            if place is not None and place.cycle > self._used:
                break
            if cycle.state != "open":
                head = await rendezvous.changed(head)
                open_since = self._runtime.now()
                continue
            left_s = open_since + self._options.join_s - self._runtime.now()
            try:
                async with asyncio.timeout(left_s):
                    head = await rendezvous.changed(head)
            except TimeoutError:
                raise TooLate(await self._missing()) from None
        self._head, self.place, self._used = head, place, place.cycle
        self._life = cycle.members[place.rank].life
        if place.rank != 0:
            self._close_listener()

    def _tell_parked(self, rendezvous: Rendezvous, head: Stored[Cycle]) -> None:
        parked = rendezvous.parked(head)
        if parked is not None and parked != self._parked:
            say(parked_line(parked.reason))
        self._parked = parked

    async def _missing(self) -> str:
        """Why this node's wait for a place has lasted too long."""
        found = await self._runtime.ledger.range(self._keys.root)
        view = Board(self._keys, found.entries).view()
        verdict = decide(view, Clock()) if view is not None else Wait()
        missing = verdict.missing if isinstance(verdict, Wait) else "the cycle was not closed"
        return (
            f"no place in the run {self._options.run!r} within {self._options.join_s:g} s "
            f"(--rdzv-conf join_timeout): {missing}. The run is not closed: start this node again"
        )

    async def unreached(self) -> bool:
        """Report that this node does not reach rank 0, and wait until the cycle has ended.

        False: the closer has not ended it.
        """
        rendezvous, head = self._rendezvous, self._head
        if rendezvous is None or head is None:
            return True
        try:
            async with asyncio.timeout(DEFAULTS.unreached_s):
                await rendezvous.unreached(head.record.number)
                await rendezvous.changed(head)
        except TimeoutError:
            return False
        except LeaseLost:
            pass  # and with it the cycle
        return True

    async def probe(self) -> str:
        """Why rank 0 of the last place is not reached; empty: it is, or cannot be asked."""
        place = self.place
        assert place is not None
        if not place.rank or not place.probe_port:
            return ""
        return await trouble(place.address, place.probe_port, self._options.run, place.first)

    async def _watch(self) -> None:
        """Say that the cycle is over, to the agent and to the other nodes."""
        rendezvous, head = self._rendezvous, self._head
        assert rendezvous is not None
        assert head is not None
        try:
            while True:
                head = await rendezvous.changed(head)
                self._stale = True
                if head.record.final:
                    return
                await rendezvous.heard(head)
        except HoldfastError:
            self._stale = True  # `join` meets the same trouble, and says what it is

    async def give_up(self, cause: Cause) -> None:
        """End the cycle of the last place, unless it is over."""
        if self._rendezvous is not None and self._head is not None:
            with contextlib.suppress(LeaseLost):
                await self._rendezvous.restart(self._head, cause)
        self._head = None

    # ---- ends ------------------------------------------------------------------

    async def finish(self) -> bool:
        """Record that all workers of this node have succeeded. False: the cycle is over."""
        if self._rendezvous is None or self._head is None:
            return False
        return await self._rendezvous.succeed(self._head)

    async def outcome(self) -> Cycle:
        """Wait until the run, or the cycle of the last place, has ended. Needs no lease."""
        assert self.place is not None
        async with contextlib.aclosing(follow(self._runtime, self._keys.head)) as steps:
            async for step in steps:
                entry = step.entries.get(self._keys.cycle)
                if entry is None:
                    raise Gone("the run's records were removed", key=self._keys.cycle)
                cycle = decode(Cycle, entry)
                if cycle.final or cycle.number != self.place.cycle:
                    return cycle
        raise AssertionError("following a prefix does not end")

    async def fail(self, cause: Cause) -> None:
        """End the run for all, if this life of the node is still in it.

        If the node alone is to blame and a spare can take its rank, only its part in it ends.
        """
        rendezvous, head = self._rendezvous, self._head
        if rendezvous is not None and head is not None:
            with contextlib.suppress(LeaseLost):
                if await rendezvous.parks(head, self._named(cause)):
                    await rendezvous.restart(head, cause)
                    return
        if self._life:
            key = self._keys.node(self._options.name)
            guard = Compare(key, "create", "==", self._life)
            with contextlib.suppress(Fenced):
                await fail(self._runtime, self._keys, self._named(cause), guard)

    async def close(self) -> None:
        """Leave, and let go of everything."""
        if self._probes is not None:
            self._probes.close()
        await self._end_watch()
        await self._leave()

    def _named(self, cause: Cause) -> Cause:
        return msgspec.structs.replace(cause, node=self._options.name)

    async def _leave(self) -> None:
        rendezvous, self._rendezvous = self._rendezvous, None
        self._head = None
        self._close_listener()
        if rendezvous is not None:
            await rendezvous.__aexit__()

    async def _end_watch(self) -> None:
        task, self._watching = self._watching, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    # ---- the port --------------------------------------------------------------

    def _new_port(self) -> int:
        self._close_listener()
        self._listener = listen(self._options.node.address)
        port: int = self._listener.getsockname()[1]
        return port

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None


async def fail(runtime: Runtime, keys: Keys, cause: Cause, *guards: Compare) -> None:
    """End a run for good, whichever cycle it is in. Does nothing when it is over."""

    def decide(cycle: Cycle | None) -> Cycle | Verdict:
        if cycle is None or cycle.final:
            return KEEP
        last = msgspec.structs.replace(cause, cycle=cycle.number, at=time.time())
        failed: Cycle = msgspec.structs.replace(cycle, state="failed", cause=last)
        return failed

    await update(runtime, keys.cycle, Cycle, decide, guards=guards, repeatable=True)
