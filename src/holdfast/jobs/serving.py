"""Serving until a signal comes: what hosts and gateways have in common."""

import asyncio
import contextlib
import gc
import os
import signal
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from holdfast import events
from holdfast.errors import Mistake
from holdfast.files import private_folder

__all__ = ["SETTINGS", "log_events", "take_settings", "until_signal"]

S = TypeVar("S", bound=msgspec.Struct)
SETTINGS = "HOLDFAST_SETTINGS"
"""Settings go through the environment, which others cannot read: a URL may hold a password."""


def take_settings(kind: type[S]) -> S:
    """What this process was given. Its own children do not inherit it."""
    try:
        return msgspec.json.decode(os.environ.pop(SETTINGS), type=kind)
    except KeyError:
        raise Mistake(f"{SETTINGS} is not set: `holdfast serve` starts this process") from None


def log_events(folder: str, name: str, **how: Any) -> None:
    """Begin the event log of the process of that name."""
    log = Path(folder) / "events" / f"{name}.jsonl"
    private_folder(log.parent)
    events.configure(log, process=name, **how)


async def until_signal(*work: Awaitable[object]) -> None:
    """Do some work until SIGTERM or SIGINT comes, or one part of it fails."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    tasks = [asyncio.ensure_future(one) for one in (*work, stop.wait())]
    gc.freeze()  # what was imported stays: collecting it again and again costs pauses
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
