"""Checkpoints: what makes the journal short, and what a model is rebuilt from.

- A checkpoint is kept when all results before it are durable, and counts as soon as the vault has
  it: what it covers is never carried out again, and its entries may go.
- One that fails costs nothing but time: the next one will be made.
"""

import asyncio

from holdfast import events, faults
from holdfast.errors import HoldfastError
from holdfast.trainer import ops
from holdfast.trainer.core import Core
from holdfast.trainer.ops import Op
from holdfast.trainer.seams import Snapshot
from holdfast.trainer.state import State, checkpoints_of

__all__ = ["CHECKPOINTS", "CheckpointFailed", "Checkpointed", "Checkpoints"]

CHECKPOINTS = 2
"""How many checkpoints of a model are kept."""
CAPTURED = faults.declare("trainer.checkpoint.captured", "state captured, nothing kept")
KEPT = faults.declare("trainer.checkpoint.kept", "checkpoint kept, nothing trimmed")
TRIMMED = faults.declare("trainer.checkpoint.trimmed", "trimmed on record, entries still there")


class Checkpointed(events.Event, frozen=True, tag="trainer.checkpointed"):
    """A model can be restored up to this operation without carrying it out again."""

    line: str
    number: int
    bytes: int


class CheckpointFailed(events.Event, frozen=True, tag="trainer.checkpoint_failed"):
    """No checkpoint was made; the next one will be."""

    reason: str


class Checkpoints:
    """See the module."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._saving: dict[str, asyncio.Task[None]] = {}
        """The checkpoints that are being written."""

    async def begin_if_due(self, state: State, number: int, op: Op) -> None:
        """Capture a model behind this operation if it is time; keep it beside what follows."""
        policy = self._core.policy
        count = number - state.line.trimmed
        due = (
            count >= policy.checkpoint_ops
            or state.since_s >= max(policy.checkpoint_s, state.saving_s / policy.checkpoint_share)
            or state.since_bytes >= policy.checkpoint_bytes
        )
        # Behind a step there are no gradients to be kept; but it must not wait for ever.
        good = isinstance(op, ops.OptimStep) or count >= 2 * policy.checkpoint_ops
        if not due or not good or not state.loaded or state.saving:
            return
        work = self.keep(state, number, await self._capture(state))
        saving = self._core.runtime.spawn(work, name=f"checkpoint {state.name}:{number}")
        state.saving, self._saving[state.name] = True, saving
        saving.add_done_callback(self._checked)

    async def take(self, state: State) -> None:
        """Make sure that a model which rests can be restored as it is now."""
        if state.saving:
            await asyncio.wait({self._saving[state.name]})
        if state.restorable is None or state.changed > state.restorable:
            await self.keep(state, state.line.done, await self._capture(state))

    async def _capture(self, state: State) -> Snapshot:
        state.saving_since = self._core.runtime.now()
        snapshot = await self._core.compute.capture(state.name)
        await faults.apoint(CAPTURED)
        state.since_s, state.since_bytes = 0.0, 0
        return snapshot

    async def keep(self, state: State, number: int, snapshot: Snapshot) -> None:
        """Keep what was captured behind this operation, and trim what it covers."""
        try:
            await self._core.journal.flushed()
            channel = checkpoints_of(state.name)
            kept = await self._core.vault.save(channel, number, snapshot, CHECKPOINTS)
            state.restorable = number
            state.saving_s = self._core.runtime.now() - state.saving_since
            await faults.apoint(KEPT)
            events.emit(Checkpointed(line=state.name, number=number, bytes=kept.bytes))
            await self.trim(state, number)
        finally:
            state.saving = False
            self._saving.pop(state.name, None)

    def _checked(self, task: "asyncio.Task[None]") -> None:
        """A checkpoint that fails costs nothing but time, unless we were replaced."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            events.emit(CheckpointFailed(reason=f"{type(error).__name__}: {error}"))
            if not isinstance(error, HoldfastError):
                self._core.journal.fail(_as_error(error))

    async def trim(self, state: State, number: int) -> None:
        """Remove the entries that a checkpoint has made needless."""
        core, model = self._core, state.model
        if model is None or model.ended or model.trimmed >= number:
            return
        await core.record(state, trimmed=number)
        await faults.apoint(TRIMMED)
        await core.journal.delete(core.keys.op(state.name, one) for one in state.line.trim(number))


def _as_error(error: BaseException) -> Exception:
    return error if isinstance(error, Exception) else RuntimeError(repr(error))
