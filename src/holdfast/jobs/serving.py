"""Serving until a signal comes: what hosts and gateways have in common."""

import asyncio
import contextlib
import gc
import signal
from collections.abc import Awaitable

__all__ = ["until_signal"]


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
