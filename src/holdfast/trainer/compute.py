"""Computing with torch, for a core that runs in an event loop: one thread, all ranks.

What changes a model is told to the other ranks first, as one message; then all of them do
it. What only reads (capture, export, sample) is done by rank 0 alone.
"""

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import TypeVar

import msgspec
import safetensors.torch

from holdfast import events
from holdfast.errors import Corrupt, Mistake
from holdfast.trainer import losses, ops
from holdfast.trainer.machine import Machine
from holdfast.trainer.ops import Lora, Op, Outcome
from holdfast.trainer.ranks import Ranks
from holdfast.trainer.seams import Snapshot
from holdfast.trainer.wire.answers import Offer

__all__ = ["TorchCompute", "follow"]

T = TypeVar("T")


class _Order(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What all ranks are to do."""

    kind: str
    model: str = ""
    base: str = ""
    lora: Lora | None = None
    optimizer: bool = False
    op: bytes = b""
    state: bytes = b""
    facts: bytes = b""


class Followed(events.Event, frozen=True, tag="trainer.rank_ended"):
    """A rank has nothing more to do."""

    rank: int


class TorchCompute:
    """`Compute` on a `Machine`; rank 0's."""

    def __init__(self, machine: Machine, ranks: Ranks) -> None:
        self._machine = machine
        self._ranks = ranks
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "compute")

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _all(self, order: _Order) -> Outcome | None:
        def work() -> Outcome | None:
            if self._ranks.size > 1:
                self._ranks.share(msgspec.msgpack.encode(order))
            return _obey(self._machine, order)

        return await self._run(work)

    async def warm_up(self) -> None:
        """Load every base, so that the first operation need not wait for it."""
        for name in self._machine.names:
            await self._run(lambda name=name: self._machine.base(name))  # type: ignore[misc]

    def offers(self) -> list[Offer]:
        """See `Bases.offers`."""
        return [
            Offer(name, self._machine.base(name).context_length) for name in self._machine.names
        ]

    def about(self, base: str) -> tuple[str, str]:
        """See `Bases.about`. The tokenizer is a folder: it works without a network."""
        loaded = self._machine.base(base)
        return loaded.architecture, str(loaded.folder)

    async def probe(self) -> None:
        """See `Bases.probe`."""
        await self._run(lambda: self._machine.probe())

    def check(self, base: str, op: Op) -> None:
        """Refuse what is wrong by its form."""
        if isinstance(op, ops.CreateModel):
            self._machine.folder(base)
            if op.lora is not None and not 1 <= op.lora.rank <= 1024:
                raise Mistake(f"the rank of an adapter is 1 to 1024, not {op.lora.rank}")
        elif isinstance(op, ops.ForwardBackward):
            known = self._machine.base(base)
            losses.validate(op, known.vocabulary_size, known.context_length)

    async def create(self, model: str, base: str, lora: Lora | None) -> None:
        """See `Compute.create`."""
        await self._all(_Order(kind="create", model=model, base=base, lora=lora))

    async def load(self, model: str, snapshot: Snapshot, *, optimizer: bool) -> None:
        """See `Compute.load`."""
        await self._all(_snapshot_order("load", model, snapshot, optimizer=optimizer))

    async def restore(self, model: str, base: str, lora: Lora | None, snapshot: Snapshot) -> None:
        """See `Compute.restore`."""
        await self._all(_snapshot_order("restore", model, snapshot, base=base, lora=lora))

    async def apply(
        self,
        model: str,
        number: int,  # noqa: ARG002 -- others go by it
        op: ops.ForwardBackward | ops.OptimStep,
    ) -> Outcome:
        """See `Compute.apply`."""
        outcome = await self._all(_Order(kind="apply", model=model, op=ops.encode(op)))
        assert outcome is not None
        return outcome

    async def capture(self, model: str) -> Snapshot:
        """See `Compute.capture`."""
        return await self._run(lambda: self._machine.capture(model))

    async def export(self, model: str) -> Snapshot:
        """See `Compute.export`."""
        return await self._run(lambda: self._machine.export(model))

    async def drop(self, model: str) -> None:
        """See `Compute.drop`."""
        await self._all(_Order(kind="drop", model=model))

    def has_sampler(self, key: str) -> bool:
        """See `Compute.has_sampler`."""
        return self._machine.has_sampler(key)

    async def open_sampler(
        self, key: str, base: str, lora: Lora | None, snapshot: Snapshot | None
    ) -> None:
        """See `Compute.open_sampler`."""
        await self._run(lambda: self._machine.open_sampler(key, base, lora, snapshot))

    async def sample(self, key: str, line: str, number: int, op: ops.Sample) -> Outcome:
        """See `Compute.sample`."""
        return await self._run(lambda: self._machine.sample(key, line, number, op))

    async def close(self) -> None:
        """Let the other ranks end."""
        if self._ranks.size > 1:
            await self._run(lambda: self._ranks.share(msgspec.msgpack.encode(_Order(kind="end"))))
        self._thread.shutdown(wait=False)


def _snapshot_order(
    kind: str,
    model: str,
    snapshot: Snapshot,
    *,
    base: str = "",
    lora: Lora | None = None,
    optimizer: bool = False,
) -> _Order:
    return _Order(
        kind=kind,
        model=model,
        base=base,
        lora=lora,
        optimizer=optimizer,
        state=safetensors.torch.save(dict(snapshot.tensors)),
        facts=msgspec.json.encode(snapshot.facts),
    )


def follow(machine: Machine, ranks: Ranks) -> None:
    """Be another rank than 0: do what rank 0 says, until it says that this is the end."""
    while True:
        order = msgspec.msgpack.decode(ranks.share(None), type=_Order)
        if order.kind == "end":
            events.emit(Followed(rank=ranks.rank))
            return
        try:
            _obey(machine, order)
        except Mistake:
            continue  # rank 0 had the same, and tells it


def _obey(machine: Machine, order: _Order) -> Outcome | None:
    """Carry out an order, on any rank."""
    match order.kind:
        case "create":
            machine.create(order.model, order.base, order.lora)
        case "load":
            machine.load(order.model, _snapshot(order), optimizer=order.optimizer)
        case "restore":
            machine.restore(order.model, order.base, order.lora, _snapshot(order))
        case "drop":
            machine.drop(order.model)
        case "apply":
            op = ops.decode_op(order.op)
            if isinstance(op, ops.ForwardBackward):
                return machine.forward_backward(order.model, op)
            if isinstance(op, ops.OptimStep):
                return machine.optim_step(order.model, op)
            raise Corrupt(f"ranks do not know how to {ops.kind(op)}")
        case _:
            raise Corrupt(f"ranks do not know how to {order.kind}")
    return None


def _snapshot(order: _Order) -> Snapshot:
    tensors = safetensors.torch.load(order.state)
    return Snapshot(tensors, msgspec.json.decode(order.facts, type=dict), {})
