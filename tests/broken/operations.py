"""The operations with one mistake each."""

import asyncio
import contextlib
import functools
import hashlib
from collections.abc import AsyncIterator
from typing import Any

from broken.variant import Make, variant
from holdfast.ledger.types import Compare, Delete
from holdfast.sim.protocols.operations.model import OperationsProtocol
from holdfast.trainer import ops
from holdfast.trainer.checkpoints import Checkpoints
from holdfast.trainer.core import Core
from holdfast.trainer.effects import Effect, Effects
from holdfast.trainer.journal import Journal
from holdfast.trainer.ops import LoadWeights, Op, Outcome
from holdfast.trainer.records import Entry, Result
from holdfast.trainer.runner import Runner
from holdfast.trainer.seams import Snapshot
from holdfast.trainer.state import Pending, State
from holdfast.trainer.trainer import Trainer

__all__ = ["BROKEN"]


class _EarlyPromise(Core):
    """An operation is promised before it is durable."""

    async def append(self, state: State, number: int, op: Op, **how: Any) -> None:
        work = super().append(state, number, op, **how)
        if any(how.values()):
            await work
        else:
            self.runtime.spawn(work, name="later").add_done_callback(_hear)


def _hear(task: "asyncio.Task[None]") -> None:
    if not task.cancelled():
        task.exception()


class _EarlyResult(Runner):
    """A result is told before it is durable."""

    async def _settle(self, state: State, number: int, entry: Entry, effect: Effect) -> None:
        await super()._settle(state, number, entry, effect)
        if state.line.ordered and effect.sampler is None:
            self._core.settled(state, number, self._core.result_of(entry, effect.outcome))


class _NoFlush(Journal):
    """A checkpoint does not wait for the results that it covers."""

    async def flushed(self) -> None:
        """Wait for nothing."""


class _WholePayload(Core):
    """Duplicates are known by their whole payload, of which clients change a part."""

    def identity(self, op: Op) -> str:
        return hashlib.sha256(ops.encode(op)).hexdigest()


class _Seatless(Journal):
    """A trainer that was replaced goes on writing."""

    @property
    def guards(self) -> tuple[Compare, ...]:
        return ()

    def _behind(self) -> tuple[Compare, ...]:
        return ()

    async def check(self) -> None:
        """Believe."""


class _Repeated(Journal):
    """A write that is delivered again, long after it was done, has its effect again."""

    def _behind(self) -> tuple[Compare, ...]:
        return ()


class _Retries(Runner):
    """What failed is carried out again in a replay, and may succeed then."""

    def _passes_over(self, entry: Entry, known: Result | None) -> bool:
        return entry.skip


class _LoadsAgain(Effects):
    """A replay loads saved weights again, which may have been replaced since."""

    async def _load(
        self, state: State, number: int, op: LoadWeights, outcome: Outcome | None = None
    ) -> Effect:
        _, save = self._core.saves.find(op.path)
        kept = await self._core.vault.load(f"{state.name}.w.kept", save.version)
        await self._core.compute.load(state.name, kept, optimizer=op.optimizer)
        return Effect(outcome or ops.Loaded(path=op.path))


class _TrimsFirst(Checkpoints):
    """Entries are removed before the checkpoint that covers them is there."""

    async def keep(self, state: State, number: int, snapshot: Snapshot) -> None:
        await self._core.journal.flushed()
        await self.trim(state, number)
        await super().keep(state, number, snapshot)


class _TakesNone(Checkpoints):
    """A model is put aside without a checkpoint of what it is."""

    async def take(self, state: State) -> None:
        """Trust that it was kept."""


class _Forgets(Core):
    """A result is forgotten when it has been sent, whether it was received or not."""

    async def retrieve(self, request: str, hold_s: float) -> Outcome | Pending:
        got = await super().retrieve(request, hold_s)
        name, _, number = request.rpartition(":")
        state = self.lines[name]
        if not isinstance(got, Pending) and int(number) <= state.line.trimmed:
            state.line.results.pop(int(number), None)
            await self.journal.write(Delete(self.keys.result(name, int(number))))
        return got


class _Unsure(Core):
    """A trainer says "not found" from its memory, though it may have been replaced."""

    @contextlib.asynccontextmanager
    async def sure(self) -> AsyncIterator[None]:
        yield


def _trainer(mistake: type, *, guarded: bool = True, **parts: Any) -> Make:
    """The protocol with a trainer of these parts."""
    trainer = functools.partial(Trainer, **parts)
    return variant(OperationsProtocol, mistake, trainer=trainer, guarded=guarded)


def _runner(mistake: type, **parts: Any) -> Make:
    return _trainer(mistake, runner=functools.partial(Runner, **parts))


BROKEN: dict[str, Make] = {
    "": _trainer(_EarlyPromise, core=_EarlyPromise),
    "early-results": _trainer(_EarlyResult, runner=_EarlyResult),
    "hasty-checkpoints": _trainer(_NoFlush, journal=_NoFlush),
    "payloads": _trainer(_WholePayload, core=_WholePayload),
    "unfenced": _trainer(_Seatless, journal=_Seatless, guarded=False),
    "written-again": _trainer(_Repeated, journal=_Repeated),
    "failures-again": _trainer(_Retries, runner=_Retries),
    "load-replayed": _runner(_LoadsAgain, effects=_LoadsAgain),
    "trimmed-first": _runner(_TrimsFirst, checkpoints=_TrimsFirst),
    "dropped-unkept": _runner(_TakesNone, checkpoints=_TakesNone),
    "delivered-once": _trainer(_Forgets, core=_Forgets),
    "from-memory": _trainer(_Unsure, core=_Unsure),
}
