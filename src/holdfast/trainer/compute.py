"""Computing with torch, for a core that runs in an event loop: one thread, all ranks.

What is to be done is an order (`orders.py`), which is told to those ranks whom it concerns, and
then carried out by all of them.

Torch and the models are loaded by that thread, when the process already serves: operations are
taken on, and old results given, seconds before the first one can be carried out.
"""

import asyncio
import concurrent.futures
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from holdfast.errors import Mistake
from holdfast.trainer import bases, loss_inputs, ops
from holdfast.trainer.ops import Lora, Op, Outcome
from holdfast.trainer.seams import Snapshot
from holdfast.trainer.wire.answers import Offer

if TYPE_CHECKING:
    from holdfast.trainer.machine import Machine
    from holdfast.trainer.orders import Answer
    from holdfast.trainer.ranks import Ranks

__all__ = ["TorchCompute"]

_MAX_RANK = 1024


class TorchCompute:
    """`Compute` on a `Machine`; rank 0's. `make` is called in the thread that computes."""

    def __init__(
        self, folders: Mapping[str, Path], make: "Callable[[], tuple[Machine, Ranks]]"
    ) -> None:
        self._bases = {name: bases.read_facts(name, path) for name, path in folders.items()}
        self._make = make
        self._made: tuple[Machine, Ranks] | None = None
        self.in_step = True
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "compute")

    def _have(self) -> "tuple[Machine, Ranks]":
        if self._made is None:
            self._made = self._make()
        return self._made

    async def _do(self, kind: str, snapshot: Snapshot | None = None, **details: Any) -> "Answer":
        """Have an order carried out."""

        def there() -> "Answer":
            import torch

            from holdfast.trainer.orders import Order, is_shared, lead

            machine, ranks = self._have()
            try:
                return lead(machine, ranks, Order(kind=kind, **details), snapshot)
            except Mistake:
                raise
            except BaseException as error:
                # A device that has failed once fails for the rest of the process.
                failed = isinstance(error, torch.AcceleratorError)
                self.in_step = self.in_step and not (failed or is_shared(machine, ranks, kind))
                raise

        return await asyncio.get_running_loop().run_in_executor(self._thread, there)

    async def warm_up(self) -> None:
        """Load torch and every base, so that the first operation need not wait for them."""
        loop = asyncio.get_running_loop()
        for name in self._bases:
            await loop.run_in_executor(self._thread, lambda name: self._have()[0].base(name), name)

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
        await self._do("probe")

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
        await self._do("create", model=model, base=base, lora=lora)

    async def load(self, model: str, snapshot: Snapshot, *, optimizer: bool) -> None:
        """See `Compute.load`."""
        await self._do("load", snapshot, model=model, optimizer=optimizer)

    async def restore(self, model: str, base: str, lora: Lora | None, snapshot: Snapshot) -> None:
        """See `Compute.restore`."""
        await self._do("restore", snapshot, model=model, base=base, lora=lora)

    async def apply(
        self,
        model: str,
        number: int,  # noqa: ARG002 -- others go by it
        op: ops.ForwardBackward | ops.OptimStep,
    ) -> Outcome:
        """See `Compute.apply`."""
        return cast("Outcome", await self._do("apply", model=model, op=ops.encode(op)))

    async def capture(self, model: str) -> Snapshot:
        """See `Compute.capture`."""
        return cast("Snapshot", await self._do("capture", model=model))

    async def export(self, model: str) -> Snapshot:
        """See `Compute.export`."""
        return cast("Snapshot", await self._do("export", model=model))

    async def drop(self, model: str) -> None:
        """See `Compute.drop`."""
        await self._do("drop", model=model)

    # ---- sampling --------------------------------------------------------------

    def has_sampler(self, key: str) -> bool:
        """See `Compute.has_sampler`."""
        return self._made is not None and self._made[0].has_sampler(key)

    async def open_sampler(
        self, key: str, base: str, lora: Lora | None, snapshot: Snapshot | None
    ) -> None:
        """See `Compute.open_sampler`."""
        await self._do("open_sampler", snapshot, key=key, base=base, lora=lora)

    async def sample(self, key: str, line: str, number: int, op: ops.Sample) -> Outcome:
        """See `Compute.sample`."""
        encoded = ops.encode(op)
        return cast(
            "Outcome", await self._do("sample", key=key, line=line, number=number, op=encoded)
        )

    async def close(self) -> None:
        """Let the other ranks end.

        After an error they may be in the middle of something, and would take the word for an
        answer in that. Then this process ends without it, and they notice.
        """
        if self._made is not None and self._made[1].size > 1 and self.in_step:
            await self._do("end")
        self._thread.shutdown(wait=False, cancel_futures=True)
