"""This node's workers, cycle after cycle: what `attend` starts and stops.

Puts the pieces together: warm interpreters, log files, the warden's deadline, hangs, health. Every
cycle gets a new port, so that nothing of an old cycle is met on it.

A node that cannot start, guard or kill its workers leaves, for good: if it came back for its rank
it would only keep the others from their work. Stopping can be interrupted, and goes on: whoever
asks next waits for the same stop.
"""

import asyncio
import contextlib
import math
import signal
import time
from collections.abc import Callable, Sequence

import msgspec

from holdfast import events, proc
from holdfast.errors import HoldfastError, Mistake, TimedOut, Unavailable
from holdfast.launch import hang
from holdfast.launch.hang import Limits
from holdfast.launch.health import Check, examine
from holdfast.launch.identity import Identity
from holdfast.launch.logs import CycleLogs, Logs
from holdfast.launch.spec import Seat, Spec
from holdfast.launch.warden import Warden, boottime_s
from holdfast.launch.warm import WarmPool
from holdfast.launch.workers import Outcome, Workers
from holdfast.proc import preload
from holdfast.rendezvous import probe
from holdfast.rendezvous.overview import parked_line, say
from holdfast.rendezvous.records import Cause, Rules
from holdfast.rendezvous.rendezvous import Place, Rendezvous
from holdfast.timeouts import DEFAULTS

__all__ = ["UNHEALTHY", "Leaving", "NodeCrew", "Plan"]

UNHEALTHY = 10
"""What an unhealthy node exits with."""
_UNABLE = 70
"""What a node exits with that cannot look after its workers."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that an agent is told; it does not change while the node takes part."""

    run: str
    identity: Identity
    address: str
    ledger_url: str
    spec: Spec
    rules: Rules
    logs: Logs
    lease_s: float
    grace_s: float = 10.0
    limits: Limits = Limits()
    checks: dict[str, Check] = {}
    warm: bool = True
    preload: tuple[str, ...] = preload.USER
    """What interpreters that are kept warm have imported."""

    @property
    def node(self) -> str:
        """This node's name."""
        return self.identity.name

    @property
    def margin_s(self) -> float:
        """How long before its lease ends a node's workers must be stopped."""
        return 0.15 * self.lease_s


class Leaving(msgspec.Struct, frozen=True):
    """Why this node leaves, and what its process exits with."""

    reason: str
    exit_code: int


class CrewStarted(events.Event, frozen=True, tag="launch.crew.started"):
    """The workers of a cycle were started."""

    run: str
    cycle: int
    node_rank: int
    node_count: int
    world_size: int


class CrewEnded(events.Event, frozen=True, tag="launch.crew.ended"):
    """The workers of a cycle have ended by themselves; `cause` says why, if not with success."""

    run: str
    cycle: int
    cause: str = ""


class NodeCrew:
    """The workers of one node. Made in the agent's loop, in its main thread."""

    def __init__(self, plan: Plan, *, pool: WarmPool | None, warden: Warden) -> None:
        self.rendezvous: Rendezvous | None = None
        self.left: Leaving | None = None
        self.on_leave: Callable[[], None] = lambda: None
        self._plan = plan
        self._pool = pool
        self._warden = warden
        self._leave = asyncio.Event()
        self._workers: Workers | None = None
        self._stopping: asyncio.Future[None] | None = None
        self._killed = False
        self._until_s = math.inf  # the deadline, as the warden was told
        self._late = False  # whether it has passed
        self._files: CycleLogs | None = None
        self._refill: asyncio.TimerHandle | None = None
        self._longest_s = 0.0
        self._told_stacks = False
        self._probe: asyncio.Task[str] | None = None
        self._held: proc.HeldPort | None = None
        warden.failed.add_done_callback(lambda why: self.leave(Leaving(why.result(), _UNABLE)))

    # ---- what `attend` asks for --------------------------------------------------

    def port(self) -> int:
        """A new port for rank 0, held until the next one is asked for.

        It is held on every address, because torch's own store listens on every address.
        """
        self._held = proc.HeldPort("::" if ":" in self._plan.address else "")
        return self._held.port

    async def start(self, place: Place) -> None:
        """Start this node's workers, or leave."""
        try:
            await self._start(place)
        except (HoldfastError, OSError) as error:
            code = error.exit_code if isinstance(error, Mistake) else _UNABLE
            self.leave(Leaving(f"its workers cannot be started: {error}", code))

    async def _start(self, place: Place) -> None:
        plan = self._plan
        seat = Seat(
            run=plan.run,
            node=plan.node,
            place=place,
            max_restarts=plan.rules.max_restarts,
            ledger_url=plan.ledger_url,
        )
        say(
            f"cycle {place.cycle}: node {place.rank} of {place.nodes}, "
            f"ranks {place.first_rank} to {place.first_rank + place.slots - 1} "
            f"of {place.world_size}"
        )
        self._until_s, self._late, self._told_stacks = math.inf, False, False
        if place.rank and place.probe_port:
            self._probe = asyncio.create_task(self._reach_rank_0(place), name="probe of rank 0")
        self._files = self._plan.logs.cycle(seat)
        self._workers = await Workers.start(
            self._plan.spec, seat, self._pool, self._files, guard=self._guard
        )
        for start in self._workers.starts:
            events.emit(start)
        events.emit(
            CrewStarted(
                run=plan.run,
                cycle=place.cycle,
                node_rank=place.rank,
                node_count=place.nodes,
                world_size=place.world_size,
            )
        )
        if self._pool is not None:
            loop = asyncio.get_running_loop()
            self._refill = loop.call_later(DEFAULTS.refill_s, self._pool.refill)

    async def outcome(self) -> Cause | None:
        """Wait until the workers have ended, or one hangs."""
        workers = self._workers
        if workers is None:
            assert self.left is not None
            return Cause(kind="withdrew", detail=self.left.reason)
        ended = asyncio.ensure_future(workers.wait())
        hangs = asyncio.ensure_future(self._watch_for_hangs(workers))
        try:
            await asyncio.wait(
                (ended, hangs, self._warden.failed), return_when=asyncio.FIRST_COMPLETED
            )
            await self._hear_of_leaving(ended)
            await self._hear_of_rank_0(ended)
            await self._keep_order(ended)
            cause = self._cause(
                ended.result() if ended.done() else None, hangs.result() if hangs.done() else None
            )
        finally:
            ended.cancel()
            hangs.cancel()
        if cause is None:
            await self._collect(0.0)
        events.emit(
            CrewEnded(
                run=self._plan.run,
                cycle=workers.seat.place.cycle,
                cause=str(cause) if cause else "",
            )
        )
        return cause

    async def stop(self, cause: Cause | None) -> None:
        """Stop whatever runs; before that, tell where it was if something hangs."""
        is_hung = cause is not None and cause.kind == "hung"
        if self._workers is not None and is_hung and not self._told_stacks:
            await self._tell_stacks(self._workers)
        await self._collect(self._plan.grace_s)

    async def leaving(self) -> str:
        """Wait until this node is to leave."""
        checkups = asyncio.ensure_future(self._check_health())
        try:
            await self._leave.wait()
        finally:
            checkups.cancel()
        assert self.left is not None
        return self.left.reason

    def parked(self, reason: str) -> None:
        """Say why this node comes after all others from now on."""
        say(parked_line(reason))

    # ---- what the agent does ---------------------------------------------------

    def leave(self, leaving: Leaving) -> None:
        """Ask this node to leave. The first reason counts."""
        if self.left is None:
            self.left = leaving
            self._leave.set()
            self.on_leave()

    def kill(self) -> None:
        """End the workers at once, without waiting for anything."""
        self._killed = True
        for worker in self._workers.workers if self._workers is not None else ():
            worker.process.signal(signal.SIGKILL)

    def renew(self) -> None:
        """Let the workers live for as long as this node's lease certainly does."""
        if self.rendezvous is not None:
            self._late |= boottime_s() >= self._until_s
            self._until_s = self.rendezvous.valid_until - self._plan.margin_s
            with contextlib.suppress(Unavailable):  # then its `failed` is done
                self._warden.renew(self._until_s)

    # ---- inside --------------------------------------------------------------------

    async def _hear_of_leaving(self, ended: "asyncio.Future[Outcome]") -> None:
        """Who signals every process of a job signals us, too: a worker may have been faster."""
        first = ended.result().first if ended.done() else None
        if first is not None and first.code == -signal.SIGTERM:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DEFAULTS.signalled_s):
                    await self._leave.wait()

    async def _reach_rank_0(self, place: Place) -> str:
        """Why rank 0 is not reached, which is then reported; empty: it is."""
        run, rendezvous = self._plan.run, self.rendezvous
        why = await probe.trouble(place.address, place.probe_port, run, place.first)
        if why and rendezvous is not None:
            say(why)
            with contextlib.suppress(HoldfastError):  # the lease: `attend` hears of it, too
                await rendezvous.unreached(place.cycle)
        return why

    async def _hear_of_rank_0(self, ended: "asyncio.Future[Outcome]") -> None:
        """Workers that fail because they do not reach rank 0 are no failure of this node.

        The closer then ends the cycle, and says which node is at fault.
        """
        if ended.done() and not ended.result().success and self._probe is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DEFAULTS.unreached_s):
                    if await asyncio.shield(self._probe):
                        await asyncio.Event().wait()

    async def _keep_order(self, ended: "asyncio.Future[Outcome]") -> None:
        """Report an exception a fixed time after it was raised, not when its process has ended.

        The first report says which node failed first. When a worker ends, its peers fail because
        of it, a moment later; and how long an interpreter takes to end differs by more than that.
        """
        first = ended.result().first if ended.done() else None
        if first is not None and first.error_file is not None:
            await asyncio.sleep(min(first.at - time.time(), 0.0) + DEFAULTS.report_order_s)

    def _guard(self, pids: Sequence[int]) -> None:
        self.renew()
        self._warden.guard(pids)

    def _cause(self, outcome: Outcome | None, hung: str | None) -> Cause | None:
        if outcome is not None and outcome.success:
            return None
        if self._late or boottime_s() >= self._until_s:  # so the warden has stopped them
            detail = "its lease was not renewed in time, and its workers were stopped"
            say(detail)
            return Cause(kind="lost", detail=detail)
        if outcome is not None and outcome.first is not None:
            say(str(outcome.first))
            return Cause(kind="failed", detail=str(outcome.first)[:2000])
        if hung is not None:
            return Cause(kind="hung", detail=hung)
        if self._warden.failed.done():
            return Cause(kind="withdrew", detail=self._warden.failed.result())
        return Cause(kind="failed", detail="the workers were stopped from outside")

    async def _watch_for_hangs(self, workers: Workers) -> str:
        awake_since_s = last_s = time.monotonic()
        while True:
            await asyncio.sleep(DEFAULTS.hang_look_s)
            now_s = time.monotonic()
            if now_s - last_s > 10 * DEFAULTS.hang_look_s:
                awake_since_s = now_s  # we were stopped, and maybe the workers too
            last_s = now_s
            beats = workers.beats()
            self._longest_s = max([self._longest_s, *(b.longest_s for b in beats.values())])
            limits = msgspec.structs.replace(self._plan.limits, longest_s=self._longest_s)
            found = hang.judge(beats, now_s, limits, awake_since_s=awake_since_s)
            if found is not None:
                say(str(found))
                await self._tell_stacks(workers)
                return str(found)

    async def _tell_stacks(self, workers: Workers) -> None:
        self._told_stacks = True
        text = await hang.dump(workers.workers)
        assert self._files is not None
        path = self._files.folder / f"stacks_{self._plan.node}.txt"
        where = str(path)
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            where = f"not written, {error}"
        say(f"stacks of all workers of this node: {where}\n{text}")

    async def _collect(self, grace_s: float) -> None:
        """Nothing of the workers is left after this."""
        if self._refill is not None:
            self._refill.cancel()
        if self._probe is not None:
            self._probe.cancel()
            self._probe = None
        if self._workers is not None:
            if self._stopping is None:
                stop = self._workers.stop(0.0 if self._killed else grace_s)
                self._stopping = asyncio.ensure_future(stop)
            try:
                await asyncio.shield(self._stopping)
            except TimedOut as error:
                self.leave(Leaving(str(error), _UNABLE))
                raise
            self._workers = self._stopping = None
        files, self._files = self._files, None
        if files is not None:
            with contextlib.suppress(Unavailable):  # then nobody is guarded any more
                self._warden.release()
            await asyncio.to_thread(files.close)

    async def _check_health(self) -> None:
        while True:
            await asyncio.sleep(DEFAULTS.health_every_s)
            wrong = await examine(self._plan.checks)
            if wrong is not None:
                self.leave(Leaving(f"unhealthy: {wrong}", UNHEALTHY))
                return
