"""The operations with one mistake each."""

import contextlib
import functools
import hashlib
from collections.abc import AsyncIterator, Callable

from broken.variant import Make, variant
from holdfast.ledger.types import Compare, Delete
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
    """An operation is promised before it is durable."""

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
        self,
        state: State,
        number: int,
        op: LoadWeights,
        outcome: Outcome | None = None,
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


def _core(core: type[Core]) -> Make:
    return variant(OperationsProtocol, core, trainer=functools.partial(Trainer, core=core))


def _journal(journal: type[Journal], *, guarded: bool = True) -> Make:
    trainer = functools.partial(Trainer, journal=journal)
    return variant(OperationsProtocol, journal, trainer=trainer, guarded=guarded)


def _runner(mistake: type, runner: Callable[..., Runner]) -> Make:
    return variant(OperationsProtocol, mistake, trainer=functools.partial(Trainer, runner=runner))


def _checkpoints(checkpoints: type[Checkpoints]) -> Make:
    return _runner(checkpoints, functools.partial(Runner, checkpoints=checkpoints))


BROKEN: dict[str, Make] = {
    "": _core(_EarlyPromise),
    "early-results": _runner(_EarlyResult, _EarlyResult),
    "hasty-checkpoints": _journal(_NoFlush),
    "payloads": _core(_WholePayload),
    "unfenced": _journal(_Seatless, guarded=False),
    "written-again": _journal(_Repeated),
    "failures-again": _runner(_Retries, _Retries),
    "load-replayed": _runner(_LoadsAgain, functools.partial(Runner, effects=_LoadsAgain)),
    "trimmed-first": _checkpoints(_TrimsFirst),
    "dropped-unkept": _checkpoints(_TakesNone),
    "delivered-once": _core(_Forgets),
    "from-memory": _core(_Unsure),
}
