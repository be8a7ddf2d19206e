"""Trainers of one job that take over from each other, whether the other one lives or not."""

import contextlib
from collections.abc import Awaitable, Callable

from holdfast.errors import Fenced
from holdfast.ledger.types import Compare, Put, absent, unchanged, value_is
from holdfast.retry import AGAIN
from holdfast.sim.net import Handler
from holdfast.sim.world import Node
from holdfast.trainer.trainer import Trainer

__all__ = ["Handler", "incarnation", "take_over"]

EPOCH = "/epoch"

Begin = Callable[[Node, int], Awaitable[tuple[Trainer, Handler]]]


def incarnation(epoch: int) -> list[Compare]:
    """What holds as long as this is the job's present incarnation."""
    return [value_is(EPOCH, b"%d" % epoch)]


async def take_over(node: Node, address: str, begin: Begin) -> None:
    """Take over again and again; when all faults are over, only the first trainer does."""
    world, is_first = node.world, node.name == "n0"
    while not world.healed or is_first:
        if not world.healed and not (is_first and node.random.random() < 0.5):
            await node.sleep(node.random.random() * 40)
        with contextlib.suppress(Fenced, *AGAIN):
            await _incarnate(node, address, begin)
        if world.healed:
            # Twins that take over from each other all the time would never get on.
            await node.sleep(20.0 + node.random.random() * 60)


async def _incarnate(node: Node, address: str, begin: Begin) -> None:
    """Become the job's present incarnation, and serve until somebody else is."""
    entry = await node.ledger.get(EPOCH)
    epoch = int(entry.value) + 1 if entry else 1
    held = unchanged(entry) if entry else absent(EPOCH)
    txn = await node.ledger.txn([held], [Put(EPOCH, b"%d" % epoch)])
    if not txn.succeeded:
        return
    trainer, handle = await begin(node, epoch)
    while not node.net.is_free(address):  # a twin of ours
        await node.sleep(1.0)
    node.net.listen(address, handle)
    try:
        await trainer.run()
    finally:
        node.net.close(address)
