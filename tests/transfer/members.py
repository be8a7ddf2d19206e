"""Members of a queue whose transactions a test can hold, lose or follow with something else."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from holdfast.errors import UnknownOutcome
from holdfast.ledger import Ledger, LiveRuntime
from holdfast.transfer import Store
from holdfast.transfer.queue import Item, Queue
from patience import auntil

Opener = Callable[..., Awaitable[Queue]]


async def hang(_: Any) -> None:
    """Wait for ever."""
    await asyncio.Event().wait()


async def lost(_: Any) -> None:
    """Lose the answer."""
    raise UnknownOutcome("the answer was lost")


async def cut_off(work: Awaitable[object]) -> None:
    """Make a call that hangs, and give up on it."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await work


class Gate:
    """A ledger whose next transactions can be held, lost or followed by something else."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.after: list[Callable[[Any], Awaitable[None]]] = []
        """Run one by one, each behind a transaction that is done and not answered yet."""
        self.before_txn: list[Callable[[], Awaitable[None]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)

    async def txn(self, *args: Any) -> Any:
        if self.before_txn:
            await self.before_txn.pop(0)()
        answer = await self._ledger.txn(*args)
        if self.after:
            await self.after.pop(0)(answer)
        return answer


class Runtime(LiveRuntime):
    """A runtime whose clock can be put forward: what is bounded ends at once."""

    ahead_s = 0.0

    def now(self) -> float:
        return super().now() + self.ahead_s


def gate(queue: Queue) -> Gate:
    """The gate between a member and the ledger."""
    found = queue.runtime.ledger
    assert isinstance(found, Gate)
    return found


@contextlib.asynccontextmanager
async def opening(ledger: Ledger, store: Store, name: str) -> AsyncIterator[Opener]:
    """Opens one more member of the same queue, each with a gate of its own."""
    async with contextlib.AsyncExitStack() as stack:

        async def opened(tasks: Any = ("train",), **how: Any) -> Queue:
            runtime = Runtime(Gate(ledger))  # type: ignore[arg-type]
            how = {"lease_s": 5.0, "runtime": runtime, **how}
            return await stack.enter_async_context(Queue(store, ledger, name, tasks, **how))

        yield opened


def items(count: int, *, first: int = 0, **how: Any) -> list[Item]:
    """Samples s0, s1, ..., with their numbers as the field `x`."""
    return [Item(f"s{at}", {"x": at}, **how) for at in range(first, first + count)]


async def end_of(ledger: Ledger, queue: Queue, *, seen: bool = True) -> None:
    """End a member's lease behind its back, and wait until it sees that, unless told."""
    member = queue._desk.member
    await ledger.revoke(int(member.rpartition("-")[2]))
    if seen:
        await auntil(lambda: member not in queue._desk.view.members)
