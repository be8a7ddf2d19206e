"""Trainers of one job that take over from each other, whether the other one lives or not."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.errors import Fenced
from holdfast.jobs.policy import Policy
from holdfast.ledger.types import Put, absent, unchanged, value_is
from holdfast.retry import AGAIN
from holdfast.sim.net import Handler
from holdfast.sim.protocols.operations.toy import ToyCompute, ToySegments, ToyVault
from holdfast.sim.world import Node
from holdfast.trainer.records import Keys
from holdfast.trainer.trainer import Trainer

__all__ = ["HASTY", "Handler", "Trainers"]

EPOCH = "/epoch"
HASTY = Policy(
    gap_s=400.0,
    checkpoint_ops=3,
    checkpoint_s=4.0,
    keep_results=4,
    result_s=2000.0,
    upkeep_s=5.0,
    poison_deaths=50,
)
"""Much is checkpointed and forgotten in a short time."""

Answers = Callable[[Node, Trainer], Handler]


@dataclass
class Trainers:
    """What they are made of, and the files that outlive them.

    Unless they are `guarded`, they do not compare which of them is the job's incarnation.
    """

    make: Callable[..., Trainer]
    keys: Keys
    compute: type[ToyCompute]
    vault: type[ToyVault]
    policy: Policy
    guarded: bool
    files: dict[tuple[int, int], bytes] = field(default_factory=dict)

    async def take_over(self, node: Node, address: str, answers: Answers) -> None:
        """Take over again and again; when all faults are over, only the first trainer does."""
        world, is_first = node.world, node.name == "n0"
        while not world.healed or is_first:
            if not world.healed and not (is_first and node.random.random() < 0.5):
                await node.sleep(node.random.random() * 40)
            with contextlib.suppress(Fenced, *AGAIN):
                await self._incarnate(node, address, answers)
            if world.healed:
                # Twins that take over from each other all the time would never get on.
                await node.sleep(20.0 + node.random.random() * 60)

    async def _incarnate(self, node: Node, address: str, answers: Answers) -> None:
        """Become the job's present incarnation, and serve until somebody else is."""
        entry = await node.ledger.get(EPOCH)
        epoch = int(entry.value) + 1 if entry else 1
        held = unchanged(entry) if entry else absent(EPOCH)
        txn = await node.ledger.txn([held], [Put(EPOCH, b"%d" % epoch)])
        if not txn.succeeded:
            return
        trainer = await self._begin(node, epoch)
        async with node.net.listening(address, answers(node, trainer)):
            await trainer.run()

    async def _begin(self, node: Node, epoch: int) -> Trainer:
        trainer = self.make(
            node,
            self.keys,
            [value_is(EPOCH, b"%d" % epoch)] if self.guarded else [],
            compute=self.compute(node),
            segments=lambda term: ToySegments(self.files, term),
            vault=lambda journal: self.vault(node, lambda: journal.guards),
            wall=lambda: 1e9 + node.now(),
            policy=self.policy,
        )
        await trainer.begin(epoch, by=f"{node.name} {node.random.random()}")
        return trainer
