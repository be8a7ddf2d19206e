"""The rules of the queue. Pure: a view in, records and conditions out.

- A sample is *free* in a task when it has the fields that the task needs, is neither
  acknowledged nor dropped there, and no living member claims it. A member that is gone
  never comes back under the same name, so whatever it had claimed is free.
- A claim is written with the condition that the block's state in that task is the one that
  was read. So two members never claim the same sample.
- An acknowledgement needs the claim to be there still, and its owner to be alive. So
  whoever slept through the end of its lease cannot acknowledge, and what was given to
  another is acknowledged by that other only.
- A payload is deleted only when every task is done with its sample.
"""

from collections.abc import Collection, Iterator

import msgspec

from holdfast.errors import Mistake
from holdfast.transfer.queue.records import Claim, Sample, State, bits, mask, text
from holdfast.transfer.queue.samplers import Sampler
from holdfast.transfer.queue.view import BlockView, View

__all__ = ["MOST_BLOCKS", "Choice", "Plan"]

MOST_BLOCKS = 40
"""Blocks that one claim may touch: a transaction has room for three conditions each."""


class Choice(msgspec.Struct):
    """What a claim would take, and what it would drop, as masks by block."""

    taken: dict[int, int]
    dropped: dict[int, int]
    samples: list[Sample]
    """Those that are taken, in the order of the batch."""
    gone: list[str]
    """The keys of those that are dropped."""


class Plan:
    """The rules. There is nothing in it: a simulation breaks one of them at a time."""

    def free(self, view: View, block: BlockView, task: str) -> int:
        """The samples of a block that may be claimed."""
        assert view.config is not None
        if block.entry is None:
            return 0
        state = block.task(task)
        there = block.ready(view.config.tasks[task]) & ~state.finished
        return there & ~state.claimed(view.members) if there else 0

    def choose(
        self,
        view: View,
        task: str,
        n: int,
        sampler: Sampler,
        oldest: int,
        apart: Collection[str] = (),
    ) -> Choice:
        """What to claim now: at most `n` samples; older versions than `oldest` are dropped.

        Samples that are `apart` are neither claimed nor dropped.
        """
        dropped: dict[int, int] = {}
        masks: dict[int, int] = {}
        kept: dict[int, int] = {}
        for key in apart:
            number, place = view.where.get(key, (-1, 0))
            kept[number] = kept.get(number, 0) | 1 << place
        for block in view.blocks.values():
            open_now = self.free(view, block, task) & ~kept.get(block.number, 0)
            if open_now and block.oldest < oldest:
                old = sum(1 << at for at in bits(open_now) if block.samples[at].version < oldest)
                if old and len(dropped) < MOST_BLOCKS:
                    dropped[block.number] = old
                open_now &= ~old
            if open_now:
                masks[block.number] = open_now

        def samples() -> Iterator[Sample]:
            for number, open_now in masks.items():
                block = view.blocks[number]
                for at in bits(open_now):
                    yield block.samples[at]

        picked = list(sampler(samples(), n))[:n] if masks else []
        taken = self._places(view, picked, masks)
        if len(taken) > MOST_BLOCKS:
            raise Mistake(
                f"the {len(picked)} samples are spread over {len(taken)} blocks; a claim can "
                f"touch {MOST_BLOCKS}: claim fewer at once"
            )
        gone = [view.blocks[n].samples[at].key for n, some in dropped.items() for at in bits(some)]
        return Choice(taken, dropped, picked, gone)

    @staticmethod
    def _places(view: View, picked: list[Sample], masks: dict[int, int]) -> dict[int, int]:
        taken: dict[int, int] = {}
        for one in picked:
            number, place = view.where.get(one.key, (-1, 0))
            bit = 1 << place
            if not masks.get(number, 0) & bit or taken.get(number, 0) & bit:
                raise Mistake(f"the sampler chose {one.key!r}, which it was not offered, or twice")
            taken[number] = taken.get(number, 0) | bit
        return taken

    def claimed(self, state: State, claim: Claim | None, dropped: int, living: set[str]) -> State:
        """The state with one more claim; what dead members had claimed of it is theirs no more."""
        places = mask(claim.mask) if claim else 0
        kept = []
        for old in state.claims:
            if old.owner in living:
                kept.append(old)
            elif left := mask(old.mask) & ~places & ~dropped:
                kept.append(Claim(old.id, old.owner, text(left)))
        return msgspec.structs.replace(
            state,
            claims=(*kept, claim) if claim else tuple(kept),
            dropped=text(mask(state.dropped) | dropped),
        )

    def acknowledged(self, state: State, claim_id: str, places: int, name: str) -> State | None:
        """The state with these samples acknowledged; None when they are not the claim's.

        `name` is the acknowledgement's own: whoever lost the answer finds it in `settled`.
        """
        held = next((mask(one.mask) for one in state.claims if one.id == claim_id), 0)
        if places & ~held:
            return None
        return msgspec.structs.replace(
            self.released(state, claim_id, places),
            acked=text(mask(state.acked) | places),
            settled=(*state.settled, name)[-State.KEEP_SETTLED :],
        )

    def released(self, state: State, claim_id: str, places: int) -> State:
        """The state with these samples of a claim free again."""
        kept = []
        for one in state.claims:
            left = mask(one.mask) & ~places if one.id == claim_id else mask(one.mask)
            if left:
                kept.append(Claim(one.id, one.owner, text(left)))
        return msgspec.structs.replace(state, claims=tuple(kept))

    def freeable(self, view: View, block: BlockView) -> int:
        """The samples that every task is done with and whose payloads are still there."""
        assert view.config is not None
        found = block.all & ~block.freed
        for task in view.config.tasks:
            found &= block.task(task).finished
        return found
