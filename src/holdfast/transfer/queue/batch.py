"""A batch: samples that are this member's until it acknowledges or releases them.

    async with await queue.claim("train", 64) as batch:
        values = await batch.fetch()
        ...
        await batch.acknowledge()

Acknowledge when what was done with the samples is durable, and not before: until then a
crash gives them to somebody else, afterwards nobody ever gets them again. Leaving the block
releases what is not acknowledged.

An acknowledgement that was interrupted is settled first by the next one, under its own name:
whether it took effect is looked up, not guessed.
"""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Self

from holdfast.errors import (
    BatchFailed,
    Fenced,
    Gone,
    HoldfastError,
    LeaseLost,
    Mistake,
    NotFound,
    UnknownOutcome,
)
from holdfast.ledger import Compare, Op, same_life, unchanged
from holdfast.ledger.records import put
from holdfast.transfer.queue.desk import Change, Desk
from holdfast.transfer.queue.member import Seat
from holdfast.transfer.queue.plan import Choice
from holdfast.transfer.queue.records import Sample, State
from holdfast.transfer.queue.tidying import Tidying
from holdfast.transfer.queue.view import TaskView
from holdfast.transfer.store import Store

__all__ = ["Batch", "fetch"]


class Batch:
    """Claimed samples. Made by `Queue.claim`."""

    def __init__(
        self,
        desk: Desk,
        tidying: Tidying,
        seat: Seat,
        task: str,
        claim: str,
        choice: Choice,
        already: Sequence[str] = (),
    ) -> None:
        self._desk = desk
        self._tidying = tidying
        self._seat = seat
        self._claim = claim
        self._left = dict(choice.taken)
        self._released: dict[int, int] = {}
        self.samples = list(choice.samples)
        self._where = {key: desk.view.where.get(key, (-1, 0)) for key in self.keys}
        self._open: tuple[str, dict[int, int]] | None = None
        """An acknowledgement that was sent, and whose outcome nobody has heard yet."""
        # A batch that nobody has any more can be acknowledged by nobody: `tidy` releases it.
        weakref.finalize(self, desk.held.discard, claim).atexit = False
        self.task = task
        self.dropped = list(choice.gone)
        """Keys that were too old and count as done for this task from now on."""
        self.already = list(already)
        """Of keys that were asked for by name: those that are acknowledged already."""

    @property
    def owner(self) -> str:
        """The life of the member that these samples were given to."""
        return self._seat.id

    @property
    def alive(self) -> Compare:
        """The condition that the member's life goes on: until then nobody else claims these."""
        return self._seat.alive

    @property
    def keys(self) -> list[str]:
        """The samples' keys, in order."""
        return [one.key for one in self.samples]

    def __len__(self) -> int:
        return len(self.samples)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release()

    async def fetch(self, fields: Iterable[str] | None = None) -> list[dict[str, Any]]:
        """The fields of every sample, in the order of `samples`.

        Raises `BatchFailed` naming what did not arrive, and `Fenced` when that is because
        the samples are this member's no longer.
        """
        try:
            return await fetch(self._desk.store, self.samples, fields)
        except BatchFailed as error:
            if any(isinstance(reason, Gone) for reason in error.failures.values()):
                await self._still_ours()
            raise

    async def _still_ours(self) -> None:
        entry = await self._desk.runtime.ledger.get(self._seat.key)
        if entry is None:
            raise Fenced(f"{self._seat.id} lost its lease: its samples went to somebody else")

    async def acknowledge(self, keys: Iterable[str] | None = None) -> None:
        """These samples (all, unless told) are done with in this task, for ever.

        Raises `Fenced` when they are not this member's any more; doing it twice does no harm.
        """
        if self._open is not None:
            await self._settle(*self._open)
        places = self._places(keys)
        if places:
            await self._settle(self._desk.nonce(), places)

    async def _settle(self, name: str, places: dict[int, int]) -> None:
        """Acknowledge under a name, once."""
        try:
            await self._change(places, name)
        except LeaseLost as error:
            raise Fenced(f"nothing was acknowledged: {error}") from error
        self._open = None
        self._forget(places)
        await self._tidying.free(places)

    async def release(self) -> None:
        """Give what is not acknowledged back at once. Does its best: a lease ends by itself."""
        places, self._left = self._left, {}
        if not places:
            return
        self._released = places
        try:
            await self._change(places, None)
        except HoldfastError:
            return  # what is left of it is released when the queue tidies
        finally:
            self._desk.held.discard(self._claim)

    def _places(self, keys: Iterable[str] | None) -> dict[int, int]:
        if keys is None and not any(self._released.values()):
            return dict(self._left)
        found: dict[int, int] = {}
        for key in self._where if keys is None else keys:
            if key not in self._where:
                raise Mistake(f"{key!r} is not in this batch", key=key)
            number, place = self._where[key]
            if self._released.get(number, 0) >> place & 1:
                raise Fenced(f"{key} was released: it is somebody else's, or will be", key=key)
            if self._left.get(number, 0) >> place & 1:
                found[number] = found.get(number, 0) | 1 << place
        return found

    def _forget(self, places: dict[int, int]) -> None:
        for number, some in places.items():
            self._released[number] = self._released.get(number, 0) & ~some
            left = self._left.get(number, 0) & ~some
            if left:
                self._left[number] = left
            else:
                self._left.pop(number, None)
        if not self._left:
            self._desk.held.discard(self._claim)

    async def _change(self, places: dict[int, int], name: str | None) -> None:
        """Acknowledge under a name, or release without one."""
        desk = self._desk

        def decide() -> Change[None] | None:
            compare: list[Compare] = []
            then: list[Op] = []
            for number, some in places.items():
                block = desk.view.blocks.get(number)
                task = block.task(self.task) if block is not None and block.entry else None
                if name is not None and task is not None and name in task.state.settled:
                    return None  # an earlier attempt, whose answer was lost
                state = self._decide(task.state, some, name) if task is not None else None
                if block is None or block.entry is None or task is None or state is None:
                    if name is None:
                        continue
                    self._not_held(some, task)
                    return None
                if task.entry is None:
                    raise Fenced(f"{self._seat.id} does not claim these samples any more")
                compare += [unchanged(task.entry), same_life(block.entry)]
                then.append(put(desk.keys.state(number, self.task), state, over=task.entry))
            if not then:
                return None
            if name is not None:
                self._open = (name, places)
            return Change(compare, then, None)

        await desk.commit(decide, desk.deadline(), seat=self._seat)

    def _decide(self, state: State, some: int, name: str | None) -> State | None:
        if name is None:
            return self._desk.plan.released(state, self._claim, some)
        return self._desk.plan.acknowledged(state, self._claim, some, name)

    def _not_held(self, some: int, task: TaskView | None) -> None:
        """The claim is not there. Returns when that is because of us; raises otherwise.

        A block is gone when all of it was acknowledged. While we live, and have not released
        them, nobody else can have acknowledged what we claimed.
        """
        if self._open is not None and (task is None or not some & ~task.acked):
            if self._seat.id in self._desk.view.members and not any(self._released.values()):
                return
            raise UnknownOutcome(
                f"{self._seat.id} lost its lease while it acknowledged; the samples are "
                "acknowledged by now, by it or by others"
            )
        raise Fenced(
            f"{self._seat.id} does not claim these samples any more: its lease has ended, and "
            "they went to somebody else"
        )


async def fetch(
    store: Store, samples: Sequence[Sample], fields: Iterable[str] | None
) -> list[dict[str, Any]]:
    """The fields of samples, those named or all of them, in the order of the samples."""
    names = list(fields or ())
    wanted = []
    for one in samples:
        if missing := [name for name in names if name not in one.fields]:
            raise NotFound(f"{one.key} has no field {missing[0]!r} yet", key=one.key)
        wanted.append({name: one.fields[name] for name in names or one.fields})
    found = await store.aget([ref for one in wanted for ref in one.values()])
    return [{name: found[ref.key] for name, ref in one.items()} for one in wanted]
