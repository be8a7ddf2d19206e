"""The protocol of operations with one mistake each; the simulator must catch every one."""

import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable

from holdfast.ledger.types import Compare, Delete
from holdfast.sim.protocol import Protocol
from holdfast.sim.protocols.operations.model import OperationsProtocol
from holdfast.trainer import ops
from holdfast.trainer.checkpoints import Checkpoints
from holdfast.trainer.core import Core
from holdfast.trainer.effects import Effect, Effects
from holdfast.trainer.journal import Journal, Write
from holdfast.trainer.ops import Failed, LoadWeights, Op, Outcome
from holdfast.trainer.records import Entry, Result
from holdfast.trainer.runner import Runner
from holdfast.trainer.seams import Snapshot
from holdfast.trainer.state import Pending, State
from holdfast.trainer.trainer import Trainer

__all__ = ["BROKEN"]


class _EarlyPromise(Core):
    async def append(
        self,
        state: State,
        number: int,
        op: Op,
        *,
        refused: Failed | None = None,
        also: tuple[Write, ...] = (),
    ) -> None:
        if also or refused:
            await super().append(state, number, op, refused=refused, also=also)
        else:
            work = super().append(state, number, op)
            self.runtime.spawn(work, name="later").add_done_callback(_hear)


def _hear(task: "object") -> None:
    exception = getattr(task, "exception", lambda: None)
    cancelled = getattr(task, "cancelled", lambda: True)
    if not cancelled():
        exception()


class _EarlyPromises(OperationsProtocol):
    """An operation is promised before it is durable."""

    class trainer(Trainer):  # noqa: N801 -- replaces an attribute
        core_type = _EarlyPromise


class _EarlyResult(Runner):
    async def _settle(self, state: State, number: int, entry: Entry, effect: Effect) -> None:
        await super()._settle(state, number, entry, effect)
        if state.line.ordered and effect.sampler is None:
            self._core.settled(state, number, self._core.result_of(entry, effect.outcome))


class _EarlyResults(OperationsProtocol):
    """A result is told before it is durable."""

    class trainer(Trainer):  # noqa: N801
        runner_type = _EarlyResult


class _NoFlush(Journal):
    async def flushed(self) -> None:
        """Wait for nothing."""


class _HastyCheckpoints(OperationsProtocol):
    """A checkpoint does not wait for the results that it covers."""

    class trainer(Trainer):  # noqa: N801
        journal_type = _NoFlush


class _WholePayload(Core):
    def identity(self, op: Op) -> str:
        return hashlib.sha256(ops.encode(op)).hexdigest()


class _Payloads(OperationsProtocol):
    """Duplicates are known by their whole payload, of which clients change a part."""

    class trainer(Trainer):  # noqa: N801
        core_type = _WholePayload


class _Seatless(Journal):
    @property
    def guards(self) -> tuple[Compare, ...]:
        return ()

    def _behind(self) -> tuple[Compare, ...]:
        return ()

    async def check(self) -> None:
        """Believe."""


class _Unfenced(OperationsProtocol):
    """A trainer that was replaced goes on writing."""

    guarded = False

    class trainer(Trainer):  # noqa: N801
        journal_type = _Seatless


class _Repeated(Journal):
    def _behind(self) -> tuple[Compare, ...]:
        return ()


class _WrittenAgain(OperationsProtocol):
    """A write that is delivered again, long after it was done, has its effect again."""

    class trainer(Trainer):  # noqa: N801
        journal_type = _Repeated


class _Retries(Runner):
    def _passes_over(self, entry: Entry, known: Result | None) -> bool:  # noqa: ARG002
        return entry.skip


class _FailuresAgain(OperationsProtocol):
    """What failed is carried out again in a replay, and may succeed then."""

    class trainer(Trainer):  # noqa: N801
        runner_type = _Retries


class _LoadsAgain(Effects):
    async def _load(
        self,
        state: State,
        number: int,  # noqa: ARG002
        op: LoadWeights,
        outcome: Outcome | None = None,
    ) -> Effect:
        _, save = self._core.saves.find(op.path)
        kept = await self._core.vault.load(f"{state.name}.w.kept", save.version)
        await self._core.compute.load(state.name, kept, optimizer=op.optimizer)
        return Effect(outcome or ops.Loaded(path=op.path))


class _LoadReplayed(OperationsProtocol):
    """A replay loads saved weights again, which may have been replaced since."""

    class trainer(Trainer):  # noqa: N801
        class runner_type(Runner):  # noqa: N801
            effects_type = _LoadsAgain


class _TrimsFirst(Checkpoints):
    async def keep(self, state: State, number: int, snapshot: Snapshot) -> None:
        await self._core.journal.flushed()
        await self.trim(state, number)
        await super().keep(state, number, snapshot)


class _TrimmedFirst(OperationsProtocol):
    """Entries are removed before the checkpoint that covers them is there."""

    class trainer(Trainer):  # noqa: N801
        class runner_type(Runner):  # noqa: N801
            checkpoints_type = _TrimsFirst


class _TakesNone(Checkpoints):
    async def take(self, state: State) -> None:
        """Trust that it was kept."""


class _DroppedUnkept(OperationsProtocol):
    """A model is put aside without a checkpoint of what it is."""

    class trainer(Trainer):  # noqa: N801
        class runner_type(Runner):  # noqa: N801
            checkpoints_type = _TakesNone


class _Forgets(Core):
    async def retrieve(self, request: str, hold_s: float) -> Outcome | Pending:
        got = await super().retrieve(request, hold_s)
        name, _, number = request.rpartition(":")
        state = self.lines[name]
        if not isinstance(got, Pending) and int(number) <= state.line.trimmed:
            state.line.results.pop(int(number), None)
            await self.journal.write(Delete(self.keys.result(name, int(number))))
        return got


class _DeliveredOnce(OperationsProtocol):
    """A result is forgotten when it has been sent, whether it was received or not."""

    class trainer(Trainer):  # noqa: N801
        core_type = _Forgets


class _Unsure(Core):
    @contextlib.asynccontextmanager
    async def sure(self) -> AsyncIterator[None]:
        yield


class _FromMemory(OperationsProtocol):
    """A trainer says "not found" from its memory, though it may have been replaced."""

    class trainer(Trainer):  # noqa: N801
        core_type = _Unsure


BROKEN: dict[str, Callable[[], Protocol]] = {
    "": _EarlyPromises,
    "early-results": _EarlyResults,
    "hasty-checkpoints": _HastyCheckpoints,
    "payloads": _Payloads,
    "unfenced": _Unfenced,
    "written-again": _WrittenAgain,
    "failures-again": _FailuresAgain,
    "load-replayed": _LoadReplayed,
    "trimmed-first": _TrimmedFirst,
    "dropped-unkept": _DroppedUnkept,
    "delivered-once": _DeliveredOnce,
    "from-memory": _FromMemory,
}
