"""The run with one mistake each."""

import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from broken.variant import Make, variant
from holdfast.ledger.records import Record, put
from holdfast.ledger.types import Compare
from holdfast.rollout.asks import TASK, Ask
from holdfast.run import plan
from holdfast.run.metrics import Metrics
from holdfast.run.orchestrator import Orchestrator
from holdfast.run.records import RunDone, StepDone, StepRecord
from holdfast.run.steps import Steps
from holdfast.sim.protocols.run.model import RunProtocol
from holdfast.trainer.journal import Journal
from holdfast.trainer.trainer import Trainer
from holdfast.transfer.queue import Batch

__all__ = ["BROKEN"]

R = TypeVar("R", bound=Record)


class _LastWriter(Steps):
    """A record that is there is written over."""

    over = ""

    async def once(self, key: str, record: R) -> tuple[R, bool]:
        if not key.startswith(self.keys.root + self.over):
            return await super().once(key, record)
        await self._ledger.txn([], [put(key, record)])
        return record, True


class _Impatient(Steps):
    """A record is looked for, and then written, in two steps."""

    async def once(self, key: str, record: R) -> tuple[R, bool]:
        there = await self.read(key, type(record))
        if there is None:
            await self._ledger.txn([], [put(key, record)])
        return there or record, there is None or there == record


class _Newest(Orchestrator):
    """Samples are made with the newest version, not with the one of the plan."""

    def _ask(self, step: int, group: int, *, repair: bool = False) -> Ask:
        ask = super()._ask(step, group, repair=repair)
        return msgspec.structs.replace(ask, version=min(self._published, step - 1))


class _Early(Orchestrator):
    """Samples are acknowledged when the step is promised, not when it is done."""

    async def _train(self, step: int, batch: Batch) -> None:
        await batch.acknowledge()
        await super()._train(step, batch)


class _NewNumbers(Orchestrator):
    """Who finds a step committed submits its operations under new numbers."""

    _more = 0

    async def _train(self, step: int, batch: Batch) -> None:
        key = self._steps.keys.commit(step)
        if await self._steps.read(key, StepRecord) is not None:
            self._more += 3
        await super()._train(step, batch)

    async def _learn(
        self, data: list[dict[str, Any]], numbers: plan.Numbers
    ) -> tuple[float, float]:
        more = self._more
        moved = plan.Numbers(
            numbers.forward_backward + more, numbers.optim_step + more, numbers.publish + more
        )
        return await super()._learn(data, moved)

    async def _publish(self, version: int, number: int) -> str:
        return await super()._publish(version, number + self._more)


class _Promised(Orchestrator):
    """A step counts as done when it is promised: before its results are there."""

    async def _publish(self, version: int, number: int) -> str:
        submitted = {"version": version}
        await self._client.submit("publish_weights", self._model.model, number, submitted)
        await self._have_published(version)
        return ""


class _Count(Orchestrator):
    """A step claims as many samples as it has, not those that it has."""

    async def _claim(self, keys: Sequence[str]) -> Batch:
        batch = await self._queue.claim(TASK, len(keys))
        batch.samples.sort(key=lambda one: one.key)
        return batch


class _Skips(Steps):
    """A successor goes on behind the step that was committed, done or not."""

    async def done(self) -> dict[int, StepDone]:
        committed = await self.committed()
        return {step: StepDone() for step in committed} | await super().done()


class _CommitsFirst(Steps):
    """Who begins reads what is committed before it reads what is done."""

    _known: dict[int, StepRecord] | None = None

    async def done(self) -> dict[int, StepDone]:
        self._known = await super().committed()
        await self._runtime.sleep(10.0)  # so that it shows sooner
        return await super().done()

    async def committed(self) -> dict[int, StepRecord]:
        return await super().committed() if self._known is None else self._known


async def _only_asks(steps: Steps, metrics: Metrics) -> bool:
    """What one that slept has written into the metrics after the end stays there."""
    return await steps.read(steps.keys.end, RunDone) is not None


class _Forgetful(Orchestrator):
    """What a predecessor finished and did not acknowledge is left as it is."""

    async def _acknowledge(self, step: int, keys: Sequence[str]) -> None:
        """Do nothing."""


class _Seatless(Journal):
    """A trainer that was replaced goes on training."""

    @property
    def guards(self) -> tuple[Compare, ...]:
        return ()

    async def check(self) -> None:
        """Believe."""


class _LastCommit(_LastWriter):
    """Whoever commits a step last decides what it trains on."""

    over = "commit/"


class _LastDrop(_LastWriter):
    """Whoever drops a group last decides."""

    over = "drop/"


_with = functools.partial(variant, RunProtocol)

BROKEN: dict[str, Make] = {
    "": _with(records=_LastCommit),
    "looks-first": _with(records=_Impatient),
    "drops": _with(records=_LastDrop),
    "newest": _with(orchestrator=_Newest),
    "early": _with(orchestrator=_Early),
    "numbers": _with(orchestrator=_NewNumbers),
    "promised": _with(orchestrator=_Promised),
    "count": _with(orchestrator=_Count),
    "skipped": _with(records=_Skips),
    "order": _with(records=_CommitsFirst),
    "old-news": _with(ended=_only_asks),
    "forgetful": _with(orchestrator=_Forgetful),
    "unfenced": _with(
        _Seatless, trainer=functools.partial(Trainer, journal=_Seatless), guarded=False
    ),
}
