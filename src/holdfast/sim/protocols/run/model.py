"""A whole run while everything dies: promises 2 to 4 and 7 together.

n0 and n1 are trainers of one job, which take over from each other whether the other lives or
not; n2 and n3 are orchestrators, of which any number may be at work at once; n4 and n5 are
replicas. Orchestrator, step records, queue, client, pool, replica and trainer are production
code; the model is a toy whose weights are its history, and the network and the disk are
simulated. Invariants:

1. what is recorded of a step is written once, and is what a run without faults has: samples,
   versions, numbers, rewards, weights, losses, evaluations;
2. a step is committed when the one before it is done, and done when it is committed and its
   weights are published; no sample is in two steps;
3. a version is published once, with the weights that a run without faults has;
4. a sample is put once, and acknowledged once its step is done, not before;
5. an operation under a number never changes, and is carried out once in effect.

At the end everything is done, `metrics.jsonl` is what it would have been, every sample is
acknowledged, and nothing of it is left in the store.
"""

import functools
import random
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from holdfast.errors import HoldfastError, Mistake, NotFound, Unavailable
from holdfast.ledger import Batch as Change
from holdfast.rollout.asks import QUEUE, TASKS
from holdfast.run.config import Config
from holdfast.run.metrics import Metrics
from holdfast.run.orchestrator import Orchestrator, has_ended
from holdfast.run.orchestrator_process import _model
from holdfast.run.records import StepRecord
from holdfast.run.steps import Steps
from holdfast.sim.protocol import Protocol, Violation
from holdfast.sim.protocols.operations.taking_over import HASTY, Handler, Trainers
from holdfast.sim.protocols.queue import queue_of
from holdfast.sim.protocols.run.parts import Page, SimClient, SimPool, SimReplica
from holdfast.sim.protocols.run.reference import BASE, Reference
from holdfast.sim.protocols.run.toy import Compute, Vault
from holdfast.sim.protocols.run.witness import RUN, TRAINED, Witness
from holdfast.sim.times import TIMES
from holdfast.sim.world import Node, first_of
from holdfast.trainer.service import PREFIX, Request, Service
from holdfast.trainer.trainer import Trainer

__all__ = ["RunProtocol"]

TRAINERS = {"n0": "t0", "n1": "t1"}
ORCHESTRATORS = ("n2", "n3")
REPLICAS = {"n4": "r0", "n5": "r1"}
METRICS = "metrics.jsonl"


@functools.cache
def _config(seed: int, steps: int, lag: int) -> Config:
    return Config.model_validate(
        {
            "steps": steps,
            "seed": seed,
            "rollout": {"replicas": 2, "groups": 2, "samples": 2, "lag": lag},
            "evaluate": {"every": 2, "prompts": 1},
        }
    )


class RunProtocol(Protocol):
    """The sound protocol, with the parts that it is given."""

    nodes = 6
    steps = 1000
    store = True
    net = True
    # Ranges are read by trainers, which have no lease, and by others before they have one. Who
    # reads a queue again after a compaction, or comes to the end, has one: too rare to ask for.
    never = frozenset({("expire", "range.sent"), ("expire", "range.answered")})

    def __init__(
        self,
        orchestrator: type[Orchestrator] = Orchestrator,
        records: type[Steps] = Steps,
        trainer: Callable[..., Trainer] = Trainer,
        ended: Callable[[Steps, Metrics], Awaitable[bool]] = has_ended,
        *,
        guarded: bool = True,
    ) -> None:
        self._orchestrator = orchestrator
        self._records = records
        self._trainers = Trainers(trainer, TRAINED, Compute, Vault, HASTY, guarded)
        self._ended = ended
        self._config = _config(0, 4, 1)
        self._reference = Reference(self._config)
        self._witness = Witness(self._reference)
        self._pages: dict[str, bytes] = {}
        self._lives: list[Node] = []
        self._repaired: set[str] = set()
        self._luck = random.Random(0)

    def prepare(self, seed: int) -> None:
        """Seeds, the number of steps and the lag differ from schedule to schedule."""
        self._config = _config(seed % 97, 2 + seed // 3 % 3, seed % 3)
        self._reference = Reference(self._config)
        self._witness = Witness(self._reference, self._damage)
        self._luck = random.Random(f"values {seed}")

    async def run(self, runtime: Node, name: str) -> None:
        """One process, by its name."""
        if name in TRAINERS:
            await self._trainers.take_over(runtime, TRAINERS[name], self._service)
        elif name in REPLICAS:
            await self._replicate(runtime, REPLICAS[name])
        else:
            await self._orchestrate(runtime, name)

    # ---- a trainer ---------------------------------------------------------------

    def _service(self, node: Node, trainer: Trainer) -> Handler:
        bases: Any = None  # nobody asks what models there are
        hold_s = TIMES.poll_hold_s
        service = Service(trainer.core, trainer.upkeep, bases, store=node.values, hold_s=hold_s)

        async def handle(asked: tuple[str, dict[str, str], bytes]) -> object:
            name, headers, body = asked
            return await service.answer(Request("POST", PREFIX + name, headers, body))

        return handle

    # ---- a replica ---------------------------------------------------------------

    async def _replicate(self, node: Node, address: str) -> None:
        while not node.net.is_free(address):  # a twin of ours
            await node.sleep(5.0)
        async with queue_of(node, QUEUE, TASKS, "replica") as queue:
            replica = SimReplica(node, address, self._records(node, RUN), queue, self._repaired)
            async with node.net.listening(address, replica.answer, look_s=5.0):
                await node.sleep(node.random.random() * 100)
                while self.world.healed:
                    await node.sleep(600.0)
            while replica.is_busy:
                await node.sleep(1.0)
        raise Unavailable(f"{address} makes room for another one")

    # ---- an orchestrator -----------------------------------------------------------

    async def _orchestrate(self, node: Node, name: str) -> None:
        if name != ORCHESTRATORS[0] and not self.world.healed:
            await node.sleep(node.random.random() * 60)
        self._lives.append(node)
        ended = False
        while not (ended and self.world.healed):
            try:
                await self._live(node)
                ended = True
            except (HoldfastError, ExceptionGroup) as raised:
                error = first_of(raised)
                # Not found: by a trainer that has been replaced, and does not know it yet.
                if isinstance(error, Mistake) and not isinstance(error, NotFound):
                    raise Violation(f"{name} is told that it is wrong: {error}") from raised
                told = f"{type(error).__name__}: {error}"
                node.world.note(name, f"ends, and is started again: {told}")
            await node.sleep(20.0 if ended else 1.0)

    async def _live(self, node: Node) -> None:
        """One life, as `orchestrator_process` has it."""
        config, steps = self._config, self._records(node, RUN)
        page: Any = Page(self._pages, METRICS)
        metrics = Metrics(page)
        if await self._ended(steps, metrics):
            return
        async with queue_of(node, QUEUE, TASKS, "orchestrator") as queue:
            client = SimClient(node, sorted(TRAINERS.values()))
            model = await _model(client, steps, BASE, config)
            pool = SimPool(node, sorted(REPLICAS.values()), patience_s=config.rollout.patience_s)
            await self._orchestrator(config, steps, queue, client, pool, model, metrics).run()

    # ---- what is looked at ---------------------------------------------------------

    def observe(self, batch: Change) -> None:
        """Look at every record of the run, of the queue and of the trainer."""
        self._witness.observe(batch)

    def _damage(self, record: StepRecord) -> None:
        """Of a step that is committed a value may flip a bit."""
        key = self._luck.choice(self._witness.refs[self._luck.choice(record.keys)])
        if self._luck.random() < 0.3 and not self.world.healed and self.values.peek(key):
            self.world.note("store", f"{key} flips a bit")
            self.values.flip(key, -1)

    def settled(self) -> bool:
        """Everything is done and on paper, everybody has heard of it, and nothing is left."""
        seen = self._witness
        return (
            "end" in seen.records
            and self.world.healed
            and all(node.dead for node in self._lives)
            and seen.acked == seen.step_of.keys()
            and self._pages.get(METRICS) == self._lines()
            and not self._left()
        )

    def _lines(self) -> bytes:
        return b"".join(msgspec.json.encode(one) + b"\n" for one in self._reference.lines)

    def _left(self) -> list[str]:
        """Values that nobody needs and nobody will delete.

        Whoever put a value may do so again as long as it lives: a call that comes late, a repair
        that is no longer needed. That is deleted when it is gone.
        """
        seen = self._witness
        needed = {ref for one, refs in seen.refs.items() if one not in seen.acked for ref in refs}
        return [
            one.key
            for one in self.values.scan("")
            if one.key not in needed and one.key.split("/")[2] not in seen.members
        ]
