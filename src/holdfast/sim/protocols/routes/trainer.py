"""The simulated trainer: a counter behind the fence, whose effects are transactions.

It listens at one of a few addresses, so that the address of a dead one soon belongs to
somebody else's.
"""

import asyncio
from collections.abc import Callable

import msgspec

from holdfast.errors import Unavailable
from holdfast.jobs.fence import Incarnation
from holdfast.jobs.launcher import Launcher, Running, Ticket
from holdfast.ledger.types import Get, Put, absent, present
from holdfast.sim.times import TIMES
from holdfast.sim.world import Node

__all__ = ["ADDRESSES", "Call", "Op", "Reply", "SimLauncher", "Trainer", "op_key"]

ADDRESSES = ("a", "b", "c")


class Call(msgspec.Struct, frozen=True):
    """A request: an operation under a sequence number, or a poll for its result."""

    kind: str
    account: str
    job: str
    seq: int
    work: str = ""
    """What is to be done, once: the caller's own name for it."""
    headers: tuple[tuple[bytes, bytes], ...] = ()


class Reply(msgspec.Struct, frozen=True):
    """Its answer."""

    status: int
    code: str = ""


class Op(msgspec.Struct, frozen=True):
    """An operation that took effect."""

    work: str
    epoch: int


def op_key(account: str, job: str, seq: int) -> str:
    """Where the effect of an operation is recorded."""
    return f"/ops/{account}/{job}/{seq:04}"


class Trainer(Running):
    """One incarnation."""

    def __init__(self, node: Node, ticket: Ticket, *, guarded: bool = True) -> None:
        self._node = node
        self._guarded = guarded
        who = (ticket.run, ticket.account, ticket.job, ticket.epoch, ticket.secret)
        self._who = Incarnation(*who)
        self._address = ""
        self._end: asyncio.Future[tuple[bool, str]] = asyncio.Future()

    async def serving(self) -> str:
        """Take a free address; now and then the start fails."""
        await self._node.sleep(self._node.random.random() * 2)
        if self._node.random.random() < 0.05 and not self._node.world.healed:
            raise Unavailable("the trainer did not start")
        while not self._address:
            free = [one for one in ADDRESSES if self._node.net.is_free(one)]
            if free:
                self._address = self._node.random.choice(free)
                self._node.net.listen(self._address, self.handle)
            else:
                await self._node.sleep(0.5)
        if self._node.random.random() < 0.3 and not self._node.world.healed:
            self._node.world.later(self._node.random.random() * 30, self._die)
        return self._address

    def _die(self) -> None:
        if not self._end.done() and not self._node.dead:
            self._node.context.run(self._end.set_result, (False, "killed"))
            self._node.net.close(self._address)

    async def ended(self) -> tuple[bool, str]:
        """Wait for its death."""
        return await asyncio.shield(self._end)

    async def stop(self, grace_s: float) -> None:
        """Die, after some time."""
        if not self._end.done():
            await self._node.sleep(min(grace_s, self._node.random.random()))
            self._end.cancel()
            if self._address:
                self._node.net.close(self._address)

    async def handle(self, call: Call) -> Reply:
        """Do what is asked, if it is meant for us."""
        if self._guarded and not self._who.is_meant(call.headers):
            return Reply(421)
        if call.kind == "poll":
            return await self._poll(call)
        return await self._apply(call)

    async def _apply(self, call: Call) -> Reply:
        key = op_key(self._who.account, self._who.job, call.seq)
        op = Op(call.work, self._who.epoch)
        guards = [self._who.guard()] if self._guarded else []
        # Operations take effect in order: the one before must be there.
        last = op_key(self._who.account, self._who.job, call.seq - 1)
        before = [] if call.seq == 1 else [present(last)]
        txn = await self._node.ledger.txn(
            [*guards, absent(key), *before], [Put(key, msgspec.json.encode(op))], [Get(key)]
        )
        if txn.succeeded or txn.results[0] is not None:
            return Reply(200)
        return Reply(421)

    async def _poll(self, call: Call) -> Reply:
        key = op_key(self._who.account, self._who.job, call.seq)
        deadline = self._node.now() + TIMES.poll_hold_s
        while self._node.now() < deadline:
            if await self._node.ledger.get(key) is not None:
                return Reply(200)
            await self._node.sleep(1.0)
        return Reply(408)


class SimLauncher(Launcher):
    """Starts trainers inside the host's own process: they die with it."""

    def __init__(self, node: Node, make: Callable[[Node, Ticket], Trainer]) -> None:
        self._node = node
        self._make = make

    async def start(self, ticket: Ticket) -> Running:
        """One incarnation; now and then the machine has no room for it."""
        if self._node.random.random() < 0.03 and not self._node.world.healed:
            raise OSError("no more processes")
        return self._make(self._node, ticket)
