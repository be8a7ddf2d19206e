"""Which models are in memory, and which are put aside on disk until they are needed again.

- At most `max_models` are in memory. An operation that needs one more, because it creates a model
  or because its own was put aside, first puts another one aside: the model's checkpoint is kept,
  and only then is it dropped from memory.
- A model that was put aside is exactly what a successor finds: a checkpoint, and the operations
  behind it in the journal. So a trainer that dies in between loses nothing, and a model comes
  back as it comes back in a successor (`Effects`).
- Only the runner puts aside, in an operation of another model or between two operations. The
  other ranks hear of it as of every order, so they do the same in the same order.
- Nothing is forgotten: results, numbers and sessions live on as long as they do otherwise.
"""

import functools
from collections.abc import Sequence

from holdfast import events, faults
from holdfast.errors import Retriable, UnknownOutcome
from holdfast.trainer.checkpoints import CheckpointFailed, Checkpoints
from holdfast.trainer.core import Core
from holdfast.trainer.journal import patient
from holdfast.trainer.state import State

__all__ = ["PutAside", "Shelf", "choose"]

KEPT = faults.declare("trainer.aside.kept", "a model to be put aside is kept, still in memory")
DROPPED = faults.declare(
    "trainer.aside.dropped", "a model is put aside, what needs the room waits"
)


class PutAside(events.Event, frozen=True, tag="trainer.put_aside"):
    """A model is on disk only, until something is asked of it."""

    line: str
    number: int
    in_memory: int


def choose(held: Sequence[State], silent: frozenset[str]) -> State:
    """The model to put aside, of those in memory.

    First those that nothing is asked of: of `silent` sessions, then of others, the longest unused
    one. If something is asked of all of them, they take turns: the one used last waits longest.
    """
    idle = [one for one in held if not one.wanted]
    if not idle:
        return max(held, key=lambda one: one.used)
    return min(idle, key=lambda one: (one.session not in silent, one.used))


class Shelf:
    """See the module."""

    def __init__(self, core: Core, checkpoints: Checkpoints) -> None:
        self._core = core
        self._checkpoints = checkpoints

    async def make_room(self, state: State) -> None:
        """Have room for one more model in memory. `Retriable` if there is none on disk."""
        core = self._core
        while True:
            held = [one for one in core.known.in_memory() if one is not state]
            if len(held) < core.policy.max_models:
                return
            aside = functools.partial(
                self._put_aside, choose(held, core.known.silent(core.runtime.now()))
            )
            await patient(core.runtime, core.policy.room_s, aside)

    async def tidy(self) -> None:
        """Put aside the models of silent sessions, while there is nothing else to do."""
        core = self._core
        silent = core.known.silent(core.runtime.now())
        for state in core.known.in_memory():
            if core.work.is_set():
                return
            if state.session in silent and not state.wanted:
                try:
                    await self._put_aside(state)
                except (Retriable, UnknownOutcome) as error:
                    events.emit(CheckpointFailed(reason=str(error)))
                    return  # the next look tries again

    async def _put_aside(self, state: State) -> None:
        state.busy = True  # so that it is not retired meanwhile
        try:
            if not state.ended:
                await self._checkpoints.take(state)
                await faults.apoint(KEPT)
            state.loaded = False
            await self._core.compute.drop(state.name)
        finally:
            state.busy = False
        await faults.apoint(DROPPED)
        count = len(self._core.known.in_memory())
        events.emit(PutAside(line=state.name, number=state.line.done, in_memory=count))
