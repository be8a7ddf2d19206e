"""Claiming samples: by number with a sampler, or exactly those with given keys."""

from collections.abc import Callable, Collection, Sequence

from holdfast.errors import Mistake, NotFound, TimedOut
from holdfast.ledger import Compare, Op, absent, same_life, unchanged
from holdfast.ledger.records import put
from holdfast.transfer.queue.batch import Batch
from holdfast.transfer.queue.desk import Change, Desk
from holdfast.transfer.queue.member import Seat
from holdfast.transfer.queue.plan import MOST_BLOCKS, Choice
from holdfast.transfer.queue.records import Claim, Sample, bits, text
from holdfast.transfer.queue.samplers import Sampler
from holdfast.transfer.queue.tidying import Tidying

__all__ = ["Claiming"]


class Claiming:
    """The claiming half of a queue, for one task and one life of a member."""

    def __init__(
        self,
        desk: Desk,
        tidying: Tidying,
        task: str,
        seat: Seat,
        *,
        batch: type[Batch] = Batch,
    ) -> None:
        self._desk = desk
        self._make_batch = batch
        self._tidying = tidying
        self._task = task
        self._seat = seat
        self._name = desk.nonce()
        self._last: Choice | None = None
        self._dropped: list[str] = []

    async def some(
        self,
        n: int,
        least: int,
        sampler: Sampler,
        max_lag: int | None,
        version: int | None,
        deadline: float,
        apart: Collection[str] = (),
    ) -> Batch:
        """Claim `n` samples; when the time is over, `least` will do. Those `apart` stay free."""
        desk, view = self._desk, self._desk.view
        enough = n

        def decide() -> Change[Choice | None] | Choice | None:
            if (found := self._found()) is not None:
                return found
            newest = view.head.newest if version is None else version
            oldest = newest - max_lag if max_lag is not None else -1
            choice = desk.plan.choose(view, self._task, n, sampler, oldest, apart)
            together = len(choice.taken.keys() | choice.dropped.keys())
            if len(choice.samples) < enough or together > MOST_BLOCKS:
                choice.samples, choice.taken = [], {}  # nothing yet, or first what is too old
            return self._change(choice) if choice.taken or choice.dropped else None

        while True:
            choice = await self._commit(decide, deadline)
            if choice is not None:
                self._dropped += choice.gone
                choice.gone = self._dropped
                try:
                    await self._tidying.free(choice.dropped)
                except BaseException:
                    self._desk.held.discard(self._name)  # nobody gets what was claimed
                    raise
                if choice.taken:
                    return self._batch(choice)
            elif not await self._desk.news(deadline):
                if enough == least:
                    self._desk.held.discard(self._name)
                    raise TimedOut(f"task {self._task!r} has no {enough} samples to claim yet")
                enough = least

    async def exactly(self, keys: list[str], deadline: float) -> Batch:
        """Claim these, and wait for those that others still have."""
        if len(set(keys)) != len(keys):
            raise Mistake("a key is asked for twice")
        desk, view = self._desk, self._desk.view
        await desk.refresh(deadline)
        held: list[str] = []

        def decide() -> Change[Choice | None] | Choice | None:
            if (found := self._found()) is not None:
                return found
            held.clear()
            taken: dict[int, int] = {}
            samples: list[Sample] = []
            for key in keys:
                number, place = view.where.get(key, (-1, 0))
                if number < 0:
                    if not view.was_done(key):
                        raise NotFound(f"no sample {key!r} is in this queue", key=key)
                    continue
                block, bit = view.blocks[number], 1 << place
                if block.task(self._task).finished & bit:
                    continue
                if not desk.plan.free(view, block, self._task) & bit:
                    held.append(key)
                    continue
                taken[number] = taken.get(number, 0) | bit
                samples.append(block.samples[place])
            if held:
                return None
            if len(taken) > MOST_BLOCKS:
                raise Mistake(f"{len(keys)} samples are spread too far: claim fewer at once")
            choice = Choice(taken, {}, samples, [])
            return self._change(choice) if taken else choice

        while True:
            choice = await self._commit(decide, deadline)
            if choice is not None:
                order = {key: at for at, key in enumerate(keys)}
                choice.samples.sort(key=lambda one: order[one.key])
                mine = {one.key for one in choice.samples}
                return self._batch(choice, [key for key in keys if key not in mine])
            if not await desk.news(deadline):
                desk.held.discard(self._name)
                raise TimedOut(
                    f"{len(held)} samples are not ready, or somebody else's: {held[0]!r} is one"
                )

    async def _commit(
        self,
        decide: Callable[[], Change[Choice | None] | Choice | None],
        deadline: float,
    ) -> Choice | None:
        self._desk.held.add(self._name)
        try:
            # A claim that is being written when the time is over is settled all the same.
            settled = deadline + self._desk.timeouts.queue_call_s
            return await self._desk.commit(decide, settled, seat=self._seat)
        except BaseException:
            self._desk.held.discard(self._name)  # if it was written all the same, nobody has it
            raise

    def _found(self) -> Choice | None:
        """The claim of an earlier attempt, whose answer was lost."""
        taken: dict[int, int] = {}
        samples: list[Sample] = []
        for block in self._desk.view.blocks.values():
            for claim, places in block.task(self._task).claims:
                if claim.id == self._name:
                    taken[block.number] = places
                    samples += [block.samples[at] for at in bits(places)]
        if self._last is not None and self._last.taken == taken:
            return self._last  # in the order that the sampler gave it
        return Choice(taken, {}, samples, []) if taken else None

    def _change(self, choice: Choice) -> Change[Choice | None]:
        view, keys = self._desk.view, self._desk.keys
        compare: list[Compare] = []
        then: list[Op] = []
        for number in sorted(choice.taken.keys() | choice.dropped.keys()):
            block = view.blocks[number]
            assert block.entry is not None
            there, places = block.task(self._task), choice.taken.get(number, 0)
            claim = Claim(self._name, self._seat.id, text(places)) if places else None
            state = self._desk.plan.claimed(
                there.state, claim, choice.dropped.get(number, 0), view.members
            )
            key = keys.state(number, self._task)
            compare.append(unchanged(there.entry) if there.entry else absent(key))
            compare.append(same_life(block.entry))
            then.append(put(key, state, over=there.entry))
        self._last = choice if choice.taken else None
        return Change(compare, then, choice)

    def _batch(self, choice: Choice, already: Sequence[str] = ()) -> Batch:
        if not choice.taken:
            self._desk.held.discard(self._name)
        which = (self._seat, self._task, self._name, choice, already)
        return self._make_batch(self._desk, self._tidying, *which)
