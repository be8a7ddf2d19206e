"""Computing with torch, for a core that runs in an event loop: one thread, all ranks.

What changes a model is told to the other ranks first, as one message; then all of them do
it. What only reads (capture, export, sample) is done by rank 0 alone.

Torch and the models are loaded by that thread, when the process already serves: operations are
taken on, and old results given, seconds before the first one can be carried out.
"""

import asyncio
import concurrent.futures
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from holdfast.errors import Mistake
from holdfast.trainer import bases, loss_inputs, ops
from holdfast.trainer.ops import Lora, Op, Outcome
from holdfast.trainer.seams import Snapshot
from holdfast.trainer.wire.answers import Offer

if TYPE_CHECKING:
    from holdfast.trainer.machine import Machine
    from holdfast.trainer.orders import Order
    from holdfast.trainer.ranks import Ranks

__all__ = ["TorchCompute"]

P = ParamSpec("P")
T = TypeVar("T")
_MAX_RANK = 1024


class TorchCompute:
    """`Compute` on a `Machine`; rank 0's. `make` is called in the thread that computes."""

    def __init__(
        self, folders: Mapping[str, Path], make: "Callable[[], tuple[Machine, Ranks]]"
    ) -> None:
        self._bases = {name: bases.read_facts(name, path) for name, path in folders.items()}
        self._make = make
        self._made: tuple[Machine, Ranks] | None = None
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "compute")

    async def _run(
        self, work: "Callable[Concatenate[Machine, P], T]", *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Do something with the machine, in its thread."""

        def there() -> T:
            return work(self._have()[0], *args, **kwargs)

        return await asyncio.get_running_loop().run_in_executor(self._thread, there)

    def _have(self) -> "tuple[Machine, Ranks]":
        if self._made is None:
            self._made = self._make()
        return self._made

    async def _all(self, order: "Callable[[], Order]") -> Outcome | None:
        """Let every rank do something."""

        def there() -> Outcome | None:
            from holdfast.trainer.orders import lead

            machine, ranks = self._have()
            return lead(machine, ranks, order())

        return await asyncio.get_running_loop().run_in_executor(self._thread, there)

    async def warm_up(self) -> None:
        """Load torch and every base, so that the first operation need not wait for them."""
        for name in self._bases:
            await self._run(lambda machine, name: machine.base(name), name)

    # ---- bases -----------------------------------------------------------------

    def offers(self) -> list[Offer]:
        """See `Bases.offers`."""
        return [Offer(one.name, one.context_length) for one in self._bases.values()]

    def about(self, base: str) -> tuple[str, str]:
        """See `Bases.about`. The tokenizer is a folder: it works without a network."""
        facts = bases.find(self._bases, base)
        return facts.architecture, str(facts.folder)

    async def probe(self) -> None:
        """See `Bases.probe`."""
        await self._run(lambda machine: machine.probe())

    def check(self, base: str, op: Op) -> None:
        """Refuse what is wrong by its form."""
        facts = bases.find(self._bases, base)
        if isinstance(op, ops.CreateModel):
            if op.lora is not None and not 1 <= op.lora.rank <= _MAX_RANK:
                raise Mistake(f"the rank of an adapter is 1 to {_MAX_RANK}, not {op.lora.rank}")
        elif isinstance(op, ops.ForwardBackward):
            loss_inputs.validate(op, facts.vocabulary_size, facts.context_length)

    # ---- models ----------------------------------------------------------------

    async def create(self, model: str, base: str, lora: Lora | None) -> None:
        """See `Compute.create`."""

        def order() -> "Order":
            from holdfast.trainer.orders import Order

            return Order(kind="create", model=model, base=base, lora=lora)

        await self._all(order)

    async def load(self, model: str, snapshot: Snapshot, *, optimizer: bool) -> None:
        """See `Compute.load`."""

        def order() -> "Order":
            from holdfast.trainer.orders import Order, with_snapshot

            return with_snapshot(Order(kind="load", model=model, optimizer=optimizer), snapshot)

        await self._all(order)

    async def restore(self, model: str, base: str, lora: Lora | None, snapshot: Snapshot) -> None:
        """See `Compute.restore`."""

        def order() -> "Order":
            from holdfast.trainer.orders import Order, with_snapshot

            return with_snapshot(
                Order(kind="restore", model=model, base=base, lora=lora), snapshot
            )

        await self._all(order)

    async def apply(
        self,
        model: str,
        number: int,  # noqa: ARG002 -- others go by it
        op: ops.ForwardBackward | ops.OptimStep,
    ) -> Outcome:
        """See `Compute.apply`."""

        def order() -> "Order":
            from holdfast.trainer.orders import Order

            return Order(kind="apply", model=model, op=ops.encode(op))

        outcome = await self._all(order)
        assert outcome is not None
        return outcome

    async def capture(self, model: str) -> Snapshot:
        """See `Compute.capture`."""
        return await self._run(lambda machine: machine.capture(model))

    async def export(self, model: str) -> Snapshot:
        """See `Compute.export`."""
        return await self._run(lambda machine: machine.export(model))

    async def drop(self, model: str) -> None:
        """See `Compute.drop`."""

        def order() -> "Order":
            from holdfast.trainer.orders import Order

            return Order(kind="drop", model=model)

        await self._all(order)

    # ---- sampling --------------------------------------------------------------

    def has_sampler(self, key: str) -> bool:
        """See `Compute.has_sampler`."""
        return self._made is not None and self._made[0].has_sampler(key)

    async def open_sampler(
        self, key: str, base: str, lora: Lora | None, snapshot: Snapshot | None
    ) -> None:
        """See `Compute.open_sampler`."""
        await self._run(lambda machine: machine.open_sampler(key, base, lora, snapshot))

    async def sample(self, key: str, line: str, number: int, op: ops.Sample) -> Outcome:
        """See `Compute.sample`."""
        return await self._run(lambda machine: machine.sample(key, line, number, op))

    async def close(self) -> None:
        """Let the other ranks end."""

        def order() -> "Order":
            from holdfast.trainer.orders import END, Order

            return Order(kind=END)

        if self._made is not None and self._made[1].size > 1:
            await self._all(order)
        self._thread.shutdown(wait=False, cancel_futures=True)
