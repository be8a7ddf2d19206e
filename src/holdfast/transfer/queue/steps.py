"""Steps: which samples make which step of training, written once, before anybody uses them.

The first who claims the batch of step n writes `steps/TASK/n` with its keys; whoever works on
step n later, another rank or a successor after a crash, takes exactly these. So every rank
sees the same batch, and a run that is resumed repeats the steps that were lost as they were.

A step's samples are acknowledged when the checkpoint that contains it is durable; then its
record goes, and `finished/TASK` says so: whoever comes back with an older checkpoint is told that
the samples it would need are consumed, and is not given others in their place.
"""

from holdfast.errors import Fenced, Gone, Mistake, TimedOut
from holdfast.ledger import Delete, absent
from holdfast.ledger.records import Record, decode, load, put, update
from holdfast.retry import Policy, insist
from holdfast.transfer.queue.batch import Batch
from holdfast.transfer.queue.queue import Queue
from holdfast.transfer.queue.samplers import Sampler, in_order

__all__ = ["Finished", "StepRecord", "Steps"]

_LOOKS = Policy(base_s=0.005, factor=1.5, max_s=0.2, jitter=0.0)
"""How often to look for a step that another rank is about to write."""


class StepRecord(Record, frozen=True):
    """The samples of one step, in order."""

    keys: tuple[str, ...] = ()


class Finished(Record, frozen=True):
    """The last step whose samples are acknowledged."""

    step: int = 0


class Steps:
    """The steps of one task of a queue."""

    def __init__(self, queue: Queue, task: str) -> None:
        self._queue = queue
        self._task = task
        self._runtime = queue.runtime
        self._prefix = f"{queue.keys.prefix}steps/{task}/"
        self._finished = f"{queue.keys.prefix}finished/{task}"

    def _key(self, step: int) -> str:
        return f"{self._prefix}{step:012d}"

    def _deadline(self, timeout_s: float | None) -> float:
        limit_s = self._queue.timeouts.step_wait_s if timeout_s is None else timeout_s
        return self._runtime.now() + limit_s

    async def lead(
        self,
        step: int,
        n: int,
        *,
        sampler: Sampler = in_order,
        max_lag: int | None = None,
        timeout_s: float | None = None,
    ) -> Batch:
        """Claim the batch of a step: the one that is written, or a new one, which is written."""
        deadline = self._deadline(timeout_s)
        while True:
            stored = await load(self._runtime.ledger, self._key(step), StepRecord)
            left_s = max(0.0, deadline - self._runtime.now())
            if stored is not None:
                return await self._again(step, stored.record, left_s)
            await self._check(step)
            batch = await self._queue.claim(
                self._task,
                n,
                sampler=sampler,
                max_lag=max_lag,
                apart=await self._taken(),
                timeout_s=left_s,
            )
            # Whoever wrote these into a step lost them after `apart` was read.
            ours = not (await self._taken()).intersection(batch.keys)
            if ours and await self._write(step, batch, deadline):
                return batch
            await batch.release()  # somebody was quicker: take what he wrote

    async def _again(self, step: int, record: StepRecord, timeout_s: float) -> Batch:
        """The batch of a step that is written."""
        batch = await self._queue.claim(self._task, keys=record.keys, timeout_s=timeout_s)
        if batch.already:
            await batch.release()
            raise Gone(
                f"step {step} of {self._task!r}: {len(batch.already)} of its {len(record.keys)} "
                "samples are consumed: go on from the newest checkpoint"
            )
        return batch

    async def _taken(self) -> set[str]:
        """The samples of all steps that are written, whether anybody claims them or not."""
        return {key for keys in (await self.written()).values() for key in keys}

    async def _check(self, step: int) -> None:
        """Refuse to begin a step again that is done with, or that others were begun behind."""
        last = await load(self._runtime.ledger, self._finished, Finished)
        newer = max([last.record.step if last else 0, *(await self.written())])
        if step <= newer:
            raise Mistake(
                f"step {step} of {self._task!r} cannot be begun: step {newer} was, and its batch "
                "is taken. Go on from the newest checkpoint"
            )

    async def _write(self, step: int, batch: Batch, deadline: float) -> bool:
        """Write a step's record, once, while its samples are ours; False when that fails."""
        key, record = self._key(step), StepRecord(keys=tuple(batch.keys))

        async def once() -> bool:
            await self._runtime.ledger.txn([absent(key), batch.alive], [put(key, record)], [])
            stored = await load(self._runtime.ledger, key, StepRecord)
            return stored is not None and stored.record.keys == record.keys

        return await insist(self._runtime, once, until=deadline)

    async def follow(self, step: int, *, timeout_s: float | None = None) -> tuple[str, ...]:
        """The keys of a step that somebody else leads."""

        async def look() -> tuple[str, ...]:
            stored = await load(self._runtime.ledger, self._key(step), StepRecord)
            if stored is not None:
                return stored.record.keys
            last = await load(self._runtime.ledger, self._finished, Finished)
            if last is not None and last.record.step >= step:
                raise Gone(
                    f"step {step} of {self._task!r} is finished and its samples are consumed: "
                    "go on from the newest checkpoint"
                )
            raise TimedOut(f"nobody has begun step {step} of {self._task!r}")

        return await insist(self._runtime, look, until=self._deadline(timeout_s), pace=_LOOKS)

    async def written(self) -> dict[int, tuple[str, ...]]:
        """All steps that are begun and not done with."""
        entries = (await self._runtime.ledger.range(self._prefix)).entries
        return {
            int(entry.key.rpartition("/")[2]): decode(StepRecord, entry).keys for entry in entries
        }

    async def finish(self, step: int, batch: Batch | None = None) -> None:
        """A step's effect is durable: acknowledge its samples, and forget it."""
        try:
            if batch is not None:
                await batch.acknowledge()
        except Fenced:
            batch = None  # the step is written: nobody else gets its samples but by their keys
        if batch is None:
            stored = await load(self._runtime.ledger, self._key(step), StepRecord)
            if stored is None:
                return
            batch = await self._queue.claim(self._task, keys=stored.record.keys)
            await batch.acknowledge()
        await update(
            self._runtime,
            self._finished,
            Finished,
            lambda last: Finished(step=max(step, last.step if last else 0)),
            repeatable=True,
        )
        await self._runtime.ledger.txn([], [Delete(self._key(step))], [])
