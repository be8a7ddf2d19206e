"""The store of values as a simulated process reaches it.

Every call goes out, takes effect, and is answered, with a contact before and after. A call
may be lost, its answer may be, it may take effect long after its caller has given up, and
it may arrive twice.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from holdfast.errors import Unavailable
from holdfast.retry import Policy
from holdfast.sim.times import TIMES
from holdfast.transfer.store import Store

if TYPE_CHECKING:
    from holdfast.sim.world import Node

__all__ = ["SimStore"]

V = TypeVar("V")

_POLICY = Policy(attempts=6, base_s=0.1, factor=2.0, max_s=2.0, deadline_s=60.0)


class SimStore(Store):
    """The production store; only the way to its back end is simulated."""

    def __init__(self, node: "Node") -> None:
        super().__init__(node.world.values, _POLICY)
        self._node = node
        self.clock = node

    def generation(self) -> int:
        """A number that nobody else draws."""
        return self._node.random.getrandbits(62) + 1

    async def _hop(self, call: Callable[[], V]) -> V:
        node, world = self._node, self._node.world
        fault = await world.contact(node, "store.sent")
        kind = fault.kind if fault is not None else ""
        await asyncio.sleep(node.delay_s())
        if fault is not None and fault.kind in ("late", "repeat"):
            world.later(fault.amount, call)
        if kind not in ("lose_call", "late"):
            answer = call()
        if kind in ("lose_call", "late", "lose_answer"):
            await asyncio.sleep(TIMES.store_call_s)
            raise Unavailable("the store does not answer")
        await asyncio.sleep(node.delay_s())
        await world.contact(node, "store.answered")
        return answer
