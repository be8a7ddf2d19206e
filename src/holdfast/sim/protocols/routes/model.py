"""Jobs come and go, trainers die and move, and callers hear nothing that is not true.

n0 is the user of the control plane: creates two jobs (one per account), pauses, resumes and at
last deletes one of them; n1 and n2 are hosts; n3 and n4 gateways, whose views lag; n5 and n6
call: each works for one account, operation after operation, sending again whatever may be
sent again. Trainers share three addresses. In every third schedule the gateways are naive, as
others' are, and the callers ask the control plane before they believe a 404. Invariants:

1. a caller hears "not found" or "gone" only if that was so at some moment of its call; behind a
   naive gateway it sends again after a 404 only if its job has been RUNNING since;
2. an operation takes effect once, in order, and by the incarnation that is the job's then;
3. nothing takes effect at another account's trainer;
4. an epoch never falls, an address is there exactly while a job is RUNNING, a tombstone stays.

At the end the job that was kept works on, and everybody has heard of the other one's end.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import msgspec

from holdfast.client.meaning import AGAIN, meaning_of, next_step
from holdfast.errors import Exists, HoldfastError, Unavailable, UnknownOutcome
from holdfast.gateway.answers import Answer, Kind, Route
from holdfast.gateway.desk import Desk, Sent
from holdfast.jobs.decide import Verb
from holdfast.jobs.fence import Incarnation
from holdfast.jobs.host import Host
from holdfast.jobs.launcher import Ticket
from holdfast.jobs.records import GONE, TOMBSTONES, Job, Keys
from holdfast.jobs.store import Jobs
from holdfast.ledger import Batch
from holdfast.ledger.records import decode
from holdfast.retry import Pauses, Policy, insist
from holdfast.sim.protocol import Protocol, Violation
from holdfast.sim.protocols.routes.others import LateRoutes, NaiveDesk
from holdfast.sim.protocols.routes.trainer import Call, Op, Reply, SimLauncher, Trainer
from holdfast.sim.times import TIMES
from holdfast.sim.world import Node

__all__ = ["RoutesProtocol"]

RUN = "r"
KEYS = Keys(RUN)
ACCOUNTS = ("x", "y")
JOB = "j"
DOUBTS = Policy(base_s=0.1, max_s=2.0, jitter=0.0)
"""How the client waits after a doubtful 404."""
GATEWAYS = {"n3": "g3", "n4": "g4"}


def _secrets(runtime: Node) -> Callable[[], str]:
    return lambda: f"{runtime.random.getrandbits(64):016x}"


class RoutesProtocol(Protocol):
    """The sound protocol, with the parts that it is given."""

    nodes = 7
    steps = 900
    net = True
    naive = False

    never = frozenset(
        # Whoever calls another process holds no lease here.
        {("expire", "net.sent"), ("expire", "net.answered")}
    )

    def __init__(
        self,
        desk: type[Desk] = Desk,
        host: type[Host] = Host,
        jobs: type[Jobs] = Jobs,
        trainer: Callable[[Node, Ticket], Trainer] = Trainer,
        *,
        resubmits: bool = False,
        verifies: bool = True,
    ) -> None:
        """`resubmits`: callers send a new operation when they do not hear of an old one.

        `verifies`: callers ask the control plane before they doubt a 404.
        """
        self._desk = desk
        self._host = host
        self._jobs = jobs
        self._trainer = trainer
        self._resubmits = resubmits
        self._verifies = verifies
        self._epochs: dict[str, int] = {}
        self._states: dict[str, list[tuple[float, str | None]]] = {
            f"{account}/{JOB}": [(0.0, None)] for account in ACCOUNTS
        }
        self._works: dict[str, dict[str, int]] = {account: {} for account in ACCOUNTS}
        self._done: dict[str, set[int]] = {account: set() for account in ACCOUNTS}
        self._told: set[str] = set()
        self._works_again = False

    def prepare(self, seed: int) -> None:
        """Every third schedule has gateways that believe their tables."""
        self.naive = seed % 3 == 2

    async def run(self, runtime: Node, name: str) -> None:
        """One process, by its name."""
        jobs = self._jobs(runtime, RUN, lambda: 1e9 + runtime.now())
        if name == "n0":
            await self._use(jobs, runtime)
        elif name in ("n1", "n2"):
            launcher = SimLauncher(runtime, self._trainer)
            given: Any = {"grace_s": 2.0, "new_secret": _secrets(runtime), "timeouts": TIMES}
            await self._host(jobs, launcher, name, **given).run()
        elif name in GATEWAYS:
            await self._gate(jobs, runtime, GATEWAYS[name])
        else:
            await self._call(jobs, runtime, ACCOUNTS[0 if name == "n5" else 1])

    # ---- the user of the control plane -----------------------------------------

    async def _use(self, jobs: Jobs, runtime: Node) -> None:
        for account in ACCOUNTS:
            with contextlib.suppress(Exists):  # a life before this one has made it
                await jobs.create(account, JOB, {})
        while not self.world.healed:
            await runtime.sleep(runtime.random.random() * 20)
            account = runtime.random.choice(ACCOUNTS)
            verbs: tuple[Verb, ...] = ("pause", "resume", "resume", "cancel")
            verb = runtime.random.choice(verbs)
            with contextlib.suppress(HoldfastError):
                await jobs.change(account, JOB, verb)
        while not self._over():
            with contextlib.suppress(HoldfastError):
                if ACCOUNTS[1] not in self._told:
                    await jobs.change(ACCOUNTS[1], JOB, "delete")
                with contextlib.suppress(Exists):
                    await jobs.create(ACCOUNTS[1], JOB, {})
                await jobs.change(ACCOUNTS[0], JOB, "resume")
            await runtime.sleep(1.0)

    # ---- a gateway ---------------------------------------------------------------

    async def _gate(self, jobs: Jobs, runtime: Node, address: str) -> None:
        def lag() -> float:
            return runtime.random.choice((0.0, 0.0, 1.0, 10.0)) * runtime.random.random()

        routes = LateRoutes(jobs, lag)
        kind = NaiveDesk if self.naive else self._desk
        desk = kind(runtime, routes, TIMES)

        async def handle(call: Call) -> Reply:
            return await self._serve(desk, runtime, call)

        async with runtime.net.listening(address, handle):
            await routes.run()

    async def _serve(self, desk: Desk, runtime: Node, call: Call) -> Reply:
        got: Reply | None = None
        lost = False

        async def forward(route: Route) -> Sent:
            nonlocal got, lost
            if lost and call.kind == "submit":
                raise Violation(f"{call.work} was sent again, and may have been received")
            who = Incarnation(RUN, route.account, route.job, route.epoch, route.secret)
            headers = tuple((k.encode(), v.encode()) for k, v in who.headers().items())
            meant = msgspec.structs.replace(call, headers=headers)
            try:
                limit_s = 8.0 if call.kind == "poll" else 2.0
                reply = await runtime.net.call(route.address, meant, limit_s)
            except Unavailable as error:
                return Sent("refused", str(error))
            except UnknownOutcome as error:
                lost = True
                return Sent("lost", str(error))
            if reply.status == 421:
                return Sent("misdirected", "another incarnation")
            got = reply
            return Sent("done")

        kind: Kind = "poll" if call.kind == "poll" else "submit"
        answer = await desk.serve(call.account, call.job, kind, forward)
        if answer is None:
            assert got is not None
            return got
        assert isinstance(answer, Answer)
        return Reply(answer.status, answer.code)

    # ---- a caller ----------------------------------------------------------------

    async def _call(self, jobs: Jobs, runtime: Node, account: str) -> None:
        """Operation after operation, as an SDK does it."""
        while not self._over():
            await runtime.sleep(runtime.random.random() * 4)
            if account not in self._told:
                # What was done is what a caller's successor reads somewhere.
                await self._operate(jobs, runtime, account, len(self._done[account]) + 1)

    async def _operate(self, jobs: Jobs, runtime: Node, account: str, seq: int) -> None:
        """Submit under one number until it is taken, poll until it is done."""
        kind, number, healed = "submit", seq, self.world.healed

        async def ask() -> tuple[float, Reply]:
            began = self.world.loop.time()
            call = Call(kind, account, JOB, number, work=f"{account}:{seq}")
            gateway = runtime.random.choice(sorted(GATEWAYS.values()))
            return began, await self._ask(jobs, runtime, gateway, call)

        def unheard(_: Exception) -> None:
            nonlocal kind, number
            if self._resubmits and kind == "poll":
                kind, number = "submit", number + 1

        while not self._over():
            began, reply = await insist(runtime, ask, failed=unheard)
            if reply.status == 200:
                if kind == "poll":
                    self._done[account].add(seq)
                    self._works_again |= healed and account == ACCOUNTS[0]
                    return
                kind = "poll"
            elif reply.status in (404, 410, 423):
                if not self.naive:
                    self._judge(account, reply, began)
                if self._is(account, TOMBSTONES):
                    self._told.add(account)
                    return
                await runtime.sleep(2.0)
            else:
                await runtime.sleep(1.0)

    async def _ask(self, jobs: Jobs, runtime: Node, gateway: str, call: Call) -> Reply:
        """One request as the client's transport sends it: again, while a 404 is doubtful."""
        kind: Kind = "poll" if call.kind == "poll" else "submit"
        pauses, until = Pauses(runtime, DOUBTS), runtime.now() + TIMES.doubt_s
        while True:
            reply: Reply = await runtime.net.call(gateway, call, TIMES.sdk_poll_s)
            meaning = meaning_of(kind, reply.status, reply.code, "")
            if not self.naive or meaning == "answer":
                return reply
            heard = self.world.loop.time()
            step = next_step(kind, meaning, await self._state(jobs, call.account))
            if step not in AGAIN or runtime.now() > until:
                return reply
            self._may_doubt(call.account, heard)
            await pauses.wait()

    async def _state(self, jobs: Jobs, account: str) -> str:
        """What the control plane says; nothing, if it does not answer."""
        if not self._verifies:
            return "RUNNING"
        with contextlib.suppress(HoldfastError):
            found = await jobs.find(account, JOB)
            return found.job.state if found else "NOT_FOUND"
        return ""

    # ---- the invariants ------------------------------------------------------------

    def _may_doubt(self, account: str, heard: float) -> None:
        """Whether the job has been RUNNING at some moment since a 404 was heard."""
        if "RUNNING" not in self._since(account, heard):
            raise Violation(f"{account} doubts a 404; its job was {self._since(account, heard)}")

    def _since(self, account: str, began: float) -> list[str | None]:
        """The states of the account's job from then on, the one at that moment included."""
        states = self._states[f"{account}/{JOB}"]
        ends = [*(at for at, _ in states[1:]), float("inf")]
        return [state for (_, state), until in zip(states, ends, strict=True) if until >= began]

    def _judge(self, account: str, reply: Reply, began: float) -> None:
        """Whether the job was gone, or not there, at some moment of the call."""
        during = self._since(account, began)
        if reply.status == 404 and None not in during:
            raise Violation(f"{account} heard 404; its job was {during}")
        if reply.status == 423 and "PAUSED" not in during:
            raise Violation(f"{account} heard that its job is paused; it was {during}")
        if reply.status == 410 and not GONE & set(during):
            raise Violation(f"{account} heard 410 ({reply.code}); its job was {during}")

    def observe(self, batch: Batch) -> None:
        """Look at every job's record and at every effect."""
        for event in batch.events:
            if event.entry is None:
                if event.key.startswith((KEYS.records, KEYS.epochs, "/ops/")):
                    raise Violation(f"{event.key} was deleted")
            elif event.key.startswith(KEYS.records):
                self._see_job(decode(Job, event.entry))
            elif event.key.startswith("/ops/"):
                self._see_op(event.key, msgspec.json.decode(event.entry.value, type=Op))

    def _see_job(self, job: Job) -> None:
        last = self._epochs.get(job.name, 0)
        before = self._states[job.name][-1][1]
        if job.epoch < last:
            raise Violation(f"the epoch of {job.name} fell from {last} to {job.epoch}")
        if bool(job.address) != (job.state == "RUNNING"):
            raise Violation(f"{job.name} is {job.state} at {job.address!r}")
        if before in TOMBSTONES and job.state != before:
            raise Violation(f"{job.name} was {before} and is {job.state}")
        if job.epoch == last and before == "RUNNING" and job.state != "RUNNING":
            raise Violation(f"{job.name} left RUNNING and kept its epoch {last}")
        self._epochs[job.name] = job.epoch
        self._states[job.name].append((self.world.loop.time(), job.state))

    def _see_op(self, key: str, op: Op) -> None:
        _, _, account, job, seq = key.split("/")
        name = f"{account}/{job}"
        if not op.work.startswith(f"{account}:"):
            raise Violation(f"{op.work} took effect at the trainer of {name}")
        if op.epoch != self._epochs.get(name) or self._states[name][-1][1] != "RUNNING":
            # CREATING does not serve: its address is not known to anybody.
            now = self._states[name][-1][1]
            raise Violation(
                f"{op.work} took effect by epoch {op.epoch} of {name}, which is {now} at epoch "
                f"{self._epochs.get(name)}"
            )
        works = self._works[account]
        works[op.work] = works.get(op.work, 0) + 1
        if works[op.work] > 1:
            raise Violation(f"{op.work} took effect twice")
        if len(works) != int(seq):
            raise Violation(f"{op.work} took effect as number {seq}, after {len(works) - 1}")

    def _is(self, account: str, states: frozenset[str]) -> bool:
        return self._states[f"{account}/{JOB}"][-1][1] in states

    def _over(self) -> bool:
        return self.world.healed and self.settled()

    def settled(self) -> bool:
        """One job works on; the other is gone, and its caller knows."""
        return self.world.healed and self._works_again and ACCOUNTS[1] in self._told
