"""The queue with one rule left out each."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from broken.variant import Make, variant
from holdfast.ledger import Compare
from holdfast.ledger.runtime import Runtime
from holdfast.sim.protocols.queue import QueueProtocol, parts
from holdfast.transfer.frame import Ref
from holdfast.transfer.queue import Batch
from holdfast.transfer.queue.claiming import Claiming
from holdfast.transfer.queue.desk import Change, Desk
from holdfast.transfer.queue.member import Seat
from holdfast.transfer.queue.plan import Choice, Plan
from holdfast.transfer.queue.putting import Putting
from holdfast.transfer.queue.records import Sample
from holdfast.transfer.queue.tidying import Tidying
from holdfast.transfer.queue.view import BlockView, View

__all__ = ["BROKEN"]

T = TypeVar("T")


class _Early(QueueProtocol):
    """Samples are acknowledged before they are fetched."""

    async def work(self, _: Runtime, batch: Batch) -> None:
        await batch.acknowledge()
        self.told(batch)
        await self.look(batch)
        self.worked(batch)


class _NoGuard(Desk):
    """What a member changes takes effect after the end of its lease, too."""

    async def commit(
        self, decide: Callable[[], Change[T] | T], deadline: float, *, seat: Seat | None = None
    ) -> T:
        del seat
        return await super().commit(decide, deadline)


class _ForEver(Plan):
    """A claim outlives the lease of its owner."""

    def free(self, view: View, block: BlockView, task: str) -> int:
        there = super().free(view, block, task)
        for _, places in block.task(task).claims:
            there &= ~places
        return there


class _Greedy(Plan):
    """What another member claims is claimed again."""

    def free(self, view: View, block: BlockView, task: str) -> int:
        assert view.config is not None
        if block.entry is None:
            return 0
        return block.ready(view.config.tasks[task]) & ~block.task(task).finished


class _FirstTask(Plan):
    """Payloads are deleted when the first task is done with them."""

    def freeable(self, view: View, block: BlockView) -> int:
        assert view.config is not None
        done = 0
        for task in view.config.tasks:
            done |= block.task(task).finished
        return done & block.all & ~block.freed


class _Unready(Plan):
    """Samples are given before the fields that the task needs are there."""

    def free(self, view: View, block: BlockView, task: str) -> int:
        if block.entry is None:
            return 0
        state = block.task(task)
        return block.all & ~state.finished & ~state.claimed(view.members)


def _without(change: Change[T], keys: str) -> Change[T]:
    """The change without its conditions on some keys."""
    compare: list[Compare] = [one for one in change.compare if f"/{keys}" not in one.key]
    return Change(compare, change.then, change.means)


class _Blind(Claiming):
    """A claim does not compare what has become of the samples meanwhile."""

    def _change(self, choice: Choice) -> Change[Choice | None]:
        return _without(super()._change(choice), "state/")


class _Twice(Putting):
    """A sample is added although it is there already."""

    async def _add(self, samples: list[Sample], seat: Seat, deadline: float) -> list[Sample]:
        unknown = self._desk.view.unknown
        self._desk.view.unknown = list  # type: ignore[method-assign, assignment]
        try:
            return await super()._add(samples, seat, deadline)
        finally:
            self._desk.view.unknown = unknown  # type: ignore[method-assign]


class _Nameless(Putting):
    """Two lives of a producer put their payloads under the same key."""

    def _payload(self, seat: Seat, key: str, field: str) -> str:
        return f"{self._desk.keys.place}/{seat.id.partition('-')[0]}/{key}/{field}"


class _NoGeneration(Batch):
    """Values are fetched by key alone: whatever is there is taken for what was meant."""

    async def fetch(self, fields: Iterable[str] | None = None) -> list[dict[str, Any]]:
        wanted = [
            {name: one.fields[name].key for name in fields or one.fields} for one in self.samples
        ]
        found = await self._desk.store.aget([key for one in wanted for key in one.values()])
        return [{name: found[key] for name, key in one.items()} for one in wanted]


class _RecordFirst(Putting):
    """Samples are recorded before their payloads are in the store."""

    async def _send(
        self, seat: Seat, fields: Mapping[str, Mapping[str, object]]
    ) -> dict[str, dict[str, Ref]]:
        values = {
            self._payload(seat, key, name): value
            for key, some in fields.items()
            for name, value in some.items()
        }
        store, runtime = self._desk.store, self._desk.runtime
        frames = store._frames(values, None)

        async def send() -> None:
            await runtime.sleep(0.1)
            await store.aput(values, generation=next(iter(frames.values())).ref.generation)

        runtime.spawn(send(), name="sends later")
        return {
            key: {name: frames[self._payload(seat, key, name)].ref for name in some}
            for key, some in fields.items()
        }


class _Hasty(Tidying):
    """Payloads without a record are deleted while their owner is about to record them."""

    async def _orphans(self) -> None:
        living = self._desk.view.members
        self._desk.view.members = set()
        try:
            await super()._orphans()
        finally:
            self._desk.view.members = living


class _Forgetful(View):
    """The keys of finished blocks are forgotten."""

    def unknown(self, keys: Iterable[str]) -> list[str]:
        return [key for key in keys if key not in self.where]


class _NoStrays(Tidying):
    """A claim whose answer was lost stays, though nobody has it."""

    async def _strays(self) -> None:
        return


class _Messy(Tidying):
    """Payloads that a dead producer could not record stay for ever."""

    async def _orphans(self) -> None:
        return


def _queue(mistake: object, **kinds: Any) -> Make:
    """The protocol with other parts in its queue."""
    return variant(QueueProtocol, mistake, queue=parts(**kinds))


def _plan(plan: type[Plan]) -> Make:
    return _queue(plan, desk=functools.partial(Desk, plan=plan()))


BROKEN: dict[str, Make] = {
    "": _queue(_NoGuard, desk=_NoGuard),
    "early": _Early,
    "lease": _plan(_ForEver),
    "greedy": _plan(_Greedy),
    "free": _plan(_FirstTask),
    "ready": _plan(_Unready),
    "compare": _queue(_Blind, claiming=_Blind),
    "twice": _queue(_Twice, putting=_Twice),
    "life": _queue(_Nameless, putting=_Nameless),
    "generation": _queue(
        _NoGeneration,
        putting=_Nameless,
        claiming=functools.partial(Claiming, batch=_NoGeneration),
    ),
    "order": _queue(_RecordFirst, putting=_RecordFirst),
    "hasty": _queue(_Hasty, tidying=_Hasty),
    "forget": _queue(_Forgetful, desk=functools.partial(Desk, view=_Forgetful)),
    "strays": _queue(_NoStrays, tidying=_NoStrays),
    "orphans": _queue(_Messy, tidying=_Messy),
}
