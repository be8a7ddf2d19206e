"""One node's part in a rendezvous: be there, hear of cycles, say how it went.

    async with Rendezvous(runtime, "my-run", "node-3", node, rules) as rendezvous:
        head = rendezvous.head
        while not head.record.final:
            if head.record.state == "open":
                ...stop the workers of the cycle before...
                await rendezvous.ready(head)
            elif (place := rendezvous.place(head)) is not None:
                ...start workers; when all have succeeded:
                await rendezvous.succeed(head)
                ...when one has failed:
                await rendezvous.restart(head, Cause(kind="failed", detail=...))
            head = await rendezvous.changed(head)

Promises (5): members of a cycle agree on ranks and world size, because there is one record of
them; nothing of an old cycle counts in a new one; a success is recorded before `changed` tells
anybody to leave; a node that was paused beyond its lease changes nothing, because what it would
change compares the cycle's record, or hangs on its lease.

A node costs the ledger the same number of messages however many others there are: it follows two
keys.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Self, TypeVar

import msgspec

from holdfast import retry
from holdfast.errors import Gone, LeaseLost, Mistake
from holdfast.ledger.follow import follow
from holdfast.ledger.leases import Keeper
from holdfast.ledger.records import Stored, decode, put
from holdfast.ledger.runtime import Runtime
from holdfast.ledger.types import (
    Compare,
    Delete,
    Entry,
    Get,
    Op,
    Put,
    Txn,
    absent,
    same_life,
    unchanged,
)
from holdfast.rendezvous.board import Board
from holdfast.rendezvous.closer import Duty
from holdfast.rendezvous.decide import View, begin, suspect
from holdfast.rendezvous.decide import restart as restarted
from holdfast.rendezvous.records import (
    Cause,
    Closer,
    Cycle,
    End,
    Keys,
    Node,
    Parked,
    Place,
    Rules,
    put_cycle,
)
from holdfast.timeouts import DEFAULTS

__all__ = ["Place", "Rendezvous"]

T = TypeVar("T")

_NAME_TAKEN_LEASES = 3
_STAND_INS = 3


class Rendezvous:
    """A node that takes part. Use `async with`; leaving it ends the node's lease.

    Entering raises `Mistake` when the rules are not those of the run or the name is taken, and
    `Unavailable` when the ledger is not reached. When the lease is lost every call raises
    `LeaseLost`: stop the workers, leave, and enter anew.
    """

    def __init__(
        self,
        runtime: Runtime,
        run: str,
        name: str,
        node: Node,
        rules: Rules,
        *,
        lease_s: float = 5.0,
        unix: Callable[[], float] = time.time,
        is_alive: Callable[[Node, Node], Awaitable[bool | None]] | None = None,
        duty: type[Duty] = Duty,
    ) -> None:
        """`is_alive` tells whether the node that holds our name lives: its record, then ours."""
        rules.check()
        self._runtime = runtime
        self._keys = Keys(run)
        self._name = name
        self._key = self._keys.node(name)
        self._node = node
        self._rules = rules
        self._lease_s = lease_s
        self._unix = unix
        self._is_alive = is_alive
        self._make_duty = duty
        self._head: Stored[Cycle]
        self._since = (0, 0.0)
        """The number of the cycle, and since when, by our own clock, we know of it."""
        self._trouble: Exception | None = None
        self._closer: Entry | None = None
        self._heard_of_closer = False
        self._entry: Entry | None = None
        self._news = asyncio.Event()
        self._saying = asyncio.Lock()
        self._keeper: Keeper
        self._stack = contextlib.AsyncExitStack()

    # ---- life ----------------------------------------------------------------

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            self._keeper = await stack.enter_async_context(Keeper(self._runtime, self._lease_s))
            self._see_head(await self._first_head())
            if not self._head.record.final:
                await self._enter_node()
            for work, name in ((self._follow(), "head"), (self._serve(), "duty")):
                task = self._runtime.spawn(work, name=f"{self._name}'s {name}")
                stack.callback(task.cancel)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def head(self) -> Stored[Cycle]:
        """The newest cycle that this node has heard of."""
        return self._head

    @property
    def valid_until(self) -> float:
        """When the lease may have ended, on our own clock: by then no worker may run."""
        return self._keeper.valid_until

    # ---- what a node does ------------------------------------------------------

    async def changed(self, head: Stored[Cycle]) -> Stored[Cycle]:
        """Wait until the cycle is another than `head` says."""
        while self._head.entry.mod_revision <= head.entry.mod_revision:
            await self._hear(self._news)
        return self._head

    async def heard(self, head: Stored[Cycle]) -> None:
        """Tell that this node is coming, but has to stop its workers first."""
        await self._say(heard=head.record.number)

    async def ready(self, head: Stored[Cycle], *, port: int | None = None) -> None:
        """Be ready for a cycle: none of this node's workers runs any more."""
        number = head.record.number
        await self._say(cycle=number, heard=number, port=port)

    def place(self, head: Stored[Cycle]) -> Place | None:
        """This node's place in a running cycle; None: it is a spare."""
        cycle = head.record
        if cycle.state != "running" or self._entry is None:
            return None
        me = self._name, self._entry.create_revision  # an earlier life holds nothing
        rank = next((r for r, one in enumerate(cycle.members) if (one.name, one.life) == me), None)
        if rank is None:
            return None
        first, member = cycle.members[0], cycle.members[rank]
        return Place(
            cycle.number,
            head.entry.mod_revision,
            rank,
            len(cycle.members),
            sum(one.slots for one in cycle.members[:rank]),
            cycle.world_size,
            member.slots,
            first.address,
            first.port,
            first.name,
            first.probe_port,
        )

    def parked(self, head: Stored[Cycle]) -> Parked | None:
        """Why this node comes after all others; None: it does not."""
        return head.record.mark(self._name, self._entry.create_revision) if self._entry else None

    async def unreached(self, number: int) -> None:
        """Report that this node does not reach rank 0; the closer decides which is at fault."""
        await self._say(unreached=number)

    async def succeed(self, head: Stored[Cycle]) -> bool:
        """Record that all workers of this node have succeeded. False: the cycle is over."""
        place = self.place(head)
        assert place is not None
        assert self._entry is not None
        end = End(node=self._name, life=self._entry.create_revision)
        ops = [put(self._keys.end(head.record.number, place.rank), end)]
        txn = await self._insist([unchanged(head.entry)], ops)
        return txn.succeeded

    async def restart(self, head: Stored[Cycle], cause: Cause) -> None:
        """End a cycle, for everybody. Does nothing when somebody else has done so."""
        cause = msgspec.structs.replace(cause, node=cause.node or self._name, at=self._unix())
        view = await self._view() if suspect(head.record, cause) else None
        fresh = restarted(head.record, cause, view)
        await self._insist(
            [unchanged(head.entry)], [put_cycle(self._keys.cycle, fresh, over=head.entry)]
        )

    async def parks(self, head: Stored[Cycle], cause: Cause) -> bool:
        """Whether ending a cycle for this cause gives its node's rank to a spare."""
        if not suspect(head.record, cause):
            return False
        return restarted(head.record, cause, await self._view()).parked != head.record.parked

    async def _view(self) -> View | None:
        """Everything below the rendezvous."""
        found = await self._while_leased(lambda: self._runtime.ledger.range(self._keys.root))
        return Board(self._keys, found.entries).view()

    # ---- the node's own record -------------------------------------------------

    async def _enter_node(self) -> None:
        """Write this node's record, once no other life of it is there."""
        limit = self._runtime.now() + _NAME_TAKEN_LEASES * self._keeper.lease.ttl_s
        number = self._head.record.number
        self._node = msgspec.structs.replace(self._node, cycle=number, heard=number)
        op = self._record(self._node)
        while True:
            txn = await self._insist([absent(self._key)], [op, Get(self._key)], [Get(self._key)])
            entry = txn.results[-1]
            if entry is None:
                continue
            if entry.lease == self._keeper.id:
                self._entry = entry
                return
            other = decode(Node, entry)
            lives = await self._is_alive(other, self._node) if self._is_alive else None
            if lives is False:
                await self._insist([same_life(entry)], [Delete(self._key)])
            elif lives or self._runtime.now() > limit:
                raise Mistake(
                    f"a node named {self._name!r} is already in this run (host {other.host}, "
                    f"address {other.address}, pid {other.pid}): end it, or give this node "
                    "another name: --node-name NAME (torchrun: --rdzv-conf node_name=NAME)",
                    key=self._key,
                )
            else:
                await self._runtime.sleep(0.2 * (0.5 + self._runtime.random.random()))

    def _record(self, node: Node) -> Put:
        return put(self._key, node, lease=self._keeper.id)

    async def _say(self, *, port: int | None = None, **numbers: int) -> None:
        """Change this node's record; the numbers of cycles in it only grow."""
        async with self._saying:
            node = self._node
            grown = {name: max(new, getattr(node, name)) for name, new in numbers.items()}
            port = node.port if port is None else port
            await self._write(msgspec.structs.replace(node, port=port, **grown))

    async def _write(self, fresh: Node) -> None:
        if fresh == self._node or self._entry is None:
            return
        self._node = fresh
        get = Get(self._key)
        op = self._record(fresh)
        # Compares the last change, so that an earlier call that arrives late changes nothing.
        while self._entry.value != op.value:
            txn = await self._insist([unchanged(self._entry)], [op, get], [get])
            entry = txn.results[-1]
            if entry is None or entry.create_revision != self._entry.create_revision:
                raise LeaseLost(f"{self._name} is no longer in the run", key=self._key)
            self._entry = entry

    # ---- the head --------------------------------------------------------------

    async def _first_head(self) -> Stored[Cycle]:
        """The cycle's record; made by whoever comes first."""
        key = self._keys.cycle
        fresh = put(key, begin(self._rules))
        entry = None
        while entry is None:  # also when it was removed in between
            txn = await self._insist([absent(key)], [fresh, Get(key)], [Get(key)])
            entry = txn.results[-1]
        stored = Stored(entry, decode(Cycle, entry))
        if stored.record.rules != self._rules and not stored.record.final:
            raise Mistake(
                f"this run was begun with {_tell(stored.record.rules)}, not with "
                f"{_tell(self._rules)}: give every node the same"
            )
        return stored

    async def _follow(self) -> None:
        try:
            async with contextlib.aclosing(follow(self._runtime, self._keys.head)) as steps:
                async for step in steps:
                    self._closer = step.entries.get(self._keys.closer)
                    self._heard_of_closer = True
                    entry = step.entries.get(self._keys.cycle)
                    if entry is None:
                        raise Gone("the run's records were removed", key=self._keys.cycle)
                    if entry.mod_revision > self._head.entry.mod_revision:
                        self._see_head(Stored(entry, decode(Cycle, entry)))
                    self._tell_news()
        except Exception as error:  # noqa: BLE001 -- a task's boundary: `_hear` raises it
            self._trouble = error
            self._tell_news()

    def _tell_news(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _hear(self, news: asyncio.Event) -> None:
        """Wait for news of the head later than `news`. Raises when there can be none."""
        if self._trouble is not None:
            raise self._trouble
        told = self._runtime.spawn(news.wait(), name="news")
        lost = self._runtime.spawn(self._keeper.lost.wait(), name="lost")
        try:
            await asyncio.wait((told, lost), return_when=asyncio.FIRST_COMPLETED)
        finally:
            told.cancel()
            lost.cancel()
        self._check_lease()

    def _check_lease(self) -> None:
        if not self._keeper.believes():
            raise LeaseLost(f"the lease of {self._name} has ended", key=self._key)

    def _see_head(self, head: Stored[Cycle]) -> None:
        self._head = head
        if head.record.number != self._since[0]:
            self._since = head.record.number, self._runtime.now()

    # ---- the closer ------------------------------------------------------------

    async def _serve(self) -> None:
        """Be the closer whenever there is none."""
        try:
            while not self._head.record.final:
                news = self._news
                if not self._heard_of_closer:
                    pass  # most of a crowd find that there is one, and need not ask for it
                elif self._closer is None:
                    await self._apply()
                elif self._closer.lease == self._keeper.id:
                    await self._duty(same_life(self._closer)).run()
                    return
                elif (patience_s := self._patience_s()) is not None:
                    await self._stand_in(news, patience_s)
                    continue
                await self._hear(news)
        except LeaseLost:
            pass  # whoever uses this object hears of it, too
        except Exception as error:  # noqa: BLE001 -- `_hear` raises it, and the office falls vacant
            self._trouble = error
            self._tell_news()

    async def _apply(self) -> None:
        """Try to become the closer; the head tells who did."""
        op = put(self._keys.closer, Closer(node=self._name), lease=self._keeper.id)
        await self._insist([absent(self._keys.closer)], [op])

    def _duty(self, guard: Compare) -> Duty:
        """The closer's work. A run whose closers come and go must not wait anew with each."""
        return self._make_duty(
            self._runtime, self._keys, guard, self._unix, open_since=self._since
        )

    def _patience_s(self) -> float | None:
        """After how long this node does what the closer has left lying; None: never.

        A closer that dies is missed when its lease ends; members that wait for their ranks can do
        without it, because anybody may commit what `decide` says. Few of them try, one after
        another.
        """
        cycle = self._head.record
        if cycle.state != "open" or self._entry is None:
            return None
        for rank, member in enumerate(cycle.members[:_STAND_INS]):
            if member.name == self._name:
                return cycle.rules.settle_s + DEFAULTS.stand_in_s * (rank + 1)
        return None

    async def _stand_in(self, news: asyncio.Event, patience_s: float) -> None:
        """Wait for news of the head; when there are none for so long, look after the cycle."""
        assert self._entry is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._hear(news)
            return
        guard = same_life(self._entry)
        work = self._runtime.spawn(self._duty(guard).run(), name=f"{self._name} stands in")
        try:
            await self._hear(news)
        finally:
            work.cancel()
            if work.done() and not work.cancelled():
                work.exception()  # the closer, or whoever is next, sees to it

    # ---- the ledger --------------------------------------------------------------

    async def _insist(
        self, compare: Sequence[Compare], then: Sequence[Op], otherwise: Sequence[Op] = ()
    ) -> Txn:
        """A transaction that may be sent again: its comparison fails once it has taken effect."""
        return await self._while_leased(lambda: self._runtime.ledger.txn(compare, then, otherwise))

    async def _while_leased(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call until it succeeds; raises `LeaseLost` once the lease has ended."""

        async def once() -> T:
            self._check_lease()
            return await call()

        return await retry.insist(self._runtime, once)


def _tell(rules: Rules) -> str:
    fields = msgspec.structs.asdict(rules)
    return ", ".join(f"{name}={value:g}" for name, value in fields.items())
