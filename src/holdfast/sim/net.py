"""Calls between simulated processes: a request travels, is handled, and its answer travels back.

An address belongs to whoever listens there now: when a process is dead, or has stopped
listening, another may take its place, as with ports. A call to nobody is refused. A request
that was lost, or whose answer was, leaves its caller waiting until its own time limit; it may
have been handled, may be handled much later, and may arrive twice.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from holdfast.errors import Unavailable, UnknownOutcome
from holdfast.sim.protocol import Violation

if TYPE_CHECKING:
    from holdfast.sim.world import Node

__all__ = ["Handler", "SimNet"]

Handler = Callable[[Any], Coroutine[Any, Any, Any]]


class SimNet:
    """One process's way to the others."""

    def __init__(self, node: "Node") -> None:
        self._node = node
        self._world = node.world

    def _who(self, address: str) -> "tuple[Node, Handler] | None":
        """Whoever listens at an address and lives."""
        there = self._world.ports.get(address)
        return None if there is None or there[0].dead else there

    def listen(self, address: str, handler: Handler) -> None:
        """Handle what is sent to this address, which must be free."""
        assert self.is_free(address), f"{address} is taken"
        self._world.ports[address] = (self._node, handler)

    def close(self, address: str) -> None:
        """Listen there no more."""
        if self._world.ports.get(address, (None,))[0] is self._node:
            del self._world.ports[address]

    @contextlib.asynccontextmanager
    async def listening(
        self, address: str, handler: Handler, *, look_s: float = 1.0
    ) -> AsyncIterator[None]:
        """Listen there, once it is free: a twin may have it."""
        while not self.is_free(address):
            await self._node.sleep(look_s)
        self.listen(address, handler)
        try:
            yield
        finally:
            self.close(address)

    def is_free(self, address: str) -> bool:
        """Whether nobody listens there."""
        return self._who(address) is None

    async def call(self, address: str, request: Any, timeout_s: float) -> Any:
        """Send a request and wait for its answer.

        `Unavailable`: nobody was there. `UnknownOutcome`: it was sent, and no answer came.
        """
        node, world = self._node, self._world
        fault = await world.contact(node, "net.sent")
        kind = fault.kind if fault else ""
        answer: asyncio.Future[Any] = world.loop.create_future()
        if kind == "late":
            assert fault is not None
            world.later(fault.amount, self._arrive, address, request, None)
        elif kind != "lose_call":
            heard = None if kind == "lose_answer" else answer
            world.later(node.delay_s(), self._arrive, address, request, heard)
        if kind == "repeat":
            assert fault is not None
            world.later(node.delay_s() + fault.amount, self._arrive, address, request, None)
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise UnknownOutcome(f"no answer from {address} within {timeout_s} s") from None
        finally:
            await world.contact(node, "net.answered")

    def _arrive(self, address: str, request: Any, answer: "asyncio.Future[Any] | None") -> None:
        """The request is there: its handler runs in the process that listens."""
        there = self._who(address)
        if there is None:
            self._back(answer, Unavailable(f"nobody listens at {address}"))
            return
        target, handler = there

        def begin() -> None:
            task = target.spawn(handler(request), name=f"{target.name} handles")
            task.add_done_callback(ended)

        def ended(task: "asyncio.Task[Any]") -> None:
            error = None if task.cancelled() else task.exception()
            if isinstance(error, Violation):
                self._world.fail(error)
            elif error is None and not task.cancelled():
                self._back(answer, task.result())

        self._world.loop.call_soon(begin, context=target.context)

    def _back(self, answer: "asyncio.Future[Any] | None", result: Any) -> None:
        """An answer, or that there is none, travels back to the caller."""
        if answer is None:
            return

        def hear() -> None:
            if answer.done():
                return
            if isinstance(result, Exception):
                answer.set_exception(result)
            else:
                answer.set_result(result)

        node = self._node
        self._world.loop.call_later(node.delay_s(), hear, context=node.context)
