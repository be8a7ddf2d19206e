"""What a node does from cycle to cycle: the loop of every agent, real or simulated.

`attend` starts a crew (this node's workers) when the node holds a rank, stops it before it says
that it is ready for the next cycle, and reports how it went. It returns when the run has ended,
or when the node was asked to leave. Whatever happens, the crew has been stopped when it returns
or raises.
"""

import asyncio
from typing import Protocol

from holdfast.ledger.records import Stored
from holdfast.ledger.runtime import Runtime
from holdfast.rendezvous.records import Cause, Cycle, Parked
from holdfast.rendezvous.rendezvous import Place, Rendezvous

__all__ = ["Crew", "attend"]


class Crew(Protocol):
    """The workers of one node, cycle after cycle."""

    def port(self) -> int:
        """A port on which this node could listen as rank 0, new for every cycle."""

    async def start(self, place: Place) -> None:
        """Start workers for a place."""

    async def outcome(self) -> Cause | None:
        """Wait until the workers have ended: None when all have succeeded and nothing is left.

        With a cause others may still run: `stop` is called once the cause was reported.
        """

    async def stop(self, cause: Cause | None) -> None:
        """Stop whatever runs. `cause`: why, if it is for a new cycle."""

    async def leaving(self) -> str:
        """Wait until this node is to leave the run; returns why."""

    def parked(self, reason: str) -> None:
        """This node comes after all others from now on; told once."""


async def attend(runtime: Runtime, rendezvous: Rendezvous, crew: Crew) -> Cycle | None:
    """Take part until the run has ended; None: this node has left before."""
    attendance = _Attendance(runtime, rendezvous, crew)
    try:
        return await attendance.run()
    finally:
        await attendance.close()


class _Attendance:
    def __init__(self, runtime: Runtime, rendezvous: Rendezvous, crew: Crew) -> None:
        self._runtime = runtime
        self._rendezvous = rendezvous
        self._crew = crew
        self._started = 0
        self._is_up = False
        self._parked: Parked | None = None
        self._ready = rendezvous.head.record.number
        self._work: asyncio.Task[Cause | None] | None = None
        self._leaving = runtime.spawn(crew.leaving(), name="leaving")

    async def run(self) -> Cycle | None:
        head = self._rendezvous.head
        while not head.record.final:
            await self._follow(head)
            change = self._runtime.spawn(self._rendezvous.changed(head), name="change")
            try:
                waiting = [task for task in (change, self._work, self._leaving) if task]
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            finally:
                change.cancel()
            if self._work is not None and self._work.done():  # first: it may have succeeded
                cause, self._work = self._work.result(), None
                await self._report(head, cause)
            if self._leaving.done():
                await self._leave(head, self._leaving.result())
                return None
            if change.done() and not change.cancelled():
                head = change.result()
        return head.record

    async def _follow(self, head: Stored[Cycle]) -> None:
        """Do what a cycle asks of this node."""
        number = head.record.number
        parked = self._rendezvous.parked(head)
        if parked is not None and parked != self._parked:
            self._crew.parked(parked.reason)
        self._parked = parked
        if number != self._started and self._is_up:
            await self._rendezvous.heard(head)
            await self._stop(head.record.cause)
        if number != self._ready:
            await self._rendezvous.ready(head, port=self._crew.port())
            self._ready = number
        place = self._rendezvous.place(head)
        if place is not None and number != self._started:
            self._started, self._is_up = number, True
            await self._crew.start(place)
            self._work = self._runtime.spawn(self._crew.outcome(), name="work")

    async def _report(self, head: Stored[Cycle], cause: Cause | None) -> None:
        """Tell how it went, before anything is stopped: the first report says who failed first."""
        self._is_up = cause is not None
        if head.record.number != self._started:
            return
        if cause is None:
            await self._rendezvous.succeed(head)
        else:
            await self._rendezvous.restart(head, cause)

    async def _leave(self, head: Stored[Cycle], reason: str) -> None:
        """Let the workers end in peace, then tell the others: nobody waits for the lease."""
        working = self._work is not None
        await self._stop(None)
        if working and head.record.number == self._started:
            await self._rendezvous.restart(head, Cause(kind="withdrew", detail=reason))

    async def _stop(self, cause: Cause | None) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.cancel()
            await asyncio.wait((work,))  # it may be in the middle of stopping them itself
        await self._crew.stop(cause)
        self._is_up = False

    async def close(self) -> None:
        self._leaving.cancel()
        await self._stop(None)
