"""A batch: samples that are this member's until it acknowledges or releases them.

    async with await queue.claim("train", 64) as batch:
        values = await batch.fetch()
        ...
        await batch.acknowledge()

Acknowledge when what was done with the samples is durable, and not before: until then a
crash gives them to somebody else, afterwards nobody ever gets them again. Leaving the block
releases what is not acknowledged.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Self

from holdfast.errors import (
    BatchFailed,
    Corrupt,
    Fenced,
    Gone,
    LeaseLost,
    Mistake,
    NotFound,
    Retriable,
    UnknownOutcome,
)
from holdfast.ledger import Compare, Op, same_life, unchanged
from holdfast.ledger.records import put
from holdfast.transfer.queue.desk import Change, Desk
from holdfast.transfer.queue.member import Seat
from holdfast.transfer.queue.records import Sample, State
from holdfast.transfer.queue.tidying import Tidying
from holdfast.transfer.store import Store

__all__ = ["Batch", "fetch"]


class Batch:
    """Claimed samples. Made by `Queue.claim`."""

    def __init__(
        self,
        desk: Desk,
        store: Store,
        tidying: Tidying,
        seat: Seat,
        task: str,
        claim: str,
        taken: dict[int, int],
        samples: Sequence[Sample],
        *,
        dropped: Sequence[str] = (),
        already: Sequence[str] = (),
    ) -> None:
        self._desk = desk
        self._store = store
        self._tidying = tidying
        self._seat = seat
        self._claim = claim
        self._left = dict(taken)
        self.task = task
        self.samples = list(samples)
        self.dropped = list(dropped)
        """Keys that were too old and count as done for this task from now on."""
        self.already = list(already)
        """Of keys that were asked for by name: those that are acknowledged already."""

    @property
    def owner(self) -> str:
        """The life of the member that these samples were given to."""
        return self._seat.id

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
            return await fetch(self._store, self.samples, fields)
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
        places = self._places(keys)
        if not places:
            return
        name = self._desk.nonce()
        try:
            await self._change(places, name)
        except LeaseLost as error:
            raise Fenced(f"nothing was acknowledged: {error}") from error
        self._forget(places)
        await self._tidying.free(places)

    async def release(self) -> None:
        """Give what is not acknowledged back at once. Does its best: a lease ends by itself."""
        places, self._left = self._left, {}
        if not places:
            return
        try:
            await self._change(places, None)
        except (LeaseLost, Fenced, Retriable, UnknownOutcome, Corrupt):
            return  # what is left of it is released when the queue tidies
        finally:
            self._desk.held.discard(self._claim)

    def _places(self, keys: Iterable[str] | None) -> dict[int, int]:
        if keys is None:
            return dict(self._left)
        found: dict[int, int] = {}
        mine = set(self.keys)
        for key in keys:
            if key not in mine:
                raise Mistake(f"{key!r} is not in this batch", key=key)
            number, place = self._desk.view.where.get(key, (-1, 0))
            if self._left.get(number, 0) & 1 << place:
                found[number] = found.get(number, 0) | 1 << place
        return found

    def _forget(self, places: dict[int, int]) -> None:
        for number, some in places.items():
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
                if block is None or block.entry is None:
                    self._gone()
                    return None
                task = block.task(self.task)
                if name is not None and name in task.state.settled:
                    return None  # an earlier attempt, whose answer was lost
                state = self._decide(task.state, some, name)
                if task.entry is None:
                    raise Fenced(f"{self._seat.id} does not claim these samples any more")
                compare += [unchanged(task.entry), same_life(block.entry)]
                then.append(put(desk.keys.state(number, self.task), state, over=task.entry))
            return Change(compare, then, None)

        await desk.commit(decide, desk.deadline(), seat=self._seat)

    def _decide(self, state: State, some: int, name: str | None) -> State:
        if name is None:
            return self._desk.plan.released(state, self._claim, some)
        changed = self._desk.plan.acknowledged(state, self._claim, some, name)
        if changed is None:
            raise Fenced(
                f"{self._seat.id} does not claim these samples any more: its lease has ended, and "
                "they went to somebody else"
            )
        return changed

    def _gone(self) -> None:
        """A block is gone when everything in it was acknowledged: by us, if we are alive."""
        if self._seat.id not in self._desk.view.members:
            raise UnknownOutcome(
                f"{self._seat.id} lost its lease while it acknowledged; all samples are "
                "acknowledged by now, by it or by others"
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
