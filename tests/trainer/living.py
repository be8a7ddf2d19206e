"""A trainer on a ledger in memory, with models that are nothing but their history."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from holdfast import ledger as ledgers
from holdfast.jobs.policy import Policy
from holdfast.ledger import Ledger
from holdfast.ledger.runtime import LiveRuntime
from holdfast.sim.protocols.operations.toy import ToyCompute, ToySegments, ToyVault
from holdfast.trainer import ops
from holdfast.trainer.core import Core
from holdfast.trainer.records import Keys
from holdfast.trainer.trainer import Trainer

__all__ = ["KEYS", "STEP", "Slow", "begin_model", "living", "running", "step"]

KEYS = Keys("r", "x", "j")
STEP = ops.OptimStep()


class Prompt(LiveRuntime):
    """For models and a vault that take no time."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


class Slow(ToyCompute):
    """Begins to compute, and goes on when it may."""

    def __init__(self, runtime: LiveRuntime) -> None:
        super().__init__(runtime)  # type: ignore[arg-type]  # a runtime is all that it needs
        self.begun, self.may_end = asyncio.Event(), asyncio.Event()

    async def apply(
        self, model: str, number: int, op: ops.ForwardBackward | ops.OptimStep
    ) -> ops.Outcome:
        self.begun.set()
        await self.may_end.wait()
        return await super().apply(model, number, op)


@contextlib.asynccontextmanager
async def living(
    ledger: Ledger | None = None, *, term: int = 1, **policy: float
) -> AsyncIterator[tuple[Trainer, Slow]]:
    """A trainer that carries out, and looks after things only when it is told to."""
    async with contextlib.AsyncExitStack() as stack:
        opened = ledger
        if opened is None:
            opened = await stack.enter_async_context(ledgers.open("memory:"))
        prompt = Prompt(opened, seed=term)
        compute = Slow(prompt)
        trainer = Trainer(
            LiveRuntime(opened, seed=term),
            KEYS,
            [],
            compute=compute,
            segments=lambda term: ToySegments({}, term),
            vault=lambda journal: ToyVault(prompt, lambda: journal.guards),  # type: ignore[arg-type]
            wall=time.time,
            policy=Policy(**{"upkeep_s": 3600, **policy}),  # type: ignore[arg-type]
        )
        await stack.enter_async_context(running(trainer, term))
        yield trainer, compute


@contextlib.asynccontextmanager
async def running(trainer: Trainer, epoch: int) -> "AsyncIterator[asyncio.Task[None]]":
    """Take over, and work until the end of the test, which has a limit."""
    await trainer.begin(epoch, by=f"me {epoch}")
    work = asyncio.create_task(trainer.run())
    try:
        async with asyncio.timeout(60):
            yield work
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
