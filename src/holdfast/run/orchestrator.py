"""Drives a run: prompts → groups → advantages → forward_backward → optim_step → publish.

It holds nothing that is not in the ledger, the queue or the trainer. Kill it anywhere: whoever
is started next finds the first step that is not done, and goes on as its predecessor would
have. Two at once do no harm: they write the same, and what they submit has the same numbers.

A step, in the order that makes this true:

1. its groups are made, each with the version that `plan` says, and are in the queue;
2. `commit/N` is written, once: exactly these samples, in this order;
3. its three operations are submitted under the numbers that `plan` says;
4. their results are there, and so are durable: `done/N` is written, once;
5. its samples are acknowledged.

While step n is trained, the groups of step n + 1 are made (`lag` 1 or more).
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from holdfast import events, faults
from holdfast.client import Client
from holdfast.errors import BatchFailed, Fenced, HoldfastError, Mistake, NotFound, Retriable
from holdfast.rollout.asks import TASK, Ask, keys_of
from holdfast.run import plan
from holdfast.run.advantages import advantages
from holdfast.run.config import Config
from holdfast.run.happenings import Acknowledged, Committed, Dropped, Evaluated, Repaired, Trained
from holdfast.run.metrics import Metrics
from holdfast.run.pool import Pool
from holdfast.run.records import Drop, EvalDone, ModelRecord, RunDone, StepDone, StepRecord
from holdfast.run.steps import Steps
from holdfast.timeouts import DEFAULTS
from holdfast.transfer.queue import Batch, Queue, Sample

__all__ = ["Orchestrator", "has_ended"]

SAMPLED = faults.declare("run.step.sampled", "all groups of a step are made, nothing committed")
COMMITTED = faults.declare("run.step.committed", "a step is committed, nothing submitted")
SUBMITTED = faults.declare("run.step.submitted", "forward_backward promised, no optim_step")
PROMISED = faults.declare("run.step.promised", "all operations promised, no result heard")
FINISHED = faults.declare("run.step.done", "a step is done on record, nothing acknowledged")

_FINAL = "final"
_REPAIRS = 3
_ADAM = {"learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"}
_COMMITTED = ("version", "keys", "dropped", "numbers")
_BEHIND = 8
"""Steps that an evaluation may be behind: the trainer keeps twice as many versions."""


class Orchestrator:
    """One life of it. `run` returns when the run is done."""

    def __init__(
        self,
        config: Config,
        steps: Steps,
        queue: Queue,
        client: Client,
        pool: Pool,
        model: ModelRecord,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._steps = steps
        self._queue = queue
        self._client = client
        self._pool = pool
        self._model = model
        self._metrics = metrics
        self._published = 0
        self._news = asyncio.Condition()
        self._last = time.monotonic()

    async def run(self) -> None:
        """Go on until everything is done."""
        beating = asyncio.create_task(self._beat(), name="heartbeats")
        try:
            await self._run()
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)

    async def _run(self) -> None:
        config = self._config
        # In this order: of whatever is done it is also known with what.
        done, committed = await self._steps.done(), await self._steps.committed()
        first = next(n for n in range(1, config.steps + 2) if n not in done)
        self._metrics.write(committed, done, await self._steps.evaluated())
        await self._have_published(first - 1)
        if first > 1:
            await self._acknowledge(first - 1, committed[first - 1].keys)
        making: dict[int, asyncio.Task[Batch]] = {}
        tried = await self._steps.evaluated()
        evaluating = {
            step: asyncio.create_task(self._evaluate(step))
            for step in range(1, first)
            if self._is_tried(step) and step not in tried
        }
        try:
            for step in range(first, config.steps + 1):
                for ahead in range(step, min(step + config.rollout.lag, config.steps) + 1):
                    if ahead not in making:
                        making[ahead] = asyncio.create_task(self._make(ahead))
                batch = await making.pop(step)
                await self._train(step, batch)
                if self._is_tried(step):
                    evaluating[step] = asyncio.create_task(self._evaluate(step))
                for old in [one for one in evaluating if one <= step - _BEHIND]:
                    await evaluating.pop(old)
            for task in evaluating.values():
                await task
            await self._end()
        finally:
            for work in (*making.values(), *evaluating.values()):
                work.cancel()
            await asyncio.gather(*making.values(), *evaluating.values(), return_exceptions=True)

    # ---- samples ---------------------------------------------------------------

    async def _make(self, step: int) -> Batch:
        """Have the groups of a step made, and claim their samples."""
        config = self._config
        version = plan.version_for(step, config.rollout.lag)
        async with self._news:
            await self._news.wait_for(lambda: self._published >= version)
        record = await self._steps.read(self._steps.keys.commit(step), StepRecord)
        if record is None:
            groups = range(config.rollout.groups)
            async with asyncio.TaskGroup() as work:
                made = [work.create_task(self._group(step, group)) for group in groups]
            keys = [key for one in made for key in one.result()]
        else:
            keys = list(record.keys)
        await faults.apoint(SAMPLED)
        return await self._claim(keys)

    async def _group(self, step: int, group: int) -> list[str]:
        """Have a group made; returns its samples, none if the step goes without it."""
        rollout = self._config.rollout
        keys = keys_of(step, group, rollout.samples)
        if await self._steps.read(self._steps.keys.drop(step, group), Drop) is not None:
            return []
        with contextlib.suppress(NotFound):
            await self._queue.samples(keys)
            return keys  # somebody had it made before
        answer = await self._pool.make(self._ask(step, group))
        if not answer.spoilt:
            return keys
        drop = Drop(reason=answer.spoilt)
        await self._steps.once(self._steps.keys.drop(step, group), drop)
        events.emit(Dropped(step=step, group=group, reason=answer.spoilt))
        return []

    async def _claim(self, keys: Sequence[str]) -> Batch:
        while True:
            with contextlib.suppress(Retriable):
                return await self._queue.claim(TASK, keys=keys, timeout_s=DEFAULTS.claim_s)

    # ---- training --------------------------------------------------------------

    async def _train(self, step: int, batch: Batch) -> None:
        numbers = plan.numbers(step)
        record = await self._commit(step, batch, numbers)
        await faults.apoint(COMMITTED)
        if not record.keys:
            raise Mistake(f"step {step}: every group was dropped; look at its environment")
        loss, norm = await self._learn_surely(step, batch, record, numbers)
        published = await self._publish(step, numbers.publish)
        mine = StepDone(content=published, loss=loss, grad_norm=norm)
        done, _ = await self._steps.once(self._steps.keys.done(step), mine)
        if done != mine:
            raise HoldfastError(f"step {step} has come out differently before: {done}, {mine}")
        await faults.apoint(FINISHED)
        await self._tell(step, record, done)
        try:
            await batch.acknowledge()
            events.emit(Acknowledged(step=step, keys=record.keys))
        except Fenced:  # we were away for longer than our lease, and may claim them again
            await self._acknowledge(step, record.keys)

    async def _commit(self, step: int, batch: Batch, numbers: plan.Numbers) -> StepRecord:
        rollout = self._config.rollout
        there = set(batch.keys)
        dropped = [
            group for group in range(rollout.groups) if keys_of(step, group, 1)[0] not in there
        ]
        tags = [sample.tags for sample in batch.samples]
        count = max(1, len(tags))
        mine = StepRecord(
            keys=tuple(batch.keys),
            version=plan.version_for(step, rollout.lag),
            numbers=tuple(numbers),
            dropped=tuple(dropped),
            reward=sum(float(one["reward"] or 0.0) for one in tags) / count,
            exact=sum(bool(one["exact"]) for one in tags) / count,
        )
        record, ours = await self._steps.once(self._steps.keys.commit(step), mine)
        if record != mine:
            raise HoldfastError(f"step {step} was committed with other samples: start again")
        facts: Any = {name: getattr(record, name) for name in _COMMITTED}
        events.emit(Committed(step=step, **facts, ours=ours))
        return record

    async def _data(self, batch: Batch, record: StepRecord) -> list[dict[str, Any]]:
        """The step's data: references to what replicas made, and advantages."""
        values = await batch.fetch(["credits"])
        credits = [np.asarray(one["credits"], np.float64) for one in values]
        made = [~np.isnan(one) for one in credits]
        total = max(1, int(sum(one.sum() for one in made)))
        data: list[dict[str, Any]] = []
        for members in _groups(batch.samples):
            earned = [credits[at][made[at]] for at in members]
            per_token = bool(batch.samples[members[0]].tags["per_token"])
            found = advantages(self._config.train.advantage, earned, per_token=per_token)
            for at, values_at in zip(members, found, strict=True):
                weights = np.zeros(len(credits[at]))
                weights[made[at]] = values_at / total
                data.append(_datum(batch.samples[at], weights))
        assert len(data) == len(record.keys)
        return data

    async def _learn_surely(
        self, step: int, batch: Batch, record: StepRecord, numbers: plan.Numbers
    ) -> tuple[float, float]:
        """Have it learnt; samples that are damaged or gone are made again."""
        for _ in range(_REPAIRS):
            try:
                return await self._learn(await self._data(batch, record), numbers)
            except (BatchFailed, NotFound) as error:
                events.emit(Repaired(step=step, reason=str(error)[:500]))
                groups = set(range(self._config.rollout.groups)) - set(record.dropped)
                async with asyncio.TaskGroup() as work:
                    for group in sorted(groups):
                        work.create_task(self._pool.make(self._ask(step, group, repair=True)))
        return await self._learn(await self._data(batch, record), numbers)

    def _ask(self, step: int, group: int, *, repair: bool = False) -> Ask:
        return plan.train_ask(self._config, step, group, repair=repair)

    async def _learn(
        self, data: list[dict[str, Any]], numbers: plan.Numbers
    ) -> tuple[float, float]:
        train, model = self._config.train, self._model.model
        forward = await self._client.submit(
            "forward_backward_references",
            model,
            numbers.forward_backward,
            {"data": data, "loss_fn": train.loss, "loss_fn_config": train.loss_config},
        )
        await faults.apoint(SUBMITTED)
        step = await self._client.submit(
            "optim_step",
            model,
            numbers.optim_step,
            {"adam_params": train.model_dump(include=_ADAM)},
        )
        await faults.apoint(PROMISED)
        output, stepped = await forward.result(), await step.result()
        return (
            float(output["metrics"].get("loss:sum", 0.0)),
            float(stepped["metrics"].get("grad_norm:mean", 0.0)),
        )

    async def _publish(self, version: int, number: int) -> str:
        future = await self._client.submit(
            "publish_weights", self._model.model, number, {"version": version}
        )
        said = await future.result()
        await self._have_published(version)
        return str(said["content"])

    async def _have_published(self, version: int) -> None:
        async with self._news:
            self._published = max(self._published, version)
            self._news.notify_all()

    async def _acknowledge(self, step: int, keys: Sequence[str]) -> None:
        """Do what a predecessor may not have come to."""
        with contextlib.suppress(NotFound):
            batch = await self._claim(keys)
            await batch.acknowledge()
            events.emit(Acknowledged(step=step, keys=tuple(keys)))

    async def _tell(self, step: int, record: StepRecord, done: StepDone) -> None:
        now = time.monotonic()
        facts = self._metrics.step(step, record, done)
        del facts["dropped"]
        events.emit(Trained(**facts, seconds=round(now - self._last, 3)))
        self._last = now

    # ---- evaluation, and the end -------------------------------------------------

    def _is_tried(self, step: int) -> bool:
        every = self._config.evaluate.every
        return step == self._config.steps or bool(every and step % every == 0)

    async def _evaluate(self, step: int) -> None:
        """Try a version on the held-out prompts; those of a failing environment count as 0."""
        count = self._config.evaluate.prompts
        asks = [plan.eval_ask(self._config.seed, step, group) for group in range(count)]
        async with asyncio.TaskGroup() as work:
            tried = [work.create_task(self._pool.make(ask)) for ask in asks]
        answers = [one.result() for one in tried]
        mine = EvalDone(
            exact=sum(one.exact for one in answers) / count,
            reward=sum(one.reward for one in answers) / count,
            prompts=count,
        )
        done, _ = await self._steps.once(self._steps.keys.evaluated(step), mine)
        self._metrics.evaluation(step, done)
        facts: Any = {name: getattr(done, name) for name in ("exact", "reward", "prompts")}
        events.emit(Evaluated(step=step, version=step, **facts))

    async def _end(self) -> None:
        """Save everything under a name, and say that it is done."""
        steps = self._config.steps
        future = await self._client.submit(
            "save_weights", self._model.model, plan.save_number(steps), {"path": _FINAL}
        )
        path = str((await future.result())["path"])
        await _write(self._steps, self._metrics)
        last = (await self._steps.done())[steps]
        await self._steps.once(self._steps.keys.end, RunDone(content=last.content, path=path))

    async def _beat(self) -> None:
        """Keep the session alive."""
        while True:
            with contextlib.suppress(Retriable):
                await self._client.heartbeat(self._model.session)
            await asyncio.sleep(DEFAULTS.session_heartbeat_s)


async def has_ended(steps: Steps, metrics: Metrics) -> bool:
    """Whether everything is done. Then the metrics are written anew.

    One that was away for long may have written what it knew over what its successor had written.
    """
    if await steps.read(steps.keys.end, RunDone) is None:
        return False
    await _write(steps, metrics)
    return True


async def _write(steps: Steps, metrics: Metrics) -> None:
    # In this order: of whatever is done it is also known with what.
    done, committed = await steps.done(), await steps.committed()
    metrics.write(committed, done, await steps.evaluated())


def _groups(samples: Sequence[Sample]) -> list[list[int]]:
    """The places of each group's samples, in order."""
    found: dict[str, list[int]] = {}
    for at, sample in enumerate(samples):
        found.setdefault(sample.group, []).append(at)
    return list(found.values())


def _datum(sample: Sample, weights: "np.ndarray[Any, Any]") -> dict[str, Any]:
    fields = sample.fields
    return {
        "tokens": fields["tokens"],
        "loss_fn_inputs": {"target_tokens": fields["targets"], "logprobs": fields["logprobs"]},
        "inline": {"advantages": [float(one) for one in weights.astype(np.float32)]},
    }
