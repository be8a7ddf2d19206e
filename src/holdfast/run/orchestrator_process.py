"""The orchestrator as a process: `python -m holdfast.run.orchestrator_process`.

It ends with 0 when the run is done, and with anything else when it is to be started again.
"""

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import msgspec

from holdfast import events, ledger, transfer
from holdfast.client import Client, Target
from holdfast.errors import HoldfastError
from holdfast.files import private_folder
from holdfast.ledger.runtime import LiveRuntime
from holdfast.rollout.asks import QUEUE, TASKS
from holdfast.run import plan
from holdfast.run.config import Config
from holdfast.run.metrics import Metrics
from holdfast.run.orchestrator import Orchestrator, has_ended
from holdfast.run.pool import Pool
from holdfast.run.records import ModelRecord
from holdfast.run.steps import Steps
from holdfast.timeouts import DEFAULTS
from holdfast.transfer.queue import Queue
from holdfast.weights.channel import Channel

__all__ = ["OrchestratorSettings", "main"]

_MODEL_SEQ = 0


class OrchestratorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an orchestrator needs to know."""

    run: str
    ledger: str
    store: str
    folder: str
    weights: str
    gateway: str
    account: str
    job: str
    key: str
    token: str
    base: str
    """The name of the base model at the trainer."""
    config: dict[str, object]
    lease_s: float = DEFAULTS.orchestrator_lease_s


async def orchestrate(settings: OrchestratorSettings) -> None:
    """Be the orchestrator until the run is done."""
    config = Config.model_validate(settings.config)
    target = Target.of(
        settings.gateway, api_key=settings.key, account=settings.account, job=settings.job
    )
    async with contextlib.AsyncExitStack() as stack:
        opened = await stack.enter_async_context(ledger.open(settings.ledger))
        runtime = LiveRuntime(opened)
        steps = Steps(runtime, settings.run)
        metrics = Metrics(Path(settings.folder) / "metrics.jsonl")
        if await has_ended(steps, metrics):
            return
        store = stack.enter_context(transfer.connect(settings.store))
        queue = await stack.enter_async_context(
            Queue(
                store,
                opened,
                QUEUE,
                TASKS,
                run=settings.run,
                member="orchestrator",
                lease_s=settings.lease_s,
            )
        )
        client = await stack.enter_async_context(Client(target))
        model = await _model(client, steps, settings.base, config)
        book = Channel(settings.weights, opened, model.channel, run=settings.run).book("run")
        pool = await stack.enter_async_context(
            Pool(runtime, book, settings.token, patience_s=config.rollout.patience_s)
        )
        await Orchestrator(config, steps, queue, client, pool, model, metrics).run()


async def _model(client: Client, steps: Steps, base: str, config: Config) -> ModelRecord:
    """The model of this run: made, and its first version published, if that is still to do.

    The session is written down before anything is made in it, so that whoever comes later asks
    for the same model under the same number.
    """
    session_key = f"{steps.keys.model}/session"
    there = await steps.read(session_key, ModelRecord)
    if there is None:
        mine = ModelRecord(session=await client.create_session())
        there, _ = await steps.once(session_key, mine)
    known = await steps.read(steps.keys.model, ModelRecord)
    if known is not None:
        return known
    model = await client.create_model(
        there.session, _MODEL_SEQ, base, lora_config={"rank": config.model.lora_rank}
    )
    future = await client.submit("publish_weights", model, plan.FIRST_PUBLISH, {"version": 0})
    said = await future.result()
    record = ModelRecord(session=there.session, model=model, channel=str(said["channel"]))
    return (await steps.once(steps.keys.model, record))[0]


async def _until_signal(settings: OrchestratorSettings) -> None:
    work = asyncio.ensure_future(orchestrate(settings))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, work.cancel)
    await work


def main() -> None:
    """Read the settings and orchestrate."""
    settings = msgspec.json.decode(os.environ.pop("HOLDFAST_SETTINGS"), type=OrchestratorSettings)
    folder = Path(settings.folder) / "events"
    private_folder(folder)
    events.configure(folder / "orchestrator.jsonl", process="orchestrator")
    try:
        asyncio.run(_until_signal(settings))
    except asyncio.CancelledError:
        sys.exit(143)
    except (HoldfastError, ExceptionGroup) as error:
        while isinstance(error, ExceptionGroup):  # groups that were made at once
            error = error.exceptions[0]
        sys.stderr.write(f"holdfast: {type(error).__name__}: {error}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
