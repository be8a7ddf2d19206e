"""Reading and changing jobs: the thin shell around `decide.py`.

Every change is one transaction that compares what was read; the alive key is compared or
changed with it where that matters. A lost answer is looked up, never guessed.
"""

from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from holdfast.errors import Conflict, Exists, NotFound, Retriable, Unavailable, UnknownOutcome
from holdfast.jobs import decide
from holdfast.jobs.decide import Verb
from holdfast.jobs.records import Alive, Job, Keys, write
from holdfast.ledger.records import decode
from holdfast.ledger.runtime import Runtime
from holdfast.ledger.types import Compare, Delete, Entry, Get, Op, Put, absent, same_life

__all__ = ["Jobs", "Seen"]

_ATTEMPTS = 16


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


Decide = Callable[[Seen], Job | None]


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
        txn = await self.runtime.ledger.txn(
            [], [Get(self.keys.job(account, job)), Get(self.keys.alive(account, job))]
        )
        entry, alive = txn.results
        found = None if entry is None else seen(entry, alive, txn.revision)
        return txn.revision, found

    async def get(self, account: str, job: str) -> Seen:
        """Read one job, or `NotFound`."""
        found = await self.find(account, job)
        if found is None:
            raise NotFound(f"there is no job {job} in the account {account}")
        return found

    async def page(self, account: str, after: str, limit: int) -> tuple[list[Job], bool]:
        """The account's jobs in the order of their ids, behind the id `after`."""
        folder = self.keys.of_account(account)
        found: list[Job] = []
        async for entry in self._entries(folder):
            if entry.key.removeprefix(folder) > after:
                found.append(decode(Job, entry))
                if len(found) > limit:
                    return found[:limit], True
        return found, False

    async def _entries(self, prefix: str) -> AsyncIterator[Entry]:
        async for page in self.runtime.ledger.pages(prefix):
            for entry in page.entries:
                yield entry

    # ---- changing ------------------------------------------------------------

    async def create(self, account: str, job: str, spec: dict[str, Any]) -> Job:
        """Make a job; `Exists` when the id has been used, whatever became of it."""
        new = decide.create(account, job, spec, self.wall())
        compare, ops = write(self.keys, new, over=None)
        failure: Exception | None = None
        for attempt in range(_ATTEMPTS):
            await self._pause(attempt)
            try:
                txn = await self.runtime.ledger.txn(compare, ops)
                if txn.succeeded:
                    return new
                found = await self.get(account, job)
            except (Unavailable, UnknownOutcome) as error:
                failure = error
                continue
            if failure is not None and found.job.created_at == new.created_at:
                return found.job  # an earlier attempt of ours, whose answer was lost
            raise Exists(
                f"the job {new.name} exists already ({found.job.state}); ids are not used again"
            )
        assert failure is not None
        raise failure

    async def change(self, account: str, job: str, verb: Verb, **fields: Any) -> Job:
        """Do what a user asks for; returns the job as it is then."""
        return await self.update(
            account,
            job,
            lambda it: decide.change(
                it.job, verb, self.wall(), alive=it.alive is not None, **fields
            ),
        )

    async def update(
        self,
        account: str,
        job: str,
        decision: Decide,
        *,
        compare: tuple[Compare, ...] = (),
        ops: Callable[[Seen], list[Op]] = lambda _: [],
    ) -> Job:
        """Change one job by a pure function, again after conflicts; None leaves it.

        The function recognises its own effect: it is asked again when an answer was lost.
        """
        failure: Retriable | UnknownOutcome | None = None
        for attempt in range(_ATTEMPTS):
            await self._pause(attempt)
            try:
                found = await self.get(account, job)
                new = decision(found)
                if new is None:
                    return found.job
                if await self.commit(found, new, compare=compare, ops=ops(found)):
                    return new
            except (Unavailable, UnknownOutcome) as error:
                failure = error
                continue
            failure = Conflict(f"the job {account}/{job} was changed by others again and again")
        assert failure is not None
        raise failure

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
        if entry is not None and entry.lease == lease and decode(Alive, entry).epoch == epoch:
            await self.runtime.ledger.txn([same_life(entry)], [Delete(key)])

    async def _pause(self, attempt: int) -> None:
        if attempt:
            luck = 0.5 + self.runtime.random.random()
            await self.runtime.sleep(min(0.5, 0.002 * 2**attempt) * luck)


def seen(entry: Entry, alive: Entry | None, revision: int) -> Seen:
    """A job as its two entries tell it."""
    told = decode(Alive, alive) if alive else None
    return Seen(decode(Job, entry), entry, told, alive, revision)
