"""A replica as a process of its own: `HOLDFAST_SETTINGS=… python -m holdfast.rollout.process`.

The settings are a JSON object (`ReplicaSettings`). It waits for the model's channel, takes a
seat there with its address, and serves until a signal comes.
"""

import asyncio
import contextlib
import socket
from pathlib import Path

import msgspec

from holdfast import ledger, transfer
from holdfast.jobs.serving import log_events, take_settings, until_signal
from holdfast.ledger.records import Record, load
from holdfast.proc.asgi import serve_asgi
from holdfast.proc.supervisor import as_program
from holdfast.rollout.app import App
from holdfast.rollout.asks import QUEUE, TASKS
from holdfast.rollout.environments import Judge
from holdfast.rollout.replica import Replica
from holdfast.rollout.sampler import Sampler
from holdfast.timeouts import DEFAULTS
from holdfast.transfer.queue import Queue
from holdfast.weights import Subscriber

__all__ = ["ReplicaSettings", "main"]

_HOST = "127.0.0.1"


class ReplicaSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a replica needs to know."""

    run: str
    ledger: str
    name: str
    folder: str
    store: str
    model: str
    """The directory of the base model."""
    weights: str
    """Where the channel's folder is."""
    channel_key: str
    """Where in the ledger the channel's name will stand, as a field of that name."""
    token: str
    environment: str
    options: dict[str, object] = {}
    limit_s: float = 10.0
    lora_rank: int = 0
    max_tokens: int = 0
    vllm: dict[str, object] | None = None
    """How a vLLM server is started. None: our own engine, in this process."""


async def serve(settings: ReplicaSettings) -> None:
    """Be a replica until this is cancelled."""
    async with contextlib.AsyncExitStack() as stack:
        sampler = await stack.enter_async_context(_sampler(settings))
        listening = stack.enter_context(socket.create_server((_HOST, 0)))
        address = f"http://{_HOST}:{listening.getsockname()[1]}"
        opened = await stack.enter_async_context(ledger.open(settings.ledger))
        store = stack.enter_context(transfer.connect(settings.store))
        queue = await stack.enter_async_context(
            Queue(store, opened, QUEUE, TASKS, run=settings.run, member=settings.name)
        )
        judge = Judge(settings.environment, settings.options, limit_s=settings.limit_s)
        stack.push_async_callback(judge.close)
        limits = await judge.limits()
        subscriber = await stack.enter_async_context(
            Subscriber(
                settings.weights,
                opened,
                await _channel(opened, settings.channel_key),
                settings.name,
                needs="latest",
                address=address,
                run=settings.run,
                lease_s=DEFAULTS.replica_lease_s,
            )
        )
        replica = Replica(
            settings.name,
            sampler,
            subscriber,
            queue,
            store,
            judge,
            max_tokens=settings.max_tokens or limits.max_tokens,
            max_turns=limits.max_turns,
        )
        app = App(replica, settings.token)
        async with serve_asgi(app, listening=listening) as (_, serving):
            await asyncio.shield(serving)  # it ends when this is left, not before


def _sampler(settings: ReplicaSettings) -> Sampler:
    base = Path(settings.model)
    if settings.vllm is not None:
        from holdfast.contrib.vllm.sampler import VllmSampler, VllmSettings

        log = Path(settings.folder) / "logs" / f"{settings.name}.vllm.log"
        return VllmSampler(base, msgspec.convert(settings.vllm, VllmSettings), log)
    from holdfast.rollout.own_sampler import OwnSampler  # torch, which takes seconds

    return OwnSampler(base, lora_rank=settings.lora_rank)


class _Named(Record, frozen=True):
    channel: str = ""


async def _channel(opened: ledger.Ledger, key: str) -> str:
    """Wait for the channel's name: the model may not be there yet."""
    while True:
        there = await load(opened, key, _Named)
        if there is not None:
            return there.record.channel
        await asyncio.sleep(DEFAULTS.process_look_s)


def main() -> None:
    """Read the settings and serve."""
    settings = take_settings(ReplicaSettings)
    log_events(settings.folder, settings.name)
    with as_program():
        asyncio.run(until_signal(serve(settings)))


if __name__ == "__main__":
    main()
