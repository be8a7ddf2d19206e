"""What operations do: to models, to the vault, and what is to be recorded of it.

Nothing here is durable by itself: an `Effect` says what belongs together with the result, and
`runner.py` records it.

**No answer to a caller ends the process**, and `Effects.carry_out` is the one place that sees to
it. `Mistake` (the caller's) and `NotDone` (the server's: weights that are damaged) have had no
effect, whatever the operation. Of an operation that only reads, neither has any other error. What
is raised from there is left: the trainer was replaced (`Fenced`), it is not known what the ledger
has (`UnknownOutcome`), or a model in memory may be half changed. Then a successor begins from the
journal.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from holdfast import events, faults
from holdfast.errors import (
    Corrupt,
    Fenced,
    Gone,
    LeaseLost,
    Mistake,
    NotFound,
    Retriable,
    UnknownOutcome,
)
from holdfast.trainer import ops
from holdfast.trainer.checkpoints import CHECKPOINTS
from holdfast.trainer.core import Core
from holdfast.trainer.journal import Write, patient
from holdfast.trainer.ops import Failed, Op, Outcome
from holdfast.trainer.paths import FOLDERS, SAMPLER, STATE, adapter, unparse
from holdfast.trainer.records import Model, Sampler, Save, check_name
from holdfast.trainer.saves import Where
from holdfast.trainer.seams import Kept, Snapshot
from holdfast.trainer.shelf import Shelf
from holdfast.trainer.state import (
    State,
    channel_of,
    checkpoints_of,
    policy_of,
    publication,
    unnamed_of,
)

__all__ = ["Effect", "Effects", "changes_state", "loaded"]

T = TypeVar("T")

EXPORTED = faults.declare("trainer.publish.kept", "sampler weights kept, not recorded")
RESTORED = faults.declare("trainer.restored", "a model is in memory again, not yet used")
SAVED = faults.declare("trainer.save.kept", "saved weights kept, not recorded")


class Unexpected(events.Event, frozen=True, tag="trainer.unexpected"):
    """An operation that only reads failed in a way that nobody has thought of."""

    line: str
    number: int
    reason: str


class NotDone(Exception):
    """The server cannot do it, and nothing was changed."""


@dataclass
class Effect:
    """What came of an operation, and what is to be recorded together with its result."""

    outcome: Outcome
    writes: Sequence[Write] = ()
    model: Model | None = None
    sampler: tuple[str, Sampler] | None = None
    save: tuple[tuple[str, str, str], Save] | None = None
    trims: bool = False
    """Whether the model's checkpoint is at this operation now."""


class Effects:
    """Does what is asked, with the core's compute and vault."""

    def __init__(self, core: Core, shelf: Shelf) -> None:
        self._core = core
        self._shelf = shelf

    async def carry_out(self, state: State, number: int, op: Op) -> Effect:
        """Do it, or say why not: see the module."""
        try:
            return await self._carry_out(state, number, op)
        except Mistake as error:
            return Effect(Failed(error=str(error)))
        except NotDone as error:
            return Effect(Failed(error=str(error), category="server"))
        except (Fenced, UnknownOutcome):
            raise
        except Exception as error:
            if changes_state(op) or not self._core.compute.in_step:
                raise
            reason = f"{type(error).__name__}: {error}"
            events.emit(Unexpected(line=state.name, number=number, reason=reason))
            return Effect(Failed(error=reason, category="server"))

    async def _carry_out(self, state: State, number: int, op: Op) -> Effect:
        if isinstance(op, ops.Sample):
            return Effect(await self._sample(state, number, op))
        if isinstance(op, ops.Unload):
            return await self._unload(state)
        if state.lost:
            raise NotDone(state.lost)
        if not isinstance(op, ops.CreateModel):
            await self._have(state)
        match op:
            case ops.CreateModel():
                return await self._create(state, number, op)
            case ops.ForwardBackward() | ops.OptimStep():
                return Effect(await self._core.compute.apply(state.name, number, op))
            case ops.SaveForSampler() if op.name is None and op.session_seq is not None:
                return await self._publish(state, number)
            case ops.SaveWeights() | ops.SaveForSampler():
                return await self._save(state, number, op)
            case ops.Publish():
                return await self._publish_version(state, op)
            case ops.LoadWeights():
                return await self._load(state, number, op)
            case ops.Skip():
                return Effect(Failed(error=op.reason))

    async def patient(self, call: Callable[[], Awaitable[T]]) -> T:
        """Wait for room, on a disk or wherever; what was asked for is not lost meanwhile.

        Only for calls that may be made twice: the first one may have taken effect.
        """
        return await patient(self._core.runtime, self._core.policy.room_s, call)

    # ---- models ----------------------------------------------------------------

    async def _have(self, state: State) -> None:
        """Make sure that the model is in memory; if not, its last checkpoint is restored."""
        if state.loaded:
            return
        if state.restorable is None:
            # Its creation failed: whatever is asked of it fails, too.
            raise NotFound(f"the model {state.name} could not be created")
        await self._make_room(state)
        try:
            await self._restore(state, state.restorable)
        except LeaseLost:
            raise
        except (Corrupt, Gone, Mistake) as error:
            await self.give_up(state, f"it cannot be restored: {error}")
            raise NotDone(state.lost) from error

    async def _make_room(self, state: State) -> None:
        """Have room for this model in memory. Nothing has been done to it when there is none."""
        try:
            await self._shelf.make_room(state)
        except Retriable as error:
            raise NotDone(f"no model could be put aside to make room: {error}") from error

    async def give_up(self, state: State, reason: str) -> None:
        """This trainer cannot go on with a model: what is asked of it fails, others go on."""
        state.lost = f"the model {state.name} is lost: {reason}"
        state.loaded = False
        await self._core.compute.drop(state.name)

    async def _restore(self, state: State, version: int) -> None:
        core, model = self._core, state.record
        # What was passed over since then had no effect on it.
        channel = checkpoints_of(state.name)
        kept = await self.patient(lambda: core.vault.load(channel, version))
        await core.compute.restore(state.name, model.base, model.lora, kept)
        state.loaded = True
        await faults.apoint(RESTORED)

    async def _weights(self, what: str, channel: str, version: int) -> Snapshot:
        """Weights that an operation needs. Nothing has been done yet when they are not there."""
        try:
            return await self.patient(lambda: self._core.vault.load(channel, version))
        except (Retriable, UnknownOutcome, LeaseLost, Corrupt) as error:
            raise NotDone(f"{what} cannot be read: {error}") from error
        except (Gone, NotFound) as error:
            raise Mistake(f"{what} are no longer kept: {error}") from error

    async def _create(self, state: State, number: int, op: ops.CreateModel) -> Effect:
        core, model = self._core, state.record
        await self._make_room(state)
        await core.compute.create(state.name, model.base, model.lora)
        state.loaded = True
        if op.load is None:
            return Effect(loaded(state.name, op))
        try:
            return await self._load(state, number, op.load, loaded(state.name, op))
        except (Mistake, NotDone):
            await core.compute.drop(state.name)
            state.loaded = False
            raise

    async def _load(
        self, state: State, number: int, op: ops.LoadWeights, outcome: Outcome | None = None
    ) -> Effect:
        core = self._core
        where, save = self._saved(state, op)
        if op.optimizer and not save.optimizer:
            raise Mistake(f"{op.path} has no optimizer state: load it without")
        kept = await self._weights(f"the weights {op.path}", channel_of(*where), save.version)
        await core.compute.load(state.name, kept, optimizer=op.optimizer)
        state_now = await core.compute.capture(state.name)
        await core.journal.flushed()
        channel = checkpoints_of(state.name)
        await self.patient(lambda: core.vault.save(channel, number, state_now, CHECKPOINTS))
        state.restorable = number
        return Effect(outcome or loaded(state.name, op), trims=True)

    def _saved(self, state: State, op: ops.LoadWeights) -> tuple[Where, Save]:
        core = self._core
        if not op.adapter:
            return core.saves.find(op.path, state.name)
        found = core.saves.find(adapter(op.path, core.owner), state.name, FOLDERS)
        if state.record.lora is None or found[1].lora is None:
            whole = state.name if state.record.lora is None else op.path
            raise Mistake(f"{whole} has all the weights of a model, and no adapter")
        return found

    async def _unload(self, state: State) -> Effect:
        assert state.model is not None
        await self._core.compute.drop(state.name)
        state.loaded = False
        ended = msgspec.structs.replace(state.model, ended=True)
        return Effect(ops.Done(what="unload_model", model=state.name), model=ended)

    # ---- saving ----------------------------------------------------------------

    async def _keep(
        self, state: State, channel: str, version: int, keep: int, *, whole: bool = False
    ) -> Kept:
        """Keep everything, or the weights for samplers."""
        core = self._core
        snapshot = await (core.compute.capture if whole else core.compute.export)(state.name)
        kept = await self.patient(lambda: core.vault.save(channel, version, snapshot, keep))
        await faults.apoint(SAVED if whole else EXPORTED)
        return kept

    async def _save(
        self, state: State, number: int, op: ops.SaveWeights | ops.SaveForSampler
    ) -> Effect:
        """Keep everything, or the weights for samplers, under a name."""
        core, whole = self._core, isinstance(op, ops.SaveWeights)
        name = check_name("save", op.name or f"{number:06}")
        where = (state.name, STATE if whole else SAMPLER, name)
        channel, path = channel_of(*where), unparse(*where)
        there = core.saves.get(where)
        if there is not None and there.number != number and not _overwrites(op):
            hint = "say overwrite, or another name" if whole else "use another name"
            raise Mistake(f"{path} is there already: {hint}")
        kept = await self._keep(state, channel, number, 1, whole=whole)
        now = core.wall()
        save = Save(
            name=name,
            number=number,
            version=kept.version,
            base=state.record.base,
            lora=state.record.lora,
            optimizer=whole,
            bytes=kept.bytes,
            created_at=now,
            expires_at=now + op.ttl_s if op.ttl_s else 0.0,
            metadata=op.metadata,
        )
        outcome = ops.Saved(path=path) if whole else ops.SamplerSaved(path=path)
        return Effect(outcome, core.saves.tell(path, save, kept.hash), save=(where, save))

    async def _publish(self, state: State, number: int) -> Effect:
        """Keep the weights for one new sampling session."""
        model, channel = state.record, unnamed_of(state.name)
        kept = await self._keep(state, channel, number, self._core.policy.sampler_keep)
        sampler = Sampler(
            session=model.session,
            base=model.base,
            lora=model.lora,
            channel=channel,
            version=kept.version,
        )
        # Not named by `session_seq`: that is no name of ours to give, another publication
        # or sampling session may have it already, and would keep its own weights.
        session = publication(state.name, number)
        return Effect(ops.SamplerSaved(sampling_session=session), sampler=(session, sampler))

    async def _publish_version(self, state: State, op: ops.Publish) -> Effect:
        channel = policy_of(state.name)
        kept = await self._keep(state, channel, op.version, self._core.policy.sampler_keep)
        return Effect(ops.Published(channel=channel, version=kept.version, content=kept.hash))

    async def _sample(self, state: State, number: int, op: ops.Sample) -> Outcome:
        core, sampler = self._core, state.sampler
        if sampler is None:
            raise Mistake(f"{state.name} is a model: sample with a sampling session")
        core.saves.check_kept(sampler.channel, sampler.version)
        key = f"{sampler.channel}@{sampler.version}" if sampler.channel else sampler.base
        if not core.compute.has_sampler(key):
            snapshot = None
            if sampler.channel:
                what = f"the weights of the sampling session {state.name}"
                snapshot = await self._weights(what, sampler.channel, sampler.version)
            await core.compute.open_sampler(key, sampler.base, sampler.lora, snapshot)
        return await core.compute.sample(key, state.name, number, op)


def _overwrites(op: Op) -> bool:
    return isinstance(op, ops.SaveWeights) and op.overwrite


def changes_state(op: Op) -> bool:
    """Whether carrying it out changes what comes after it."""
    match op:
        case ops.ForwardBackward():
            return op.backward
        case ops.SaveWeights() | ops.SaveForSampler() | ops.Publish() | ops.Sample() | ops.Skip():
            return False
        case _:
            return True


def loaded(model: str, op: Op) -> Outcome:
    """What came of an operation that ended with a checkpoint."""
    match op:
        case ops.LoadWeights():
            return ops.Loaded(path=op.path, adapter_of=model if op.adapter else "")
        case ops.CreateModel():
            return ops.Created(model=model, path=op.load.path if op.load else "")
        case _:
            raise Corrupt(f"a checkpoint covers {ops.kind(op)}, which has no result")
