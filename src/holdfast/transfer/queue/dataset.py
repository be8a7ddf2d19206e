"""Claimed batches as a torch dataset for data-parallel training, with exact resume.

    dataset = QueueDataset("shm://run-7", "sqlite:///run.db", "rollouts", "train",
                           batch_size=64, rank=rank, world_size=world, start=checkpoint_step)
    for shard in DataLoader(dataset, batch_size=None):
        train_on(shard.values)
        if time_to_save:
            save_checkpoint(shard.step)      # durable when this returns
            dataset.saved(shard.step)

Step n has the same samples on all ranks and after every restart (`steps.py`); rank r gets the
r-th part of them. Samples are acknowledged by `saved`, and not before: what a crash takes back
is trained on again, in the same steps. Rank 0 claims; the others follow. `start` is the last
step that the checkpoint contains (0: none).

A dataset belongs to the process that iterates over it: use it with `num_workers=0`.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec

from holdfast.errors import MissingPackage, Mistake
from holdfast.timeouts import DEFAULTS, Timeouts
from holdfast.transfer.queue.batch import Batch
from holdfast.transfer.queue.records import Sample
from holdfast.transfer.queue.samplers import Sampler, in_order
from holdfast.transfer.queue.steps import Steps
from holdfast.transfer.queue.sync import SyncQueue, open_queue
from holdfast.transfer.store import Store

try:
    from torch.utils.data import IterableDataset, get_worker_info
except ImportError as error:
    raise MissingPackage("torch is not installed: pip install 'holdfast-rl[train]'") from error

__all__ = ["QueueDataset", "Shard"]


class Shard(msgspec.Struct):
    """One rank's part of one step."""

    step: int
    samples: list[Sample]
    values: list[dict[str, Any]]
    """The fields of each sample, in the order of `samples`."""


class QueueDataset(IterableDataset[Shard]):
    """Shards of steps, one after the other, for ever. Close it, or let its process end."""

    def __init__(
        self,
        store: Store | str,
        ledger_url: str,
        name: str,
        task: str,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        start: int = 0,
        run: str = "default",
        fields: list[str] | None = None,
        sampler: Sampler = in_order,
        max_lag: int | None = None,
        timeout_s: float | None = None,
        lease_s: float | None = None,
        timeouts: Timeouts = DEFAULTS,
    ) -> None:
        super().__init__()
        if not 0 <= rank < world_size:
            raise Mistake(f"rank {rank} is not below the world size {world_size}")
        if batch_size < 1 or batch_size % world_size:
            raise Mistake(f"{batch_size} samples cannot be divided among {world_size} ranks")
        if start < 0:
            raise Mistake(f"start is the last step of the checkpoint, 0 or more, not {start}")
        self._open_queue = partial(
            open_queue,
            store,
            ledger_url,
            name,
            run=run,
            member=f"rank-{rank}",
            lease_s=lease_s,
            timeouts=timeouts,
        )
        self._task, self._fields = task, fields
        self._batch_size, self._rank, self._world_size = batch_size, rank, world_size
        self._sampler, self._max_lag, self._timeout_s = sampler, max_lag, timeout_s
        self._step = start
        self._queue: SyncQueue | None = None
        self._batches: dict[int, Batch] = {}

    def _open(self) -> SyncQueue:
        if get_worker_info() is not None:
            raise Mistake("use this dataset with num_workers=0: claims belong to one process")
        if self._queue is None:
            self._queue = self._open_queue()
            if self._rank == 0:
                self._finish(self._step)
        return self._queue

    def _finish(self, last: int) -> None:
        """Acknowledge all steps up to this one that somebody began, we or those before us."""
        queue = self._queue
        assert queue is not None
        steps = Steps(queue.queue, self._task)
        for step in sorted(queue.run(steps.written())):
            if step <= last:
                queue.run(steps.finish(step, self._batches.pop(step, None)))

    def __iter__(self) -> Iterator[Shard]:
        """Go on behind the last step that was given."""
        queue = self._open()
        while True:
            step = self._step + 1
            shard = self._shard(queue, step)
            self._step = step
            yield shard

    def _shard(self, queue: SyncQueue, step: int) -> Shard:
        steps = Steps(queue.queue, self._task)
        if self._rank == 0:
            batch = self._batches[step] = queue.run(
                steps.lead(
                    step,
                    self._batch_size,
                    sampler=self._sampler,
                    max_lag=self._max_lag,
                    timeout_s=self._timeout_s,
                )
            )
            keys = batch.keys
        else:
            keys = list(queue.run(steps.follow(step, timeout_s=self._timeout_s)))
        size = len(keys) // self._world_size
        samples = queue.samples(keys[self._rank * size : (self._rank + 1) * size])
        return Shard(step, samples, queue.run(queue.queue.fetch(samples, self._fields)))

    def saved(self, step: int) -> None:
        """A checkpoint that contains all steps up to this one is durable."""
        if step > self._step:
            raise Mistake(f"step {step} was not given yet: the last one was {self._step}")
        if self._rank == 0:
            self._open()
            self._finish(step)

    def state_dict(self) -> dict[str, int]:
        """For the checkpoint: the last step that was given."""
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on behind the step that a checkpoint contains. Before the first shard."""
        if self._queue is not None:
            raise Mistake("the dataset is in use: load its state before iterating")
        self._step = state["step"]

    def close(self) -> None:
        """Leave the queue; what is not acknowledged is given again at once."""
        if self._queue is not None:
            self._queue.close()
            self._queue = None
            self._batches.clear()
