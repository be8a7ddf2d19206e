"""What a protocol's shell may use of the world: its clock, its luck and the ledger.

Shells take a `Runtime` and nothing else, so the same shell runs in production and in the
simulator. Both run asyncio's own tasks, so events, queues and time-outs of asyncio may be
used too; threads, sockets, files and the time module may not.
"""

import asyncio
import random
import time
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from holdfast.ledger.base import Ledger

__all__ = ["LiveRuntime", "Runtime"]

T = TypeVar("T")


class Runtime(Protocol):
    """The world as one process sees it."""

    @property
    def ledger(self) -> Ledger:
        """The ledger as this process reaches it."""

    @property
    def random(self) -> random.Random:
        """Randomness that a simulation can repeat."""

    def now(self) -> float:
        """Seconds of this process's own monotonic clock. Clocks of two processes differ."""

    async def sleep(self, seconds: float) -> None:
        """Wait, by this process's own clock."""

    def spawn(self, work: Coroutine[Any, Any, T], *, name: str) -> "asyncio.Task[T]":
        """Start a task. Whoever starts it keeps it and ends it."""


class LiveRuntime:
    """The real world."""

    def __init__(self, ledger: Ledger, *, seed: int | None = None) -> None:
        self.ledger = ledger
        self.random = random.Random(seed)

    def now(self) -> float:
        """Seconds of a clock that never goes back, and goes on while the machine sleeps.

        Leases on sqlite are counted by the same clock: whoever was asleep has lost them.
        """
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    async def sleep(self, seconds: float) -> None:
        """Wait in this event loop."""
        await asyncio.sleep(seconds)

    def spawn(self, work: Coroutine[Any, Any, T], *, name: str) -> "asyncio.Task[T]":
        """Start a task of this event loop."""
        return asyncio.create_task(work, name=name)
