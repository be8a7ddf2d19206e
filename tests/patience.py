"""How long tests wait before they call something a hang, and how they wait."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any

HANG_S = 60.0
"""Longer than anything takes here on a busy machine with few processors. It tells work from a
hang, and says nothing about speed: benchmarks do."""
_LOOK_S = 0.01

Told = str | Callable[[], str]
"""What is waited for, in words, or what can be said of it when it has not come."""


def until(test: Callable[[], Any], what: Told = "it", limit_s: float = HANG_S) -> Any:
    """Wait for something that others bring about; returns what the test found."""
    deadline = time.monotonic() + limit_s
    while not (found := test()):
        assert time.monotonic() < deadline, _missing(what, limit_s)
        time.sleep(_LOOK_S)
    return found


async def auntil(test: Callable[[], Any], what: Told = "it", limit_s: float = HANG_S) -> Any:
    """The same in an event loop. The test may be asynchronous."""
    deadline = time.monotonic() + limit_s
    while True:
        found = test()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return found
        assert time.monotonic() < deadline, _missing(what, limit_s)
        await asyncio.sleep(_LOOK_S)


async def gives(work: Awaitable[Any], wanted: object) -> bool:
    """Whether this comes to just that: to be waited for with `auntil`."""
    return bool(await work == wanted)


def _missing(what: Told, limit_s: float) -> str:
    return f"not within {limit_s:g} s: {what if isinstance(what, str) else what()}"
