"""Leader election: five processes fight for one counter.

Each process, whenever it leads, adds to a shared counter under its leadership's guard,
then resigns or leads on. Invariants:

1. tokens only grow: no leadership has a token that an earlier one had;
2. the counter changes only while the leader's record carries the writer's token;
3. every addition is counted exactly once: none that was reported as done is missing, and
   none is there twice, whatever answers were lost;
4. the leader's record goes only when its lease has ended or its holder resigns;
5. a leader whose clock is not slow believes in its lease only while it lives;
6. a leader that was fenced off hears that it has lost, within a bound.

At the end every process has done its share.
"""

import msgspec

from holdfast.errors import Fenced, LeaseLost
from holdfast.ledger import Batch, Entry
from holdfast.ledger.election import Election, Leader, Leadership
from holdfast.ledger.records import KEEP, Record, Verdict, load, update
from holdfast.ledger.runtime import Runtime
from holdfast.retry import AGAIN, insist
from holdfast.sim.protocol import Protocol, Violation
from holdfast.sim.times import TIMES
from holdfast.sim.world import Node

__all__ = ["Count", "ElectionProtocol"]

PREFIX = "/runs/sim/election"
COUNTER = "/runs/sim/counter"
SHARE = 4


class Count(Record, frozen=True, kw_only=True):
    """The counter, and whose additions are in it."""

    token: int = 0
    total: int = 0
    done: dict[str, int] = {}  # noqa: RUF012 -- msgspec copies defaults


class ElectionProtocol(Protocol):
    """The sound protocol, with the election that it is given."""

    def __init__(self, election: type[Election] = Election) -> None:
        self._election = election
        self._last_token = 0
        self._leader: Leader | None = None
        self._count = Count()
        self._reported: dict[str, int] = {}
        self._terms: dict[int, tuple[Node, Leadership]] = {}
        self._leaving: set[int] = set()

    # ---- the processes -------------------------------------------------------

    async def run(self, runtime: Node, name: str) -> None:
        """Lead and add until our share is done."""
        while not await insist(
            runtime, lambda: self._is_done(runtime, name), on=(Fenced, LeaseLost, *AGAIN)
        ):
            pass

    async def _is_done(self, runtime: Node, name: str) -> bool:
        """Whether our share is done; if it is not, lead once."""
        stored = await load(runtime.ledger, COUNTER, Count)
        done = stored.record.done.get(name, 0) if stored else 0
        if done < SHARE:
            await self._lead_once(runtime, name, done)
        return done >= SHARE

    async def _lead_once(self, runtime: Node, name: str, done: int) -> None:
        ttl_s = TIMES.ledger_lease_s
        async with self._election(runtime, PREFIX, name, ttl_s=ttl_s).lead() as leadership:
            if leadership.token in self._terms:
                raise Violation(f"{name} leads with token {leadership.token}, as somebody did")
            self._terms[leadership.token] = runtime, leadership
            try:
                await self._lead(runtime, name, done, leadership)
            except Fenced:
                await self._hear_of_the_loss(runtime, name, leadership)
                raise
            finally:
                self._leaving.add(leadership.token)

    async def _lead(self, runtime: Node, name: str, done: int, leadership: Leadership) -> None:
        for number in range(done + 1, SHARE + 1):
            await self.add(runtime, name, number, leadership)
            self._reported[name] = max(number, self._reported.get(name, 0))
            await runtime.sleep(runtime.random.random() * 2)
            if runtime.random.random() < 0.3:
                return

    async def _hear_of_the_loss(self, runtime: Node, name: str, leadership: Leadership) -> None:
        for _ in range(30):
            if leadership.lost.is_set():
                return
            await runtime.sleep(TIMES.ledger_lease_s / 10)
        raise Violation(f"{name} was fenced off and never heard that it had lost")

    async def add(self, runtime: Runtime, name: str, number: int, leadership: Leadership) -> None:
        """Add once; `number` says which addition of ours this is."""

        def decide(count: Count | None) -> Count | Verdict:
            count = count or Count()
            if count.done.get(name, 0) >= number:
                return KEEP
            return Count(
                token=leadership.token,
                total=count.total + 1,
                done={**count.done, name: number},
            )

        await update(runtime, COUNTER, Count, decide, guards=[leadership.guard], repeatable=True)

    # ---- the invariants ------------------------------------------------------

    def observe(self, batch: Batch) -> None:
        """Compare what one transaction changed with what was there before."""
        for event in batch.events:
            if event.key == f"{PREFIX}/leader":
                self._see_leader(event.entry, event.previous)
        for event in batch.events:
            if event.key == COUNTER and event.entry is not None:
                self._see_count(msgspec.json.decode(event.entry.value, type=Count))

    def _see_leader(self, entry: Entry | None, previous: Entry | None) -> None:
        if entry is None:
            assert self._leader is not None
            assert previous is not None
            alive = previous.lease in self.truth.leases()
            if alive and self._leader.token not in self._leaving:
                raise Violation(f"the record of {self._leader.holder}, who leads, was deleted")
            self._leader = None
            return
        leader = msgspec.json.decode(entry.value, type=Leader)
        if self._leader is not None:
            raise Violation(f"{leader.holder} took over from {self._leader.holder}, who leads")
        if leader.token <= self._last_token:
            raise Violation(f"token {leader.token} was given again to {leader.holder}")
        self._last_token = leader.token
        self._leader = leader

    def _see_count(self, count: Count) -> None:
        if self._leader is None or count.token != self._leader.token:
            now = "nobody leads" if self._leader is None else f"{self._leader.token} leads"
            raise Violation(f"token {count.token} changed the counter while {now}")
        if count.total != self._count.total + 1:
            raise Violation(f"the counter went from {self._count.total} to {count.total}")
        if sum(count.done.values()) != count.total:
            raise Violation(f"{count.total} additions are counted, {count.done} were done")
        self._count = count

    def check(self) -> None:
        """Nothing that was reported may be missing; nobody believes in what has ended."""
        living = self.truth.leases()
        for token, (runtime, leadership) in self._terms.items():
            lease = leadership.entry.lease
            if lease in living or not lease or token in self._leaving or lease in self.taken:
                continue
            if not runtime.dead and runtime.rate >= 1 and leadership.believes():
                raise Violation(f"{runtime.name} believes in lease {lease}, which has ended")
        for name, number in self._reported.items():
            if self._count.done.get(name, 0) < number:
                raise Violation(f"addition {number} of {name} was reported, but is not there")

    def settled(self) -> bool:
        """Everybody has done its share."""
        return len(self._count.done) == self.nodes and all(
            done >= SHARE for done in self._count.done.values()
        )
