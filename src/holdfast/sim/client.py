"""The ledger as a simulated process reaches it: slow, lossy, and sometimes cut off.

A call travels to the store, takes effect there in one moment, and its answer travels
back. Each way takes a random time; faults lose the call or the answer, or deliver the call
twice. The store itself is `holdfast.ledger.mvcc`, the same code that `memory:` runs.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from holdfast.errors import HoldfastError, Unavailable, UnknownOutcome
from holdfast.ledger.base import Ledger, Watch
from holdfast.ledger.mvcc import Store
from holdfast.ledger.types import (
    Batch,
    Compare,
    Entry,
    Event,
    Lease,
    LeaseInfo,
    Op,
    Page,
    Txn,
    writes,
)
from holdfast.sim.faults import Fault
from holdfast.sim.times import TIMES

if TYPE_CHECKING:
    from holdfast.sim.world import Node

__all__ = ["SimLedger"]

T = TypeVar("T")

_NO_FAULT = Fault("", 0, "", 0.0)


class SimLedger(Ledger):
    """One process's way to the ledger."""

    def __init__(self, node: "Node") -> None:
        self._node = node

    async def start(self) -> None:
        """The way is always there; it may be cut."""

    async def close(self) -> None:
        """Nothing is held."""

    async def _call(
        self, kind: str, act: Callable[[Store, float], T], *, writing: bool = False
    ) -> T:
        node, world = self._node, self._node.world
        fault = await world.contact(node, f"{kind}.sent")
        answer: asyncio.Future[T] = world.loop.create_future()
        call = _Call(node, kind, act, fault or _NO_FAULT, writing, answer)
        call.send()
        try:
            result = await answer
        except HoldfastError:
            await world.contact(node, f"{kind}.answered")
            raise
        await world.contact(node, f"{kind}.answered")
        return result

    async def _get(self, key: str) -> Entry | None:
        return await self._call("get", lambda store, _: store.get(key))

    async def _page(self, prefix: str, after: str, limit: int, revision: int) -> Page:
        return await self._call(
            "range", lambda store, _: store.page(prefix, after, limit, revision)
        )

    async def _txn(
        self, compare: Sequence[Compare], then: Sequence[Op], otherwise: Sequence[Op]
    ) -> Txn:
        return await self._call(
            "txn",
            lambda store, _: store.txn(compare, then, otherwise),
            writing=writes(then) or writes(otherwise),
        )

    async def _grant(self, ttl_s: float) -> Lease:
        def grant(store: Store, now: float) -> Lease:
            lease = Lease(store.grant(ttl_s, now), ttl_s)
            self._node.leases.add(lease.id)
            return lease

        return await self._call("grant", grant, writing=True)

    async def keep_alive(self, lease: int) -> float:
        """See `Ledger.keep_alive`."""
        return await self._call("keep_alive", lambda store, now: store.keep_alive(lease, now))

    async def revoke(self, lease: int) -> None:
        """See `Ledger.revoke`."""
        await self._call("revoke", lambda store, _: store.revoke(lease))

    async def lease_info(self, lease: int) -> LeaseInfo:
        """See `Ledger.lease_info`."""
        return await self._call("get", lambda store, now: store.lease_info(lease, now))

    async def leases(self) -> tuple[int, ...]:
        """See `Ledger.leases`."""
        return await self._call("range", lambda store, _: store.leases())

    async def compact(self, revision: int) -> None:
        """See `Ledger.compact`."""
        await self._call("get", lambda store, _: store.compact(revision))

    def _watch(self, prefix: str, start: int) -> Watch:
        return _SimWatch(self._node, prefix, start)


@dataclass
class _Call(Generic[T]):
    """A call on its way."""

    node: "Node"
    kind: str
    act: Callable[[Store, float], T]
    fault: Fault
    writing: bool
    answer: "asyncio.Future[T]"

    def send(self) -> None:
        """Put the call on its way, if there is a way."""
        if self.node.is_cut():
            error = Unavailable(f"{self.kind}: no way to the ledger")
            self._later(TIMES.ledger_call_s, self._fail, error)
        elif self.fault.kind == "lose_call":
            self._lose()
        elif self.fault.kind == "late":
            self._lose()
            self.node.world.later(self.fault.amount, self._arrive)
        else:
            self.node.world.later(self.node.delay_s(), self._arrive)

    def _arrive(self) -> None:
        """The call is at the ledger and takes effect, whatever became of the caller."""
        result = self._take_effect()
        if self.fault.kind == "repeat":
            if self.fault.amount:
                self.node.world.later(self.fault.amount, self._take_effect)
            else:
                result = self._take_effect()  # the second answer is the one that is heard
        if self.fault.kind == "lose_answer":
            self._lose()
        else:
            self._later(self.node.delay_s(), self._hear, result)

    def _take_effect(self) -> T | HoldfastError:
        world = self.node.world
        now = world.loop.time()
        world.store.expire(now)
        try:
            return self.act(world.store, now)
        except HoldfastError as error:
            return error
        finally:
            world.changed()

    def _hear(self, result: T | HoldfastError) -> None:
        """The answer is back at the caller, unless it is cut off by now."""
        if self.node.is_cut():
            self._lose()
        elif isinstance(result, HoldfastError):
            self._fail(result)
        elif not self.answer.done():  # else the caller has given up on it
            self.answer.set_result(result)

    def _lose(self) -> None:
        """Tell the caller, after its time-out, that no answer came."""
        what = f"no answer to {self.kind} within {TIMES.ledger_call_s} s"
        error = UnknownOutcome(what) if self.writing else Unavailable(what)
        self._later(TIMES.ledger_call_s, self._fail, error)

    def _fail(self, error: HoldfastError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)

    def _later(self, delay_s: float, act: Callable[..., object], *args: object) -> None:
        """Something that happens at the caller's side: not while it hangs."""
        self.node.world.loop.call_later(delay_s, act, *args, context=self.node.context)


class _SimWatch(Watch):
    """Events arrive late, in order, and not at all while the process is cut off."""

    def __init__(self, node: "Node", prefix: str, start: int) -> None:
        self._node = node
        self._prefix = prefix
        self._next = start
        self._ready: deque[Batch] = deque()
        self._error: HoldfastError | None = None
        self._arrived = asyncio.Event()
        self._travelling = False
        self._closed = False
        node.world.listen(self._on_change)
        self._on_change()

    def _on_change(self) -> None:
        if not self._travelling:
            self._travelling = True
            self._node.world.later(self._node.delay_s(), self._arrive)

    def _arrive(self) -> None:
        self._travelling = False
        node = self._node
        if self._closed or node.dead:
            node.world.unlisten(self._on_change)
            return
        if node.is_cut():
            self._travelling = True
            node.world.later(node.cut_until - node.world.loop.time() + 0.01, self._arrive)
            return
        try:
            batches = node.world.store.changes(self._prefix, self._next)
        except HoldfastError as error:
            self._error = error
        else:
            self._ready.extend(map(_forgetful, batches) if node.world.seed % 2 else batches)
            self._next = node.world.store.revision + 1
        if self._ready or self._error:
            node.context.run(self._arrived.set)

    async def __anext__(self) -> Batch:
        while not self._ready:
            if self._closed:
                raise StopAsyncIteration
            if self._error is not None:
                raise self._error
            self._arrived.clear()
            await self._arrived.wait()
        fault = await self._node.world.contact(self._node, "watch.event")
        if fault is not None:
            await asyncio.sleep(fault.amount)
        return self._ready.popleft()

    async def aclose(self) -> None:
        self._closed = True
        self._node.world.unlisten(self._on_change)
        self._arrived.set()


def _forgetful(batch: Batch) -> Batch:
    """A back end may no longer know what a key was before."""
    return Batch(
        batch.revision, tuple(Event(event.key, event.entry, None) for event in batch.events)
    )
