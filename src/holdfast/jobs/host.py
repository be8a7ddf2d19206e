"""A host: takes jobs that wait, has their trainers started, and keeps them known as alive.

Everything that a host starts hangs on its lease: the alive keys of its jobs vanish with it.
A host that loses its lease (the ledger was away, or it was stopped) takes another one and
renews the signs of life of what is still its own; what others have taken over meanwhile it
stops. Until then its trainers go on, fenced by the epoch; without any lease for `host_adrift_s` it
stops them all. Invariants:

- an incarnation is started only after a transaction made it the job's, and only while nothing
  of an earlier one is known to live;
- an address is published only for an incarnation that answers, and only while it is the job's;
- when a job's epoch moves on, its trainer is stopped, and its alive key goes after that.

Any number of hosts may share a run; each job is taken by one of them. A host that was killed and
is started again on the same machine does not wait for its old lease: it sees that the process is
dead, and gives that lease back.
"""

import asyncio
import contextlib
import dataclasses
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from holdfast import events
from holdfast.errors import (
    Fenced,
    Gone,
    HoldfastError,
    LeaseLost,
    Mistake,
    NotFound,
    Retriable,
    UnknownOutcome,
)
from holdfast.jobs import decide
from holdfast.jobs.decide import Budget
from holdfast.jobs.launcher import Launcher, Running, Ticket
from holdfast.jobs.records import Host as HostRecord
from holdfast.jobs.records import Job
from holdfast.jobs.store import Jobs, Seen
from holdfast.jobs.view import View, keep
from holdfast.ledger.leases import Keeper
from holdfast.ledger.records import put
from holdfast.ledger.types import Delete, absent, same_life, unchanged
from holdfast.ledger.unreadable import Unreadable, readable
from holdfast.retry import insist
from holdfast.timeouts import DEFAULTS, Timeouts

__all__ = ["Ended", "Host", "Started", "Taken"]


class Taken(events.Event, frozen=True, tag="job.taken"):
    """A host began an incarnation."""

    job: str
    epoch: int
    host: str


class Started(events.Event, frozen=True, tag="job.started"):
    """An incarnation serves."""

    job: str
    epoch: int
    address: str


class Ended(events.Event, frozen=True, tag="job.ended"):
    """An incarnation is no more."""

    labels = ("how",)

    job: str
    epoch: int
    how: str
    """completed, died, refused, replaced, left"""
    reason: str


@dataclasses.dataclass(eq=False)
class _Tended:
    """An incarnation that this host looks after."""

    job: Job
    lease: int
    secret: str
    stopping: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    grace_s: float = 0.0
    task: "asyncio.Task[None] | None" = None

    def stop(self, grace_s: float) -> None:
        """Have it stopped; the task ends when it is."""
        if not self.stopping.is_set():
            self.grace_s = grace_s
            self.stopping.set()


@dataclasses.dataclass(eq=False)
class Host:
    """One host. `run` goes on until it is cancelled; then everything it started is stopped."""

    jobs: Jobs
    launcher: Launcher
    name: str
    _: dataclasses.KW_ONLY
    capacity: int = 64
    grace_s: float = 10.0
    timeouts: Timeouts = DEFAULTS
    budget: Budget = Budget()  # noqa: RUF009 -- frozen
    me: HostRecord | None = None
    """Where this process is."""
    is_dead: Callable[[HostRecord], bool] = lambda _: False
    """Whether another process surely is no more."""
    new_secret: Callable[[], str] = secrets.token_urlsafe
    """Makes what an incarnation's port asks gateways for."""
    check: Callable[[], Awaitable[None]] | None = None
    """Called when this host is in the ledger; raises a `Mistake` if it must not serve."""

    def __post_init__(self) -> None:
        self._runtime = self.jobs.runtime
        self._tending: dict[str, _Tended] = {}
        self._begun: dict[str, int] = {}
        """The newest epoch of each job that was begun here."""
        self._view = View(self.jobs.keys)
        self._dirty: set[str] = set()
        self._wake = asyncio.Event()
        self._keeper = Keeper(self._runtime, self.timeouts.host_lease_s)
        self._leased_at = self._runtime.now()

    async def run(self) -> None:
        """Take jobs and look after them."""
        times = self.timeouts
        try:
            while True:
                with contextlib.suppress(Retriable, UnknownOutcome, LeaseLost):
                    async with Keeper(self._runtime, times.host_lease_s) as self._keeper:
                        await self._serve()
                if self._runtime.now() - self._leased_at > times.host_adrift_s:
                    await self._drop_all()
                luck = 0.5 + self._runtime.random.random()
                await self._runtime.sleep(times.job_retry_s * luck)
        finally:
            await self._drop_all()

    async def _serve(self) -> None:
        """One lease long."""
        key = self.jobs.keys.host(self.name)
        record = msgspec.structs.replace(
            self.me or HostRecord(name=self.name),
            name=self.name,
            trainers=self.launcher.offers,
            any_command=self.launcher.any_command,
        )
        await self._bury(key)
        await self._runtime.ledger.txn([], [put(key, record, lease=self._keeper.id)])
        if self.check is not None:
            await self.check()
        await self._renew()
        self._leased_at = self._runtime.now()
        self._view = View(self.jobs.keys)
        tasks = [
            self._runtime.spawn(keep(self._runtime, self._view, self._changed), name="host sees"),
            self._runtime.spawn(self._reconcile(), name="host acts"),
            self._runtime.spawn(self._keeper.lost.wait(), name="host's lease"),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except asyncio.CancelledError:
            await self._drop_all()  # while there is a lease to give back with it
            raise
        finally:
            self._leased_at = self._runtime.now()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _bury(self, key: str) -> None:
        """Give the lease of an earlier life of ours back, if that is surely over."""
        entry = await self._runtime.ledger.get(key)
        if entry is None or not entry.lease:
            return
        before = readable(HostRecord, entry)
        if not isinstance(before, Unreadable) and self.is_dead(before):
            await self._runtime.ledger.revoke(entry.lease)

    async def _renew(self) -> None:
        """Bind the signs of life of what is still ours to the new lease; stop the rest."""
        for tended in list(self._tending.values()):
            job = tended.job
            found = await self.jobs.find(job.account, job.id)
            mine = found is not None and found.job.epoch == job.epoch
            if found is None or not mine or (found.alive and found.alive.host != self.name):
                tended.stop(0.0)
                continue
            alive = self.jobs.alive_op(job, self._keeper.id, tended.secret)
            before = unchanged(found.alive_entry) if found.alive_entry else absent(alive.key)
            guard = self.jobs.keys.guard(job.account, job.id, job.epoch)
            txn = await self._runtime.ledger.txn([guard, before], [alive])
            if txn.succeeded:
                tended.lease = self._keeper.id
            else:
                tended.stop(0.0)

    async def _drop_all(self) -> None:
        """Stop everything: at once without a lease, politely when this host leaves."""
        polite = self._keeper.believes()
        tended = list(self._tending.values())
        for one in tended:
            one.stop(self.grace_s if polite else 0.0)
        await asyncio.gather(*(one.task for one in tended if one.task), return_exceptions=True)

    def _changed(self, names: set[str]) -> None:
        self._dirty |= names
        self._wake.set()

    async def _reconcile(self) -> None:
        """Look at every job that has changed, and at those that wait for their time."""
        while True:
            self._wake.clear()
            names, self._dirty = sorted(self._dirty), set()
            waits = [await self._look(name) for name in names]
            later = [name for name, wait_s in zip(names, waits, strict=True) if wait_s]
            soon_s = min((wait_s for wait_s in waits if wait_s), default=3600.0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.05, soon_s)):
                    await self._wake.wait()
            self._dirty.update(later)

    async def _look(self, name: str) -> float:
        """Stop what is no longer wanted, take what waits; returns when to look again, or 0."""
        it, tended = self._view.jobs.get(name), self._tending.get(name)
        if tended is not None:
            if it is not None and it.job.epoch > tended.job.epoch:
                tended.stop(self.grace_s if it.job.state == "PAUSED" else 0.0)
            return 0.0
        if it is None:
            return 0.0
        now = self.jobs.wall()
        try:
            if it.job.state == "PENDING" and it.alive is None:
                if now < it.job.not_before:
                    return min(it.job.not_before - now, 60.0)
                if len(self._tending) >= self.capacity:
                    return 60.0  # or when a place becomes free
                await self._take(it)
            elif self._is_forgotten(it):
                assert it.alive is not None
                self._begin(it.job, it.alive.secret)
            elif self._is_left_over(it):
                assert it.alive is not None
                await self.jobs.clear(it.job.account, it.job.id, it.alive.epoch, self._keeper.id)
            else:
                await settle_one(self.jobs, it, self.budget)
        except (Retriable, UnknownOutcome):
            return self.timeouts.job_retry_s
        return 0.0

    async def _take(self, it: Seen) -> None:
        new = decide.take(it.job, self.name, self.jobs.wall())
        if new is None:
            return
        secret = self.new_secret()
        alive = self.jobs.alive_op(new, self._keeper.id, secret)
        absent = self.jobs.without_alive(it)
        try:
            ours = await self.jobs.commit(it, new, compare=(absent,), ops=[alive])
        except UnknownOutcome:
            ours = await self._is_ours(new, secret)
        if ours:
            self._begin(new, secret)

    def _begin(self, job: Job, secret: str) -> None:
        events.emit(Taken(job=job.name, epoch=job.epoch, host=self.name))
        self._begun[job.name] = job.epoch
        tended = self._tending[job.name] = _Tended(job, self._keeper.id, secret)
        tended.task = self._runtime.spawn(self._tend(tended), name=f"tends {job.name}")

    def _is_forgotten(self, it: Seen) -> bool:
        """Whether we have taken this job and do not know it: the answer to it was lost."""
        unknown = it.job.epoch > self._begun.get(it.job.name, 0)
        mine = it.lives and it.hangs_on(self._keeper.id)
        return mine and unknown and it.job.state == "CREATING"

    def _is_left_over(self, it: Seen) -> bool:
        """Whether a sign of life of ours stands for an incarnation that was ended unbegun."""
        older = it.alive is not None and it.alive.epoch < it.job.epoch
        return older and it.hangs_on(self._keeper.id)

    async def _is_ours(self, job: Job, secret: str) -> bool:
        """Whether the alive key of our own lease is there for this epoch, as we wrote it."""
        found = await self.jobs.find(job.account, job.id)
        return (
            found is not None
            and found.lives
            and found.job.epoch == job.epoch
            and found.hangs_on(self._keeper.id)
            and found.alive is not None
            and found.alive.secret == secret
        )

    # ---- one incarnation -------------------------------------------------------

    async def _tend(self, tended: _Tended) -> None:
        """From the start of an incarnation to its end, whichever comes."""
        job = tended.job
        try:
            how, reason = await self._begin_and_live(tended)
            events.emit(Ended(job=job.name, epoch=job.epoch, how=how, reason=reason))
            await self._report(tended, how, reason)
        finally:
            if self._tending.get(job.name) is tended:
                del self._tending[job.name]
            self._changed(set(self._view.jobs) if self._is_full() else {job.name})

    def _is_full(self) -> bool:
        return len(self._tending) + 1 >= self.capacity

    async def _begin_and_live(self, tended: _Tended) -> tuple[str, str]:
        job = tended.job
        ticket = Ticket(
            run=self.jobs.run,
            account=job.account,
            job=job.id,
            epoch=job.epoch,
            spec=job.spec,
            secret=tended.secret,
        )
        running: Running | None = None
        try:
            running = await self.launcher.start(ticket)
            return await self._live(tended, running)
        except Mistake as error:
            return "refused", str(error)
        except HoldfastError as error:
            return "died", str(error)
        except Exception as error:  # noqa: BLE001 -- whatever it is, the job hears of its end
            return "died", f"{type(error).__name__}: {error}"
        finally:
            if running is not None:
                await running.stop(tended.grace_s)

    async def _live(self, tended: _Tended, running: Running) -> tuple[str, str]:
        """Publish its address once it serves, and wait for its end, or ours."""
        job = tended.job
        serving = self._runtime.spawn(running.serving(), name=f"{job.name} starts")
        ended = self._runtime.spawn(running.ended(), name=f"{job.name} runs")
        stopped = self._runtime.spawn(tended.stopping.wait(), name=f"{job.name} stops")
        tasks: list[asyncio.Task[Any]] = [serving, ended, stopped]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if serving.done() and not stopped.done() and not ended.done():
                publish = self._publish(job, serving.result())
                tasks.append(self._runtime.spawn(publish, name=f"{job.name} is published"))
                await asyncio.wait(
                    (ended, stopped, tasks[-1]), return_when=asyncio.FIRST_COMPLETED
                )
                if tasks[-1].done():
                    tasks[-1].result()
                await asyncio.wait((ended, stopped), return_when=asyncio.FIRST_COMPLETED)
            if stopped.done():
                return "left", f"its host {self.name} stopped it"
            succeeded, reason = ended.result()
            return ("completed" if succeeded else "died"), reason
        except Fenced as error:
            return "replaced", str(error)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _publish(self, job: Job, address: str) -> None:
        """Make the job RUNNING at this address: until it is known to be, or fenced."""
        try:
            await insist(
                self._runtime,
                lambda: self.jobs.update(
                    job.account,
                    job.id,
                    lambda it: decide.ready(it.job, job.epoch, address, self.jobs.wall()),
                ),
            )
        except (Gone, NotFound) as error:
            raise Fenced(str(error)) from error
        events.emit(Started(job=job.name, epoch=job.epoch, address=address))

    async def _report(self, tended: _Tended, how: str, reason: str) -> None:
        """Say how it ended, and take back its alive key in the same transaction.

        If this host dies before, the key ends by itself and others conclude the same.
        """
        job = tended.job

        async def report() -> bool:
            found = await self.jobs.get(job.account, job.id)
            entry = found.alive_entry
            if entry is None or entry.lease != tended.lease:
                return True  # others have concluded, or will
            if found.job.epoch != job.epoch or found.job.state == "UNREADABLE":
                await self.jobs.clear(job.account, job.id, job.epoch, tended.lease)
                return True
            new = _outcome(found.job, how, reason, self.jobs.wall(), self.budget)
            gone = Delete(entry.key)
            return await self.jobs.commit(found, new, compare=(same_life(entry),), ops=[gone])

        with contextlib.suppress(NotFound):
            while not await insist(self._runtime, report):
                pass  # the job was changed meanwhile: read it again


def _outcome(job: Job, how: str, reason: str, now: float, budget: Budget) -> Job:
    """The record after the end of its incarnation."""
    match how:
        case "completed":
            done = decide.change(job, "complete", now, reason=reason)
        case "refused":
            done = decide.change(job, "fail", now, reason=reason)
        case "left":  # not the job's fault: it does not count
            done = decide.change(job, "restart", now, reason=reason)
        case _:
            done = decide.fall(job, job.epoch, reason or how, now, budget)
    assert done is not None
    return done


async def settle_one(jobs: Jobs, it: Seen, budget: Budget) -> None:
    """Draw the conclusion from a missing sign of life, unless somebody else has."""
    new = decide.settle(it.job, it.alive, jobs.wall(), budget)
    if new is not None:
        await jobs.commit(it, new, compare=(jobs.without_alive(it),))
