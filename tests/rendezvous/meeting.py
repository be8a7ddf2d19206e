"""Nodes in one event loop, on a real ledger, with crews that do what the test says."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from holdfast import ledger
from holdfast.errors import LeaseLost, Retriable, Unavailable, UnknownOutcome
from holdfast.ledger.base import Ledger
from holdfast.ledger.records import decode
from holdfast.ledger.runtime import LiveRuntime
from holdfast.rendezvous.attend import attend
from holdfast.rendezvous.closer import Duty
from holdfast.rendezvous.overview import Overview, look
from holdfast.rendezvous.records import Cause, Closer, Cycle, Keys, Node, Rules
from holdfast.rendezvous.rendezvous import Place, Rendezvous
from patience import HANG_S, auntil
from through import Through

RUN = "r"
KEYS = Keys(RUN)
RULES = Rules(minimum=2, maximum=3, spares=1, last_call_s=0.2, settle_s=0.2, join_s=20.0)


class Crew:
    """Starts nothing; the test says how it ends."""

    def __init__(self) -> None:
        self.places: list[Place] = []
        self.working = False
        self.stops: list[Cause | None] = []
        self.parkings: list[str] = []
        self._end: asyncio.Future[Cause | None] = asyncio.get_running_loop().create_future()
        self._leave = asyncio.Event()

    def port(self) -> int:
        return 20_000 + len(self.places)

    async def start(self, place: Place) -> None:
        assert not self.working, "started twice"
        self.places.append(place)
        self.working = True
        self._end = asyncio.get_running_loop().create_future()

    async def outcome(self) -> Cause | None:
        cause = await self._end
        self.working = False
        return cause

    async def stop(self, cause: Cause | None) -> None:
        self.stops.append(cause)
        self.working = False

    async def leaving(self) -> str:
        await self._leave.wait()
        return "asked to"

    def parked(self, reason: str) -> None:
        self.parkings.append(reason)

    def end(self, cause: Cause | None = None) -> None:
        """The workers end: with success, or for a cause."""
        self._end.set_result(cause)

    def leave(self) -> None:
        """The node is to leave."""
        self._leave.set()


class Attendee:
    """One node; `task` is its agent, with the run's end as its result."""

    def __init__(self, meeting: "Meeting", name: str, infra_rank: int | None) -> None:
        self.name = name
        self.crew = Crew()
        self.rendezvous: Rendezvous | None = None
        self._meeting = meeting
        self._node = Node(cycle=0, address=name, port=1, slots=1, infra_rank=infra_rank)
        self._dead = False
        self._ledger: Any = Through(meeting.ledger, before=self._refuse)
        self.task = asyncio.create_task(self._attend(), name=name)

    async def _refuse(self, *_: object) -> None:
        if self._dead:  # it reaches its ledger no more, not even to end its lease
            raise Unavailable("killed")

    async def _attend(self) -> Cycle | None:
        meeting = self._meeting
        while True:
            runtime = LiveRuntime(self._ledger)
            try:
                async with Rendezvous(
                    runtime,
                    RUN,
                    self.name,
                    self._node,
                    meeting.rules,
                    lease_s=meeting.lease_s,
                    duty=meeting.duty,
                ) as self.rendezvous:
                    return await attend(runtime, self.rendezvous, self.crew)
            except (LeaseLost, Retriable, UnknownOutcome):
                await asyncio.sleep(0.05)

    def entered(self) -> bool:
        """Whether it has its record."""
        return self.rendezvous is not None

    @property
    def rank(self) -> int | None:
        """Its rank, while it works."""
        return self.crew.places[-1].rank if self.crew.working else None

    async def result(self) -> Cycle | None:
        """Wait for its end."""
        async with asyncio.timeout(HANG_S):
            return await self.task

    async def kill(self) -> None:
        """Gone without a word: what it had ends with its lease."""
        self._dead = True
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


class Meeting:
    """A run and its nodes."""

    def __init__(self, opened: Ledger, rules: Rules, lease_s: float, duty: type[Duty]) -> None:
        self.ledger, self.rules, self.lease_s, self.duty = opened, rules, lease_s, duty
        self.nodes: dict[str, Attendee] = {}

    def join(self, *names: str) -> None:
        """Nodes come; `n3` has infra_rank 3."""
        for name in names:
            self.nodes[name] = Attendee(self, name, int(name[1:]))

    async def arrive(self, *names: str) -> None:
        """Nodes come, and have their records in the ledger."""
        self.join(*names)
        for name in names:
            await self.until(name, self[name].entered)

    def enter(self, name: str, rules: Rules | None = None, **more: Any) -> Rendezvous:
        """One more way in, beside those of the nodes."""
        node = Node(cycle=0, address="x", port=1, slots=1)
        return Rendezvous(LiveRuntime(self.ledger), RUN, name, node, rules or self.rules, **more)

    def __getitem__(self, name: str) -> Attendee:
        return self.nodes[name]

    async def until(self, what: str, test: Callable[[], object]) -> None:
        """Wait for something."""
        limit = asyncio.get_running_loop().time() + HANG_S
        while not test():
            for node in self.nodes.values():
                if node.task.done() and not node.task.cancelled():
                    node.task.result()
            assert asyncio.get_running_loop().time() < limit, f"no {what}: {await self.look()}"
            await asyncio.sleep(0.01)

    async def ranks(self, *names: str) -> None:
        """Wait until exactly these work, in this order of ranks."""
        await self.until(
            f"ranks {names}",
            lambda: (
                [n for n in names if self[n].rank == names.index(n)] == list(names)
                and sum(node.crew.working for node in self.nodes.values()) == len(names)
            ),
        )

    async def ended(self, *names: str, state: str = "succeeded") -> Cycle:
        """Wait until these nodes have heard that the run has ended so; all of them if none."""
        found = [await self[name].result() for name in names or self.nodes]
        last = found[-1]
        assert last is not None
        assert [cycle.state if cycle else "left" for cycle in found] == [state] * len(found)
        return last

    async def cycles(self, number: int, name: str = "n0") -> None:
        """Wait until a node has begun to work for the so-manieth time."""
        await self.until(f"cycle {number}", lambda: len(self[name].crew.places) == number)

    async def closer(self) -> str:
        """Wait until a node looks after the cycle; its name."""
        entry = await auntil(lambda: self.ledger.get(KEYS.closer), "a closer")
        return decode(Closer, entry).node

    def two_work(self) -> bool:
        """Whether as many work as `RULES` wants."""
        return sum(node.crew.working for node in self.nodes.values()) == 2

    async def look(self) -> Overview:
        """What the records say."""
        return await look(self.ledger, RUN)

    def end(self, *names: str) -> None:
        """The workers of these nodes succeed."""
        for name in names:
            self[name].crew.end()


@contextlib.asynccontextmanager
async def meeting(
    url: str, rules: Rules = RULES, *, lease_s: float = 2.0, duty: type[Duty] = Duty
) -> AsyncIterator[Meeting]:
    """A run; nodes that are left are ended."""
    async with ledger.open(url) as opened:
        here = Meeting(opened, rules, lease_s, duty)
        try:
            yield here
        finally:
            for node in here.nodes.values():
                await node.kill()


@contextlib.asynccontextmanager
async def working(
    url: str,
    rules: Rules = RULES,
    names: tuple[str, ...] = ("n0", "n1", "n2"),
    **more: Any,
) -> AsyncIterator[Meeting]:
    """A run whose first cycle runs: n0 and n1 have ranks, the others wait."""
    async with meeting(url, rules, **more) as here:
        here.join(*names)
        await here.ranks("n0", "n1")
        yield here
