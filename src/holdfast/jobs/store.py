"""Reading and changing jobs: the thin shell around `decide.py`.

Every change is one transaction that compares what was read; the alive key is compared or
changed with it where that matters. A lost answer is looked up, never guessed.

A job whose record or sign of life cannot be read is there all the same, as UNREADABLE: it concerns
nobody else, and can be deleted.
"""

import re
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from holdfast.errors import Conflict, Exists, NotFound, Unavailable, UnknownOutcome
from holdfast.jobs import decide
from holdfast.jobs.decide import Verb
from holdfast.jobs.records import NAME, Alive, Job, Keys, write
from holdfast.ledger.runtime import Runtime
from holdfast.ledger.types import Compare, Delete, Entry, Get, Op, Put, absent, same_life
from holdfast.ledger.unreadable import Unreadable, readable, tell
from holdfast.retry import Policy
from holdfast.timeouts import DEFAULTS

__all__ = ["Jobs", "Seen"]

_ANY = re.compile(".*")
_DIGITS = 19
_AGAIN = Policy(
    attempts=16, base_s=0.005, max_s=0.5, jitter=0.5, deadline_s=DEFAULTS.update_deadline_s
)


class Seen(msgspec.Struct, frozen=True):
    """A job's record and its sign of life, read at one revision."""

    job: Job
    entry: Entry
    alive: Alive | None = None
    alive_entry: Entry | None = None
    revision: int = 0
    """When this was so."""

    @property
    def lives(self) -> bool:
        """Whether the incarnation of the job's present epoch is alive."""
        return self.alive is not None and self.alive.epoch == self.job.epoch

    def hangs_on(self, lease: int) -> bool:
        """Whether the sign of life is bound to this lease."""
        return self.alive_entry is not None and self.alive_entry.lease == lease


class Jobs:
    """The jobs of one run. `wall` tells seconds since 1970."""

    def __init__(self, runtime: Runtime, run: str, wall: Callable[[], float]) -> None:
        self.runtime = runtime
        self.run = run
        self.keys = Keys(run)
        self.wall = wall

    # ---- reading -------------------------------------------------------------

    async def find(self, account: str, job: str) -> Seen | None:
        """Read one job, linearizably; None when there has never been one."""
        return (await self.look(account, job))[1]

    async def look(self, account: str, job: str) -> tuple[int, Seen | None]:
        """Read one job, and tell at which revision."""
        places = (self.keys.job, self.keys.alive, self.keys.epoch)
        txn = await self.runtime.ledger.txn([], [Get(place(account, job)) for place in places])
        entry, alive, epoch = txn.results
        found = None if entry is None else seen(entry, alive, epoch, txn.revision)
        return txn.revision, found

    async def get(self, account: str, job: str) -> Seen:
        """Read one job, or `NotFound`."""
        found = await self.find(account, job)
        if found is None:
            raise NotFound(f"there is no job {job} in the account {account}")
        return found

    async def page(self, account: str, after: str, limit: int) -> tuple[list[Job], bool]:
        """The account's jobs in the order of their ids, behind the id `after`."""
        entries, more = await self.entries(self.keys.of_account(account), after, limit, NAME)
        return [_read(entry, None) for entry in entries], more

    async def entries(
        self, folder: str, after: str, limit: int, named: re.Pattern[str] = _ANY
    ) -> tuple[list[Entry], bool]:
        """What is in a folder behind the name `after`, and whether there is more."""
        found: list[Entry] = []
        async for page in self.runtime.ledger.pages(folder):
            for entry in page.entries:
                name = entry.key.removeprefix(folder)
                if name > after and named.fullmatch(name):
                    found.append(entry)
                    if len(found) > limit:
                        return found[:limit], True
        return found, False

    # ---- changing ------------------------------------------------------------

    async def create(self, account: str, job: str, spec: dict[str, Any]) -> Job:
        """Make a job; `Exists` when the id has been used, whatever became of it."""
        new = decide.create(account, job, spec, self.wall())
        compare, ops = write(self.keys, new, over=None)
        attempts = 0

        async def once() -> Job:
            nonlocal attempts
            attempts += 1
            txn = await self.runtime.ledger.txn(compare, ops)
            if txn.succeeded:
                return new
            found = await self.get(account, job)
            if attempts > 1 and found.job.created_at == new.created_at:
                return found.job  # an earlier attempt of ours, whose answer was lost
            raise Exists(
                f"the job {new.name} exists already ({found.job.state}); ids are not used again"
            )

        return await self._again(once)

    async def change(self, account: str, job: str, verb: Verb) -> Job:
        """Do what a user asks for; returns the job as it is then."""

        def decision(it: Seen) -> Job | None:
            return decide.change(it.job, verb, self.wall(), alive=it.alive is not None)

        return await self.update(account, job, decision, ops=_tidy)

    async def update(
        self,
        account: str,
        job: str,
        decision: Callable[[Seen], Job | None],
        *,
        ops: Callable[[Seen], list[Op]] = lambda _: [],
    ) -> Job:
        """Change one job by a pure function, again after conflicts; None leaves it.

        The function recognises its own effect: it is asked again when an answer was lost.
        """

        async def once() -> Job:
            found = await self.get(account, job)
            new = decision(found)
            if new is None:
                return found.job
            if await self.commit(found, new, ops=ops(found)):
                return new
            raise Conflict(f"the job {account}/{job} was changed by others again and again")

        return await self._again(once)

    async def commit(
        self,
        found: Seen,
        new: Job,
        *,
        compare: tuple[Compare, ...] = (),
        ops: list[Op] | None = None,
    ) -> bool:
        """Write what was decided, if nothing has changed since `found` was read."""
        conditions, writes = write(self.keys, new, over=found.entry)
        txn = await self.runtime.ledger.txn([*conditions, *compare], [*writes, *(ops or [])])
        return txn.succeeded

    # ---- an incarnation's signs of life ----------------------------------------

    def without_alive(self, found: Seen) -> Compare:
        """True while nothing of the job is alive."""
        return absent(self.keys.alive(found.job.account, found.job.id))

    def alive_op(self, job: Job, lease: int, secret: str = "") -> Put:
        """The sign of life of the job's present incarnation, with the secret of its port."""
        alive = Alive(epoch=job.epoch, host=job.host, secret=secret)
        return Put(self.keys.alive(job.account, job.id), msgspec.json.encode(alive), lease)

    async def clear(self, account: str, job: str, epoch: int, lease: int) -> None:
        """Take back a sign of life of our own: what gave it has been stopped."""
        key = self.keys.alive(account, job)
        entry = await self.runtime.ledger.get(key)
        if entry is None or entry.lease != lease:
            return
        alive = readable(Alive, entry)
        if isinstance(alive, Unreadable) or alive.epoch == epoch:
            await self.runtime.ledger.txn([same_life(entry)], [Delete(key)])

    async def _again(self, once: Callable[[], Awaitable[Job]]) -> Job:
        """Try again what recognises its own effect."""
        return await _AGAIN.acall(
            once, on=(Conflict, Unavailable, UnknownOutcome), clock=self.runtime
        )


def seen(entry: Entry, alive: Entry | None, epoch: Entry | None, revision: int) -> Seen:
    """A job as its entries tell it; `epoch` is what counts when the record cannot be read."""
    told = readable(Alive, alive) if alive else None
    if isinstance(told, Unreadable):
        return Seen(_unreadable(entry, told.reason, epoch), entry, None, alive, revision)
    job = _read(entry, epoch)
    if job.state == "UNREADABLE" and told is not None:
        job = msgspec.structs.replace(job, epoch=max(job.epoch, told.epoch))
    return Seen(job, entry, told, alive, revision)


def _read(entry: Entry, epoch: Entry | None) -> Job:
    job = readable(Job, entry)
    if isinstance(job, Unreadable):
        return _unreadable(entry, job.reason, epoch)
    if not entry.key.endswith(f"/{job.name}"):
        reason = f"{entry.key} holds the record of another job, {job.name}"
        return _unreadable(entry, tell(entry, reason).reason, epoch)
    return job


def _unreadable(entry: Entry, reason: str, epoch: Entry | None) -> Job:
    """What stands for a job whose record tells nothing; its key tells its name."""
    account, name = entry.key.split("/")[-2:]
    number = epoch.value if epoch else b""
    known = int(number) if number.isdigit() and len(number) < _DIGITS else 1
    why = f"its record cannot be read, and it can only be deleted: {reason}"
    return Job(account=account, id=name, state="UNREADABLE", epoch=known, reason=why)


def _tidy(found: Seen) -> list[Op]:
    """A sign of life that nobody can read goes with whatever is changed."""
    unread = found.alive_entry is not None and found.alive is None
    return [Delete(found.alive_entry.key)] if unread and found.alive_entry else []
