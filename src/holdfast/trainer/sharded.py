"""Models that no rank has whole: FSDP, for what does not fit into one process.

- Every rank holds its part of the weights, of Adam's moments and of the gradients, and of
  nothing else. Rank 0 alone has something whole: what it was given to load, or what it was
  asked to read, and that in the memory of the host.
- The data of an operation is cut into as many pieces as there are ranks. For a fixed number of
  ranks the bits are the same in every life; with another number, or on a `Machine`, they are
  others, and the numbers about the same.
- Norms and "is it finite" are made of what all ranks found, so all of them decide alike. What a
  rank can only find out by itself (is its model directory whole?) is told to the others before
  anybody goes on: a mistake on one rank is a mistake on all.
- A captured state is the same as that of a `Machine`: either can go on from it.
"""

import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from holdfast.engine.base import Base, Tenant
from holdfast.engine.generate import Generation, Settings, generate
from holdfast.errors import Mistake
from holdfast.trainer import adam, ops
from holdfast.trainer.gradients import Outputs, batches, losses_of, tell
from holdfast.trainer.machine import Machine
from holdfast.trainer.ranks import Ranks, agreed, from_env
from holdfast.trainer.sharding import ShardedTenant, skeleton

__all__ = ["ShardedMachine", "meet"]


def meet(device: str) -> tuple[Ranks, str]:
    """The ranks of torchrun's environment, and this one's device."""
    if not device.startswith("cuda"):
        return from_env(), device
    if device != "cuda":
        raise Mistake(f"--fsdp gives every rank a device of its own: say cuda, not {device}")
    mine = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    torch.cuda.set_device(mine)
    return from_env(backend="cpu:gloo,cuda:nccl"), mine


class ShardedMachine(Machine):
    """One rank's parts. Whatever is called here is called on every rank, in the same order."""

    spread: ClassVar[bool] = True

    def __init__(
        self, bases: Mapping[str, Path], run: str, ranks: Ranks, *, device: str = "cpu"
    ) -> None:
        if ranks.size < 2:
            raise Mistake("--fsdp spreads models over ranks: give --ranks 2 or more, or leave it")
        super().__init__(bases, run, ranks, device=device)
        self._ranks = ranks
        self._mesh = init_device_mesh(torch.device(device).type, (ranks.size,))

    # ---- models ----------------------------------------------------------------

    def _load_base(self, name: str, folder: Path) -> Base:
        return skeleton(name, folder, device=self._device)

    def _tenant(self, name: str, base: str, lora: ops.Lora | None) -> Tenant:
        if lora is not None:
            raise Mistake(
                "with --fsdp all weights are trained, no adapters: ask for rank 0, or serve "
                "without --fsdp"
            )
        return agreed(
            self._ranks,
            lambda: ShardedTenant(self.base(base), name, self._mesh, self._ranks),
            lambda made: made.base.drop(made),
        )

    def _frozen(self, base: str) -> Tenant:
        return self._tenant(f"sampler {base}", base, None)

    def probe(self) -> None:
        """Hear of every rank."""
        agreed(self._ranks, lambda: None, lambda _: None)

    def _wholes(self, tenant: Tenant, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return _sharded(tenant).wholes(held)

    def _own(self, tenant: Tenant, wholes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return _sharded(tenant).own(wholes)

    # ---- training --------------------------------------------------------------

    def _gather(
        self, tenant: Tenant, op: ops.ForwardBackward, parameters: Mapping[str, Tensor]
    ) -> tuple[Tensor, list[Outputs], list[dict[str, float]]]:
        """Every rank computes its piece; those with fewer batches take part all the same."""
        model = _sharded(tenant)
        size = self._ranks.size
        cuts = [len(op.data) * at // size for at in range(size + 1)]
        pieces = [op.data[a:b] for a, b in itertools.pairwise(cuts)]
        mine = batches(pieces[self._ranks.rank])
        scores: list[Outputs] = []
        metrics: list[dict[str, float]] = []
        with torch.set_grad_enabled(bool(parameters)):
            for at in range(max(len(batches(piece)) for piece in pieces)):
                if at < len(mine):
                    total, scored, told = losses_of(model, op, mine[at])
                    scores += scored
                    metrics += told
                    weight = torch.ones_like(total)
                else:
                    total = model.idle()
                    weight = torch.zeros_like(total)
                if parameters:
                    torch.autograd.backward(total, weight)
        outputs = [
            tell(self._ranks, piece, (scores, metrics) if at == self._ranks.rank else None, at)
            for at, piece in enumerate(pieces)
            if piece
        ]
        return (
            model.take_gradients() if parameters else torch.zeros(0),
            [values for found, _ in outputs for values in found],
            [one for _, found in outputs for one in found],
        )

    def _held(self, tenant: Tenant) -> dict[str, Tensor]:
        return _sharded(tenant).parts()

    def _is_finite(self, gradient: Tensor) -> bool:
        bad = torch.tensor([float(not bool(torch.isfinite(gradient).all()))])
        return float(self._ranks.total(bad)) == 0.0

    def _norm(self, gradients: Mapping[str, Tensor]) -> float:
        mine = torch.tensor(adam.squares(gradients), dtype=torch.float64)
        if not len(mine):  # so it is on every rank
            return 0.0
        return adam.norm_of(itertools.chain(*(one.tolist() for one in self._ranks.collect(mine))))

    # ---- sampling --------------------------------------------------------------

    def _generate(
        self, tenant: Tenant, prompt: list[int], settings: Settings, count: int, seed: int
    ) -> Generation:
        model = _sharded(tenant)
        if self._ranks.rank:
            model.attend()
            return Generation([])
        with model.leading():
            return generate(model, prompt, settings, num_samples=count, seed=seed)


def _sharded(tenant: Tenant) -> ShardedTenant:
    return cast("ShardedTenant", tenant)
