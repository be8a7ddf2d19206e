"""What is a run waiting for right now? Which record blocks it, whose is it, how long does its
lease still last? Read from the ledger, and nothing else.
"""

import msgspec

from holdfast import ledger
from holdfast.errors import NotFound
from holdfast.jobs.store import Jobs
from holdfast.ledger.runtime import LiveRuntime
from holdfast.ledger.unreadable import Unreadable, readable
from holdfast.rollout.asks import QUEUE, keys_of
from holdfast.run import plan
from holdfast.run.folder import ACCOUNT, JOB, Folder
from holdfast.run.records import Drop, ModelRecord, RunDone, StepRecord
from holdfast.run.steps import Steps
from holdfast.trainer.records import Keys as TrainerKeys
from holdfast.trainer.records import Now
from holdfast.transfer.queue.records import Block
from holdfast.transfer.queue.records import Keys as QueueKeys
from holdfast.weights.channel import Channel

__all__ = ["Reason", "why"]


class Reason(msgspec.Struct, frozen=True):
    """One thing to know: what, in which record, whose, and for how long."""

    text: str
    key: str = ""
    lease: str = ""

    def __str__(self) -> str:
        more = ", ".join(part for part in (self.key, self.lease) if part)
        return f"{self.text}  ({more})" if more else self.text


async def why(folder: Folder) -> list[Reason]:
    """What the run waits for, the most important first."""
    async with ledger.open(folder.ledger) as opened:
        return await _Look(folder, LiveRuntime(opened)).all()


class _Look:
    def __init__(self, folder: Folder, runtime: LiveRuntime) -> None:
        self._folder = folder
        self._runtime = runtime
        self._ledger = runtime.ledger
        self._steps = Steps(runtime, folder.run)

    async def all(self) -> list[Reason]:
        keys = self._steps.keys
        if await self._steps.read(keys.end, RunDone) is not None:
            return [Reason("nothing: the run is done", keys.end)]
        model = await self._steps.read(keys.model, ModelRecord)
        if model is None:
            return [
                Reason("the model: it is not created yet", keys.model),
                *await self._trainer(None),
                *await self._orchestrator(),
            ]
        done = await self._steps.done()
        step = next(n for n in range(1, self._folder.config.steps + 2) if n not in done)
        if step > self._folder.config.steps:
            return [Reason("the last evaluation, and the final save", keys.end)]
        record = await self._steps.read(keys.commit(step), StepRecord)
        if record is not None:
            first = Reason(f"step {step}: its operations, which the trainer has", keys.done(step))
            return [first, *await self._trainer(model), *await self._orchestrator()]
        missing = await self._missing(step)
        version = plan.version_for(step, self._folder.config.rollout.lag)
        text = f"step {step}: {len(missing)} of its groups, made with version {version}"
        return [
            Reason(text, keys.commit(step)),
            *await self._replicas(model),
            *await self._orchestrator(),
        ]

    async def _missing(self, step: int) -> list[int]:
        config, there = self._folder.config.rollout, set[str]()
        prefix = QueueKeys(self._folder.run, QUEUE).prefix + "block/"
        async for page in self._ledger.pages(prefix):
            for entry in page.entries:
                block = readable(Block, entry)
                if not isinstance(block, Unreadable):
                    there |= {sample.key for sample in block.samples}
        missing = []
        for group in range(config.groups):
            dropped = await self._steps.read(self._steps.keys.drop(step, group), Drop)
            if dropped is None and keys_of(step, group, 1)[0] not in there:
                missing.append(group)
        return missing

    async def _trainer(self, model: ModelRecord | None) -> list[Reason]:
        run = self._folder.run
        jobs = Jobs(self._runtime, run, lambda: 0.0)
        try:
            seen = await jobs.get(ACCOUNT, JOB)
        except NotFound:
            return [Reason("the trainer's job: nobody has created it")]
        text = f"the trainer: {seen.job.state}, epoch {seen.job.epoch}"
        text += f" at {seen.job.address}" if seen.job.address else ""
        alive = seen.alive_entry
        found = [Reason(text, jobs.keys.job(ACCOUNT, JOB), await self._lease(alive))]
        if alive is None:
            found.append(Reason("no host says that it lives", jobs.keys.alive(ACCOUNT, JOB)))
        now = await self._steps.read(TrainerKeys(run, ACCOUNT, JOB).now, Now)
        if model is not None and now is not None and now.line == model.model:
            deaths = f", {now.deaths} trainers died over it" if now.deaths else ""
            found.append(Reason(f"it last began operation {now.number}{deaths}"))
        return found

    async def _replicas(self, model: ModelRecord) -> list[Reason]:
        folder = self._folder
        channel = Channel(folder.weights, self._ledger, model.channel, run=folder.run)
        view = await channel.book("why").view()
        found = [
            Reason(
                f"{member.record.name} serves version {member.record.acknowledged}"
                f" at {member.record.address}",
                lease=await self._lease_of(channel.keys.consumers + member.record.name),
            )
            for member in view.members
            if member.record.address
        ]
        newest = Reason(f"the newest version is {view.head}", channel.keys.head)
        return [newest, *(found or [Reason("no replica is there", channel.keys.consumers)])]

    async def _orchestrator(self) -> list[Reason]:
        prefix = QueueKeys(self._folder.run, QUEUE).prefix + "member/orchestrator"
        lease = await self._lease_of(prefix)
        if lease:
            return [Reason("an orchestrator holds samples", prefix, lease)]
        return [Reason("no orchestrator holds samples", prefix)]

    async def _lease_of(self, prefix: str) -> str:
        entries = (await self._ledger.range(prefix)).entries
        return await self._lease(entries[-1]) if entries else ""

    async def _lease(self, entry: "ledger.Entry | None") -> str:
        if entry is None or not entry.lease:
            return ""
        try:
            info = await self._ledger.lease_info(entry.lease)
        except NotFound:
            return "its lease has ended"
        return f"its lease lasts {info.remaining_s:.1f} of {info.ttl_s:g} s"
