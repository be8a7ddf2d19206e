"""The queue of samples: each is consumed exactly once per task, whoever dies.

    async with Queue(store, ledger, "rollouts", {"train": ["tokens", "reward"]}) as queue:
        await queue.put([Item("s1", {"tokens": tokens}, group="g1", version=7)])
        await queue.put_fields({"s1": {"reward": reward}})

        async with await queue.claim("train", 64, max_lag=2) as batch:
            values = await batch.fetch()
            await batch.acknowledge()

Payloads are in a store, everything else in the ledger; no process owns the queue, and it
outlives all of them. A sample is put once, by its key: putting it again, also after it was
consumed (as long as its block is remembered), does nothing. When every task is done with a
sample, its payloads are deleted. `plan.py` has the rules.
"""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from holdfast.errors import HoldfastError, LeaseLost, Mistake, NotFound, TimedOut
from holdfast.ledger import Ledger, LiveRuntime, Runtime
from holdfast.ledger.records import update
from holdfast.retry import insist
from holdfast.timeouts import Timeouts
from holdfast.transfer.frame import check_key
from holdfast.transfer.queue.batch import Batch, fetch
from holdfast.transfer.queue.claiming import Claiming
from holdfast.transfer.queue.desk import Desk
from holdfast.transfer.queue.member import Seat
from holdfast.transfer.queue.putting import Item, Putting, behind
from holdfast.transfer.queue.records import Config, Keys, Sample
from holdfast.transfer.queue.samplers import Sampler, in_order
from holdfast.transfer.queue.tidying import Tidying
from holdfast.transfer.store import Store

__all__ = ["Parts", "Queue", "Tasks"]

MAX_CLAIM = 10_000
MAX_TASKS = 16

Tasks = Mapping[str, Iterable[str]] | Sequence[str]


@dataclass(frozen=True, slots=True)
class Parts:
    """What a queue is put together from: a factory for each of its parts."""

    desk: Callable[[Runtime, Keys, Store, str, float, Timeouts], Desk] = Desk
    putting: type[Putting] = Putting
    claiming: Callable[[Desk, Tidying, str, Seat], Claiming] = Claiming
    tidying: type[Tidying] = Tidying


class Queue:
    """A queue, as one process takes part in it. Use `async with`."""

    def __init__(
        self,
        store: Store,
        ledger: Ledger,
        name: str,
        tasks: Tasks | None = None,
        *,
        run: str = "default",
        member: str = "member",
        max_samples: int = 100_000,
        max_bytes: int = 1 << 40,
        lease_s: float | None = None,
        runtime: Runtime | None = None,
        timeouts: Timeouts | None = None,
        parts: Parts = Parts(),  # noqa: B008 -- frozen
    ) -> None:
        """Tasks are names, or names with the fields that each needs; None: as they are.

        The first who opens a queue decides its tasks and limits; the tasks of others must be
        the same, and their limits are not looked at. `timeouts` are those of the ledger,
        and `lease_s` is theirs, unless told.
        """
        self.name = name
        self.keys = Keys(run, name)
        check_key(self.keys.place)
        if not member or "/" in member or not member.isprintable():
            raise Mistake(f"{member!r}: a member has a plain name without '/'")
        self._wanted = _config(tasks, max_samples, max_bytes)
        self.runtime = runtime or LiveRuntime(ledger)
        self.timeouts = times = timeouts or ledger.timeouts
        self._lease_s = times.member_lease_s if lease_s is None else lease_s
        self._parts = parts
        self._desk = parts.desk(self.runtime, self.keys, store, member, self._lease_s, times)
        self._tidying = parts.tidying(self._desk)
        self._putting = parts.putting(self._desk, self._tidying)
        self._at_work: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._configure()
        await self._desk.__aenter__()
        try:
            deadline = self._desk.deadline()
            await self._desk.refresh(deadline)
            while self._desk.view.config is None:
                if not await self._desk.news(deadline):
                    raise TimedOut(f"the queue {self.name!r} could not be read in time")
        except BaseException:
            await self._desk.__aexit__()
            raise
        self._at_work = self.runtime.spawn(self._tidy(), name="queue tidies")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._at_work is not None:
            self._at_work.cancel()
            await asyncio.gather(self._at_work, return_exceptions=True)
        await self._desk.__aexit__()

    async def _configure(self) -> None:
        wanted, key = self._wanted, self._desk.keys.config
        if wanted is None:
            if await self.runtime.ledger.get(key) is None:
                raise NotFound(f"there is no queue {self.name!r}: open it with its tasks first")
            return
        stored = await update(
            self.runtime, key, Config, lambda there: there or wanted, repeatable=True
        )
        assert stored is not None
        if stored.record.tasks != wanted.tasks:
            raise Mistake(
                f"the queue {self.name!r} has the tasks {stored.record.tasks}, not "
                f"{wanted.tasks}: give the same, or none to take them as they are"
            )

    @property
    def config(self) -> Config:
        """The tasks and limits of this queue."""
        assert self._desk.view.config is not None
        return self._desk.view.config

    async def put(
        self, items: Sequence[Item], *, timeout_s: float | None = None
    ) -> dict[str, bool]:
        """Add samples; True for each that is new. Waits while the queue is full.

        `NoRoom` when it stays full, saying which task holds it up. All or nothing per block
        (1,000 samples, or 600 kB of records).
        """
        return await self._putting.put(items, self._desk.deadline(timeout_s))

    async def put_fields(
        self, fields: Mapping[str, Mapping[str, object]], *, timeout_s: float | None = None
    ) -> None:
        """Add fields to samples that are there. A field that is there already stays as it is."""
        await self._putting.put_fields(fields, self._desk.deadline(timeout_s))

    async def claim(
        self,
        task: str,
        n: int | None = None,
        *,
        keys: Sequence[str] | None = None,
        sampler: Sampler = in_order,
        least: int | None = None,
        max_lag: int | None = None,
        version: int | None = None,
        apart: Collection[str] = (),
        timeout_s: float | None = None,
    ) -> Batch:
        """Claim `n` samples for a task, or exactly those with these keys.

        Waits until there are `n` (or `least`, if that is given, when the time is over);
        `TimedOut` otherwise. With `max_lag`, samples made with weights older than `version`
        (the newest that the queue has seen, unless told) by more than that are dropped: they
        count as done in this task; samples with keys in `apart` are neither claimed nor
        dropped. By keys: those that are acknowledged already are in `Batch.already`; those that
        another living member claims are waited for.
        """
        if task not in self.config.tasks:
            names = ", ".join(self.config.tasks)
            raise Mistake(f"the queue {self.name!r} has no task {task!r}: it has {names}")
        if (n is None) == (keys is None):
            raise Mistake("claim either a number of samples or a list of keys")
        if isinstance(keys, str):
            raise Mistake(f"give a list of keys, not the one text {keys!r}")
        if (max_lag or 0) < 0 or (version or 0) < 0:
            raise Mistake(f"max_lag and version are 0 or more, not {max_lag} and {version}")
        if n is not None and not 1 <= (least or n) <= n <= MAX_CLAIM:
            raise Mistake(f"claim 1 to {MAX_CLAIM} samples at once (least {least}), not {n}")
        deadline = self._desk.deadline(timeout_s)

        async def in_one_life() -> Batch:
            seat = await self._desk.seat()
            claiming = self._parts.claiming(self._desk, self._tidying, task, seat)
            if n is None:
                return await claiming.exactly(list(keys or ()), deadline)
            return await claiming.some(n, least or n, sampler, max_lag, version, deadline, apart)

        return await insist(self.runtime, in_one_life, on=LeaseLost, until=deadline)

    async def samples(
        self, keys: Iterable[str], *, timeout_s: float | None = None
    ) -> list[Sample]:
        """What is known of these samples, in this order; `NotFound` when one is not there."""
        wanted, view = list(keys), self._desk.view
        if any(key not in view.where for key in wanted):
            await self._desk.refresh(self._desk.deadline(timeout_s))
        found = []
        for key in wanted:
            if key not in view.where:
                raise NotFound(f"no sample {key!r} is in the queue {self.name!r}", key=key)
            number, place = view.where[key]
            found.append(view.blocks[number].samples[place])
        return found

    async def fetch(
        self, samples: Sequence[Sample], fields: Iterable[str] | None = None
    ) -> list[dict[str, Any]]:
        """The fields of samples, claimed or not. Raises `BatchFailed` naming what is missing."""
        return await fetch(self._desk.store, samples, fields)

    def behind(self) -> dict[str, int]:
        """How many samples each task has not finished, as far as this process knows."""
        return behind(self._desk)

    async def tidy(self) -> None:
        """Delete what nobody needs: finished samples, and what the dead have left."""
        await self._tidying.tidy()

    async def _tidy(self) -> None:
        while True:
            await self.runtime.sleep(self._lease_s * (2.0 + 2.0 * self.runtime.random.random()))
            with contextlib.suppress(HoldfastError):  # it is tried again, for ever
                await self.tidy()


def _config(tasks: Tasks | None, max_samples: int, max_bytes: int) -> Config | None:
    if tasks is None:
        return None
    if isinstance(tasks, str):
        raise Mistake(f"give a list of tasks, not the one text {tasks!r}")
    named = tasks if isinstance(tasks, Mapping) else dict.fromkeys(tasks, ())
    for name, fields in named.items():
        if isinstance(fields, str):
            raise Mistake(f"task {name!r}: give a list of fields, not the one text {fields!r}")
    needs = {name: tuple(fields) for name, fields in named.items()}
    if not 1 <= len(needs) <= MAX_TASKS:
        raise Mistake(f"a queue needs at least one task, and has at most {MAX_TASKS}")
    for name, fields in needs.items():
        if not all(type(one) is str and one and one.isprintable() for one in fields):
            raise Mistake(f"task {name!r}: {fields!r} are not names of fields")
        if not name or "/" in name or not name.isprintable():
            raise Mistake(f"{name!r}: a task has a plain name without '/'")
    if max_samples < 1 or max_bytes < 1:
        raise Mistake("max_samples and max_bytes are 1 or more")
    return Config(tasks=needs, max_samples=max_samples, max_bytes=max_bytes)
