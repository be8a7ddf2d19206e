"""The orchestrator as a process: `python -m holdfast.run.orchestrator_process`.

It ends with 0 when the run is done, and with anything else when it is to be started again.
"""

import asyncio
import contextlib
import signal
import sys
from pathlib import Path

import msgspec

from holdfast import ledger, transfer
from holdfast.client import Client, Target
from holdfast.errors import HoldfastError
from holdfast.jobs.serving import log_events, take_settings
from holdfast.ledger.runtime import LiveRuntime
from holdfast.rollout.asks import QUEUE, TASKS
from holdfast.run import plan
from holdfast.run.config import Config
from holdfast.run.folder import ACCOUNT, BASE, JOB, Folder
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
    """What an orchestrator needs to know: everything else is in the run's folder."""

    folder: str
    gateway: str


async def orchestrate(folder: Folder, gateway: str) -> None:
    """Be the orchestrator until the run is done."""
    config, run, known = folder.config, folder.run, folder.secrets()
    target = Target.of(gateway, api_key=known.key, account=ACCOUNT, job=JOB)
    lease_s = DEFAULTS.orchestrator_lease_s
    async with contextlib.AsyncExitStack() as stack:
        opened = await stack.enter_async_context(ledger.open(folder.ledger))
        runtime = LiveRuntime(opened)
        steps = Steps(runtime, run)
        metrics = Metrics(folder.path / "metrics.jsonl")
        if await has_ended(steps, metrics):
            return
        store = stack.enter_context(transfer.connect(folder.store))
        queue = await stack.enter_async_context(
            Queue(store, opened, QUEUE, TASKS, run=run, member="orchestrator", lease_s=lease_s)
        )
        client = await stack.enter_async_context(Client(target))
        model = await _model(client, steps, BASE, config)
        book = Channel(folder.weights, opened, model.channel, run=run).book("run")
        pool = await stack.enter_async_context(
            Pool(runtime, book, known.token, patience_s=config.rollout.patience_s)
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


async def _until_signal(folder: Folder, gateway: str) -> None:
    work = asyncio.ensure_future(orchestrate(folder, gateway))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, work.cancel)
    await work


def main() -> None:
    """Read the settings and orchestrate."""
    settings = take_settings(OrchestratorSettings)
    folder = Folder.find(Path(settings.folder))
    log_events(settings.folder, "orchestrator")
    try:
        asyncio.run(_until_signal(folder, settings.gateway))
    except asyncio.CancelledError:
        sys.exit(143)
    except (HoldfastError, ExceptionGroup) as error:
        while isinstance(error, ExceptionGroup):  # groups that were made at once
            error = error.exceptions[0]
        sys.stderr.write(f"holdfast: {type(error).__name__}: {error}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
