"""The event loop: uvloop where it is installed, asyncio's own otherwise."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import TypeVar

__all__ = ["run"]

T = TypeVar("T")


def run(main: Coroutine[object, object, T]) -> T:
    """Run a program on the fastest event loop that there is here."""
    factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    with contextlib.suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)
