"""The event loop: uvloop where it is installed, asyncio's own otherwise."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import TypeVar

__all__ = ["loop_factory", "run"]

T = TypeVar("T")


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """What makes the fastest event loop that there is here."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def run(main: Coroutine[object, object, T]) -> T:
    """Run a program on it."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(main)
