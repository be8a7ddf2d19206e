"""A trainer on a ledger in memory, with models that are nothing but their history.

    async with living(max_models=2) as there:
        model, _ = await there.model()
        outcome = await there.do(model, STEP)

What its compute or its vault is told to fail with (`trouble`) it fails with.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import torch

from holdfast import ledger as ledgers
from holdfast.jobs.policy import Policy
from holdfast.ledger import Ledger
from holdfast.ledger.runtime import LiveRuntime
from holdfast.sim.protocols.operations.toy import ToyCompute, ToySegments, ToyVault
from holdfast.trainer import ops
from holdfast.trainer.core import Core
from holdfast.trainer.journal import Journal
from holdfast.trainer.records import Keys
from holdfast.trainer.seams import Kept, Snapshot, Vault
from holdfast.trainer.state import Pending
from holdfast.trainer.trainer import Trainer

__all__ = ["KEYS", "STEP", "Living", "begin_model", "living", "step"]

KEYS = Keys("r", "x", "j")
STEP = ops.OptimStep()

MakeVault = Callable[[LiveRuntime, Journal], Vault]


class Prompt(LiveRuntime):
    """For models and a vault that take no time."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


class Troubled:
    """What it is told to fails."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.trouble: dict[str, Exception] = {}

    def _fail(self, call: str) -> None:
        if call in self.trouble:
            raise self.trouble[call]


class Compute(Troubled, ToyCompute):
    """Goes on when it may; its snapshots have something that can be kept on a disk."""

    def __init__(self, runtime: LiveRuntime) -> None:
        super().__init__(runtime)
        self.begun, self.may_end = asyncio.Event(), asyncio.Event()
        self.may_end.set()

    async def apply(
        self, model: str, number: int, op: ops.ForwardBackward | ops.OptimStep
    ) -> ops.Outcome:
        self._fail("apply")
        self.begun.set()
        await self.may_end.wait()
        done = await super().apply(model, number, op)
        assert isinstance(done, ops.Stepped)
        return ops.Stepped(metrics={**done.metrics, "count": len(self._models[model])})

    async def capture(self, model: str) -> Snapshot:
        self._fail("capture")
        facts = (await super().capture(model)).facts
        return Snapshot({"w": torch.zeros(1)}, {"kind": "state", **facts}, {})

    async def export(self, model: str) -> Snapshot:
        self._fail("export")
        return await self.capture(model)

    async def sample(self, key: str, *given: object) -> ops.Outcome:
        self._fail("sample")
        return await super().sample(key, *given)


class MemoryVault(Troubled, ToyVault):
    """A vault in the ledger. `checkpoint` is trouble with the checkpoints of models alone."""

    async def save(self, channel: str, version: int, snapshot: Snapshot, keep: int) -> Kept:
        self._fail("save")
        return await super().save(channel, version, snapshot, keep)

    async def load(self, channel: str, version: int) -> Snapshot:
        self._fail("load")
        if channel.endswith(".state"):
            self._fail("checkpoint")
        return await super().load(channel, version)

    async def drop(self, channel: str, version: int) -> None:
        self._fail("drop")


class Living:
    """One life of a trainer, and a client's way to it."""

    def __init__(self, trainer: Trainer, compute: Compute, running: "asyncio.Task[None]") -> None:
        self.trainer, self.core, self.compute = trainer, trainer.core, compute
        self.upkeep = trainer.upkeep
        self.running = running
        self.numbers: dict[str, int] = {}
        self.session = ""

    @property
    def vault(self) -> Any:
        return self.core.vault

    @property
    def ledger(self) -> Ledger:
        return self.core.runtime.ledger

    async def model(self, load: str = "") -> tuple[str, ops.Outcome]:
        """A new model, and what came of its creation."""
        self.session = self.session or await self.core.create_session()
        wanted = ops.LoadWeights(path=load) if load else None
        op = ops.CreateModel(session=self.session, base="b", load=wanted)
        request, name = await self.core.create_model(self.session, len(self.core.lines), op)
        self.numbers[name] = 0
        return name, await self.hear(request)

    async def hear(self, request: str) -> ops.Outcome:
        """Wait for a result, or for the end of the trainer."""
        hearing = asyncio.create_task(self.core.retrieve(request, 20))
        await asyncio.wait([hearing, self.running], return_when=asyncio.FIRST_COMPLETED)
        assert not self.running.done(), f"the trainer ended: {self.running.exception()!r}"
        outcome = await hearing
        assert not isinstance(outcome, Pending), outcome
        return outcome

    async def do(self, line: str, op: ops.Op) -> ops.Outcome:
        """The next operation of a line."""
        self.numbers[line] = self.numbers.get(line, 0) + 1
        return await self.hear(await self.core.submit(line, self.numbers[line], op))

    async def save(self, model: str, name: str) -> str:
        """Save weights and optimizer; the path."""
        saved = await self.do(model, ops.SaveWeights(name=name))
        assert isinstance(saved, ops.Saved), saved
        return saved.path

    async def sampler(self, path: str) -> str:
        """A sampling session."""
        return await self.core.create_sampler(self.session, len(self.core.lines), "", path)


@contextlib.asynccontextmanager
async def living(
    ledger: Ledger | None = None,
    *,
    vault: MakeVault | None = None,
    files: dict[tuple[int, int], bytes] | None = None,
    epoch: int = 1,
    keys: Keys = KEYS,
    **policy: float,
) -> AsyncIterator[Living]:
    """A trainer that carries out, and looks after things only when it is told to."""
    async with contextlib.AsyncExitStack() as stack:
        opened = ledger
        if opened is None:
            opened = await stack.enter_async_context(ledgers.open("memory:"))
        prompt = Prompt(opened, seed=epoch)
        compute, kept = Compute(prompt), {} if files is None else files

        def in_memory(_: LiveRuntime, journal: Journal) -> Vault:
            return MemoryVault(prompt, lambda: journal.guards)

        trainer = Trainer(
            LiveRuntime(opened, seed=epoch),
            keys,
            [],
            compute=compute,
            segments=lambda term: ToySegments(kept, term),
            vault=lambda journal: (vault or in_memory)(prompt, journal),
            wall=time.time,
            policy=Policy(**{"upkeep_s": 3600, **policy}),  # type: ignore[arg-type]
        )
        await trainer.begin(epoch, by=f"me {epoch}")
        work = asyncio.create_task(trainer.run())
        try:
            async with asyncio.timeout(60):
                yield Living(trainer, compute, work)
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)


async def begin_model(core: Core, session: str = "") -> str:
    """A model that has been created, in this session or in one of its own."""
    session = session or await core.create_session()
    request, model = await core.create_model(session, 0, ops.CreateModel(session="", base="b"))
    assert isinstance(await core.retrieve(request, 10), ops.Created)
    return model


async def step(core: Core, model: str, number: int) -> float:
    """Carry out a step; a number that stands for everything that was done to the model."""
    outcome = await core.retrieve(await core.submit(model, number, STEP), 10)
    assert isinstance(outcome, ops.Stepped), outcome
    return outcome.metrics["digest"]
