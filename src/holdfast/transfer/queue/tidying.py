"""Deleting what no task needs any more.

Payloads first, then the record that says so: whoever dies in between leaves payloads that
the next one deletes again, which does no harm. A block of which everything is deleted is
replaced by its keys, so that none of its samples can be added again.
"""

import contextlib
from collections.abc import Iterable

from holdfast.errors import HoldfastError
from holdfast.ledger import Delete, Op, absent, unchanged
from holdfast.ledger.records import Record, put
from holdfast.transfer.frame import Ref
from holdfast.transfer.queue.desk import Change, Desk
from holdfast.transfer.queue.records import Block, Freed, bits, done, mask, text

__all__ = ["Tidying"]

_MOST_OPS = 90


class Tidying:
    """The deleting half of a queue."""

    remember = 100
    """Finished blocks whose keys are remembered."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def free(self, blocks: Iterable[int]) -> None:
        """Delete the payloads of samples that every task is done with, and finished blocks."""
        desk = self._desk
        for number in list(blocks):
            block = desk.view.blocks.get(number)
            if block is None or block.entry is None:
                continue
            with contextlib.suppress(HoldfastError):  # `tidy` tries again
                places = desk.plan.freeable(desk.view, block)
                if places:
                    refs = [ref for place in bits(places) for ref in block.refs(place)]
                    await desk.store.adelete(refs)
                    await self._mark(number, places)
                await self._finish(number)

    async def _mark(self, number: int, places: int) -> None:
        desk = self._desk
        key = desk.keys.freed(number)

        def decide() -> Change[None] | None:
            block = desk.view.blocks.get(number)
            if block is None or block.entry is None or not places & ~block.freed:
                return None
            entry = block.freed_entry
            compare = [unchanged(entry) if entry else absent(key), unchanged(block.entry)]
            record = Freed(mask=text(block.freed | places))
            return Change(compare, [put(key, record, over=entry)], None)

        await desk.commit(decide, desk.deadline())

    async def _finish(self, number: int) -> None:
        """Replace a block by its keys when all of it is deleted and nothing is added any more."""
        desk, keys, view = self._desk, self._desk.keys, self._desk.view

        def decide() -> Change[bool] | bool:
            block = view.blocks.get(number)
            if block is None or block.entry is None or number >= view.head.block:
                return False
            if block.freed != block.all:
                return False
            assert block.freed_entry is not None
            compare = [unchanged(block.entry), unchanged(block.freed_entry)]
            if len(block.later) > _MOST_OPS:  # more than one transaction can delete
                some = list(block.later)[:_MOST_OPS]
                return Change(compare, [Delete(keys.fields(number, one)) for one in some], True)
            parts = view.parts(block)
            then: list[Op] = [Delete(keys.block(number)), *(Delete(key) for key in parts)]
            then.append(put(keys.done(number), done(Block(samples=tuple(block.samples)))))
            too_many = max(0, len(view.done) + 1 - self.remember)
            then += [Delete(keys.done(old)) for old in list(view.done)[: min(10, too_many)]]
            return Change(compare, then, False)

        while await desk.commit(decide, desk.deadline()):
            pass

    async def tidy(self) -> None:
        """Look at everything: what those who died in the middle of something have left."""
        desk = self._desk
        await self.free(list(desk.view.blocks))
        for key in desk.view.leftovers()[:_MOST_OPS]:
            await desk.runtime.ledger.txn([], [Delete(key)], [])
        await self._strays()
        await self._orphans()
        await desk.store.atrim()

    async def _strays(self) -> None:
        """Release claims of this life that nobody here has: their answers were lost."""
        blocks = self._desk.view.blocks
        for number, task in [(n, name) for n, block in blocks.items() for name in block.tasks]:
            await self._release(number, task)

    async def _release(self, number: int, task: str) -> None:
        desk = self._desk

        def decide() -> Change[None] | None:
            block = desk.view.blocks.get(number)
            there = block.task(task) if block is not None else None
            if there is None or there.entry is None:
                return None
            state = there.state
            for claim in state.claims:
                if claim.owner == desk.member and claim.id not in desk.held:
                    state = desk.plan.released(state, claim.id, mask(claim.mask))
            if state is there.state:
                return None
            op = put(desk.keys.state(number, task), state, over=there.entry)
            return Change([unchanged(there.entry)], [op], None)

        await desk.commit(decide, desk.deadline())

    async def _orphans(self) -> None:
        """Delete payloads that a member put and, being dead, can never record.

        In this order: find the payloads, then come to a view that is newer than that. Whoever is
        not a member there had joined before it put them, so it has left; and what it recorded
        before it left is in the view.
        """
        desk, place = self._desk, self._desk.keys.place
        found = [one async for one in desk.store.ascan(f"{place}/")]
        if not found:
            return
        barrier = put(desk.keys.barrier, Record())
        txn = await desk.runtime.ledger.txn([], [barrier], [])
        await desk.at_least(txn.revision, desk.deadline())
        known = {
            (ref.key, ref.generation)
            for block in desk.view.blocks.values()
            for at in bits(block.all & ~block.freed)
            for ref in block.refs(at)
        }
        gone = [
            Ref(one.key, one.generation, 0, one.nbytes)
            for one in found
            if (one.key, one.generation) not in known
            and one.key.removeprefix(f"{place}/").partition("/")[0] not in desk.view.members
        ]
        if gone:
            await desk.store.adelete(gone)
