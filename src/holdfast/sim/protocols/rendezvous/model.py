"""Rendezvous: nodes meet, hold ranks, work, fail, are replaced, and leave together.

Each node runs the production loop (`attend`) with a simulated crew. A crew's work is a counter
per rank, changed under a comparison of the cycle's record, as `holdfast.cycle.commit` does it.
The number of nodes (up to 50), the rules and the domains differ from seed to seed. In some seeds
the workers of one node always fail, or the others do not reach one node's address, or one node
does not reach the others. Invariants:

1. the cycle's record goes open → running → open (number + 1) … → succeeded | failed, and never
   changes after its end;
2. a membership keeps the rules: size, whole segments of one domain, every node once, and only
   nodes that have said in this life that they are ready for this cycle;
3. nobody who has long been dead gets a rank;
4. under one rank of one cycle only its member commits, and only while that cycle runs;
5. a run succeeds only when every rank's work is done, as its member recorded in that very cycle;
6. restarts stay within the budget;
7. a node leaves with success only after success was recorded, and with failure after failure was;
8. nodes that hold a place see it as the record says it;
9. a node is not the first to fail three times in a row while a spare waits that never was, and
   that the others have never missed;
10. a node that has lost rank 0 because the others did not reach it does not get it again while
    there is a member that has not.

At the end the run has succeeded or failed, and every process has left.
"""

import random
from collections.abc import Callable
from typing import Any

import msgspec

from holdfast.errors import Fenced, LeaseLost, Mistake
from holdfast.ledger import Batch, Compare, Entry
from holdfast.ledger.records import Record, decode, load, put
from holdfast.ledger.runtime import Runtime
from holdfast.ledger.types import absent, unchanged
from holdfast.rendezvous.attend import attend
from holdfast.rendezvous.records import Cause, Cycle, End, Keys, Node, Rules
from holdfast.rendezvous.rendezvous import Place, Rendezvous
from holdfast.retry import AGAIN, insist
from holdfast.sim.protocol import Protocol, Violation
from holdfast.sim.protocols.rendezvous.blame import TROUBLES, Blame, Trouble
from holdfast.sim.times import TIMES
from holdfast.sim.world import Node as Process

__all__ = ["KEYS", "RendezvousProtocol", "SimCrew"]

RUN = "sim"
KEYS = Keys(RUN)
WORK = "/runs/sim/work/"
GOAL = 5
FIFTY = 50


class Work(Record, frozen=True, kw_only=True):
    """What one rank has done."""

    count: int
    cycle: int
    node: str
    life: int


class SimCrew:
    """Workers that count; now and then one fails."""

    def __init__(self, protocol: "RendezvousProtocol", runtime: Runtime, name: str) -> None:
        self.protocol = protocol
        self.runtime = runtime
        self.name = name
        self.rendezvous: Rendezvous
        self._place: Place | None = None

    def port(self) -> int:
        """A port of its own for every cycle."""
        return self.runtime.random.randrange(20_000, 60_000)

    async def start(self, place: Place) -> None:
        """Begin; what the node believes must be what is recorded."""
        self.protocol.see_place(self.name, place)
        self._place = place

    async def outcome(self) -> Cause | None:
        """Count up to the goal."""
        place = self._place
        assert place is not None
        if not self.protocol.reaches(self.name, place):
            await self.runtime.sleep(2.0 + self.runtime.random.random())
            await self.rendezvous.unreached(place.cycle)
            await self.runtime.sleep(3600.0)  # workers that wait for rank 0
        while True:
            await self.runtime.sleep(0.2 + self.runtime.random.random())
            if self.protocol.fails(self.name, self.runtime.random.random()):
                return Cause(kind="failed", detail="a worker failed")
            try:
                if await insist(
                    self.runtime, lambda: self.protocol.commit(self.runtime, self, place)
                ):
                    return None
            except Fenced:
                await self.runtime.sleep(3600.0)  # a worker that hangs until it is stopped

    async def stop(self, cause: Cause | None) -> None:  # noqa: ARG002 -- nothing to say to a counter
        """It takes a while to stop."""
        if self._place is not None:
            self._place = None
            await self.runtime.sleep(self.runtime.random.random() * 2)

    async def leaving(self) -> str:
        """Some nodes are asked to leave in the middle."""
        if self.runtime.random.random() < self.protocol.quitting:
            await self.runtime.sleep(self.runtime.random.uniform(1.0, 60.0))
            return "somebody wants it back"
        await self.runtime.sleep(1e6)
        raise AssertionError("nobody waits that long")

    def parked(self, reason: str) -> None:
        """Nothing to say to a counter."""

    def guards(self, place: Place) -> list[Compare]:
        """What a worker's effect compares."""
        return [Compare(KEYS.cycle, "mod", "==", place.revision)]


class RendezvousProtocol(Protocol):
    """The sound protocol, with the parts that it is given."""

    steps = 400

    def __init__(
        self,
        rendezvous: Callable[..., Rendezvous] = Rendezvous,
        crew: "type[SimCrew]" = SimCrew,
    ) -> None:
        self._rendezvous = rendezvous
        self._crew = crew
        self.rules = Rules(minimum=3, maximum=5)
        self.failing = 0.03
        self.quitting = 0.1
        self.trouble = Trouble()
        self._blame = Blame()
        self._cycle: Cycle | None = None
        self._revisions: dict[int, Cycle] = {}
        self._ready: set[tuple[str, int, int]] = set()
        self._died: dict[tuple[str, int], float] = {}
        self._ends: dict[int, dict[int, int]] = {}
        self._work: dict[int, Work] = {}
        self._running: dict[int, Process] = {}
        self._left: set[int] = set()
        self._alive: dict[str, float] = {}

    def prepare(self, seed: int) -> None:
        """Rules and size of this schedule."""
        luck = random.Random(f"rules {seed}")
        if seed % 40 == 39:
            self.nodes, self.steps = FIFTY, 2500
            self.rules = Rules(minimum=40, maximum=48, spares=4, segment=4, last_call_s=2.0)
        else:
            self.nodes = luck.randrange(2, 9)
            minimum = luck.randrange(1, self.nodes + 1)
            maximum = luck.randrange(minimum, self.nodes + 2)
            spares = luck.randrange(0, maximum - minimum + 1)
            self.rules = Rules(minimum=minimum, maximum=maximum, spares=spares)
            segmented = msgspec.structs.replace(self.rules, segment=2)
            if luck.random() < 0.3 and segmented.lowest <= segmented.highest:
                self.rules = segmented
        self.rules = msgspec.structs.replace(
            self.rules,
            last_call_s=luck.choice((0.0, 2.0, 15.0)),
            join_s=luck.choice((60.0, 300.0)),
            max_restarts=luck.choice((0, 2, 8)),
        )
        self.trouble = luck.choice(TROUBLES)
        self.failing = luck.choice((0.0, 0.02, 0.1))
        self.quitting = luck.choice((0.0, 0.2)) if self.nodes < FIFTY else 0.0

    def fails(self, name: str, luck: float) -> bool:
        """Whether a worker of this node fails now."""
        return name == self.trouble.failing or luck < self.failing

    def reaches(self, name: str, place: Place) -> bool:
        """Whether this node reaches rank 0."""
        trouble = self.trouble
        return place.first == name or (trouble.hidden != place.first and trouble.cut_off != name)

    # ---- the processes -------------------------------------------------------

    async def run(self, runtime: Process, name: str) -> None:
        """One agent: enter, attend, and again when the lease was lost."""
        self._running[id(runtime)] = runtime
        number = int(name[1:])
        node = Node(
            cycle=0,
            address=name,
            port=1,
            slots=1 + number % 2,
            infra_rank=number if number % 3 else None,
            domain="ab"[number % 2],
        )
        given: Any = {"lease_s": TIMES.node_lease_s, "unix": runtime.now}

        async def take_part() -> Cycle | None:
            crew = self._crew(self, runtime, name)
            async with self._rendezvous(runtime, RUN, name, node, self.rules, **given) as entered:
                crew.rendezvous = entered
                return await attend(runtime, entered, crew)

        try:
            while (ended := await insist(runtime, take_part, on=(LeaseLost, *AGAIN))) is None:
                await runtime.sleep(runtime.random.uniform(1.0, 30.0))  # it is given back
            self._leave(runtime, name, ended)
        except Mistake:  # a twin holds the name
            self._left.add(id(runtime))

    def _leave(self, runtime: Runtime, name: str, ended: Cycle) -> None:
        if self._cycle is None or ended.state != self._cycle.state:
            there = self._cycle.state if self._cycle else "nothing"
            raise Violation(f"{name} leaves with {ended.state}, and {there} is recorded")
        self._left.add(id(runtime))

    async def commit(self, runtime: Runtime, crew: SimCrew, place: Place) -> bool:
        """Count one more; tells whether the goal is reached."""
        key = f"{WORK}{place.rank}"
        stored = await load(runtime.ledger, key, Work)
        count = stored.record.count if stored else 0
        if count >= GOAL:
            return True
        entry = crew.rendezvous._entry  # its life, as the record has it
        assert entry is not None
        fresh = Work(
            count=count + 1, cycle=place.cycle, node=crew.name, life=entry.create_revision
        )
        compare = [unchanged(stored.entry) if stored else absent(key), *crew.guards(place)]
        txn = await runtime.ledger.txn(compare, [put(key, fresh)])
        if not txn.succeeded:
            head = await runtime.ledger.get(KEYS.cycle)
            if head is None or head.mod_revision != place.revision:
                raise Fenced("another cycle")
        return txn.succeeded and count + 1 >= GOAL

    # ---- the invariants ------------------------------------------------------

    def observe(self, batch: Batch) -> None:
        """Compare what one transaction changed with what was there before."""
        for event in batch.events:
            key, entry = event.key, event.entry
            if key.startswith(KEYS.nodes):
                self._see_node(key.removeprefix(KEYS.nodes), entry, event.previous)
            elif key.startswith(KEYS.ends) and entry is not None:
                number, rank = map(int, key.removeprefix(KEYS.ends).split("/"))
                self._ends.setdefault(number, {})[rank] = decode(End, entry).life
            elif key.startswith(WORK) and entry is not None:
                self._see_work(int(key.removeprefix(WORK)), decode(Work, entry))
        for event in batch.events:
            if event.key == KEYS.cycle:
                self._see_cycle(event.entry)

    def _see_node(self, name: str, entry: Entry | None, previous: Entry | None) -> None:
        self._blame.see_node(name, entry)
        if entry is not None:
            self._ready.add((name, entry.create_revision, decode(Node, entry).cycle))
        elif previous is not None:
            self._died[name, previous.create_revision] = self.world.loop.time()

    def _see_work(self, rank: int, work: Work) -> None:
        cycle = self._cycle
        if cycle is None or cycle.state != "running" or cycle.number != work.cycle:
            raise Violation(f"{work.node} worked in cycle {work.cycle}, which does not run")
        if rank >= len(cycle.members) or cycle.members[rank].life != work.life:
            raise Violation(f"{work.node} worked under rank {rank}, which is not its own")
        before = self._work.get(rank)
        if work.count != (before.count if before else 0) + 1:
            raise Violation(f"rank {rank} went on from {before} to {work}")
        self._work[rank] = work

    def _see_cycle(self, entry: Entry | None) -> None:
        if entry is None:
            raise Violation("the cycle's record was removed")
        before, now = self._cycle, decode(Cycle, entry)
        self._cycle = self._revisions[entry.mod_revision] = now
        if before is None:
            if (now.number, now.state) != (1, "open"):
                raise Violation(f"the run began with cycle {now.number}, {now.state}")
            return
        allowed = {
            "open": ((before.number, "running"), (before.number, "failed")),
            "running": (
                (before.number + 1, "open"),
                (before.number, "succeeded"),
                (before.number, "failed"),
            ),
        }.get(before.state, ())
        if (now.number, now.state) not in allowed:
            raise Violation(
                f"cycle {before.number}, {before.state}, became {now.number}, {now.state}"
            )
        self._blame.see_cycle(before, now)
        if len(now.restarts) > self.rules.max_restarts:
            raise Violation(f"{len(now.restarts)} restarts, {self.rules.max_restarts} allowed")
        if now.state == "running":
            self._check_members(now)
        elif now.state == "succeeded":
            self._check_success(now)

    def _check_members(self, now: Cycle) -> None:
        rules, members = self.rules, now.members
        if not rules.lowest <= len(members) <= rules.highest or len(members) % rules.segment:
            raise Violation(f"{len(members)} members, against {rules}")
        if len({member.name for member in members}) < len(members):
            raise Violation(f"a node has two ranks: {members}")
        for rank, member in enumerate(members):
            if (member.name, member.life, now.number) not in self._ready:
                raise Violation(f"{member.name} was not ready for cycle {now.number}")
            died = self._died.get((member.name, member.life), self._alive.get(member.name, 1e9))
            if self.world.loop.time() - died > 2 * TIMES.node_lease_s:
                raise Violation(f"{member.name} got rank {rank}, and has been dead for long")
            first = members[rank // rules.segment * rules.segment]
            if rules.segment > 1 and member.domain != first.domain:
                raise Violation(f"a segment of two domains: {members}")

    def _check_success(self, now: Cycle) -> None:
        ends = self._ends.get(now.number, {})
        for rank, member in enumerate(now.members):
            if ends.get(rank) != member.life:
                raise Violation(f"success without rank {rank} in cycle {now.number}")
            if rank not in self._work or self._work[rank].count < GOAL:
                raise Violation(f"success, and the work of rank {rank} is not done")

    def see_place(self, name: str, place: Place) -> None:
        """A node believes that it holds this place."""
        cycle = self._revisions.get(place.revision)
        if cycle is None or cycle.state != "running" or cycle.number != place.cycle:
            raise Violation(f"{name} believes in cycle {place.cycle}, which never ran")
        sizes = [member.slots for member in cycle.members]
        if (
            cycle.members[place.rank].name != name
            or place.nodes != len(sizes)
            or place.world_size != sum(sizes)
            or place.first_rank != sum(sizes[: place.rank])
            or place.port != cycle.members[0].port
        ):
            raise Violation(f"{name} sees {place}, recorded is {cycle.members}")

    def check(self) -> None:
        """Remember who lives."""
        if self.nodes < FIFTY:
            now = self.world.loop.time()
            for process in self._running.values():
                if not process.dead:
                    self._alive[process.name] = now

    def settled(self) -> bool:
        """The run has ended and everybody has left."""
        return (
            self._cycle is not None
            and self._cycle.final
            and all(process.dead or key in self._left for key, process in self._running.items())
        )
