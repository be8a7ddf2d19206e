"""Models in memory, and what is done to them: the same bits on every rank and in every life.

- Every rank has the same models and does the same to them; see `gradients.py` for how they
  share the work, and why the bits do not depend on their number. `ShardedMachine` is the one
  where every rank has a part of each model.
- Whatever raises `Mistake` has changed nothing: gradients are added, and weights stepped, only
  when everything about them is known to be finite.
- A snapshot is copied, in both directions: nothing that is done here changes one.
"""

import ctypes
import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from holdfast.engine.base import Base, Tenant, load_base
from holdfast.engine.base import Lora as EngineLora
from holdfast.engine.generate import Generation, Settings, generate
from holdfast.errors import Mistake
from holdfast.trainer import adam, losses, ops
from holdfast.trainer.bases import find
from holdfast.trainer.captured import ADAM, GRADS, WEIGHTS, named, part, weights_of
from holdfast.trainer.generated import sampled_of, targets_of
from holdfast.trainer.gradients import Gradients, Outputs
from holdfast.trainer.ranks import Ranks
from holdfast.trainer.seams import Snapshot

__all__ = ["Machine", "Trained"]

SAMPLERS = 8
_SETTINGS = tuple(one for one in Settings.__struct_fields__ if hasattr(ops.Sample, one))
"""What operations and the engine call by the same name."""


@dataclass
class Trained:
    """A model that is being trained."""

    base: str
    lora: ops.Lora | None
    tenant: Tenant
    moments: adam.State = field(default_factory=dict)
    grads: dict[str, Tensor] = field(default_factory=dict)


class Machine:
    """One rank's models. Not for two threads at a time."""

    spread: ClassVar[bool] = False
    """Whether a rank has only a part of a model: then all must take part where one reads it."""

    def __init__(
        self,
        bases: Mapping[str, Path],
        run: str,
        ranks: Ranks | None = None,
        *,
        device: str = "cpu",
        exact: bool = True,
    ) -> None:
        self._folders = dict(bases)
        self._bases: dict[str, Base] = {}
        self._run = run
        self._gradients = Gradients(ranks or Ranks(), exact=exact)
        self._device = device
        self._models: dict[str, Trained] = {}
        self._samplers: OrderedDict[str, Tenant] = OrderedDict()

    # ---- bases -----------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """The bases that may be asked for."""
        return sorted(self._folders)

    def folder(self, name: str) -> Path:
        """Where a base lies."""
        return find(self._folders, name)

    def base(self, name: str) -> Base:
        """A base, loaded when it is first needed."""
        if name not in self._bases:
            self._bases[name] = self._load_base(name, self.folder(name))
        return self._bases[name]

    def _load_base(self, name: str, folder: Path) -> Base:
        return load_base(name, folder, device=self._device)

    def probe(self) -> None:
        """Compute something small on the first base."""
        tenant = self.base(self.names[0]).frozen()
        with torch.no_grad():
            tokens = torch.zeros(1, 1, dtype=torch.int64)
            logits = tenant.logits(tokens, torch.ones_like(tokens))
        if not bool(torch.isfinite(logits).all()):
            raise Mistake(f"{self.names[0]} computes numbers that are not finite")

    # ---- models ----------------------------------------------------------------

    def create(self, model: str, base: str, lora: ops.Lora | None) -> None:
        """Begin a model as the base has it."""
        self.drop(model)
        self._models[model] = Trained(base, lora, self._tenant(model, base, lora))

    def _tenant(self, name: str, base: str, lora: ops.Lora | None) -> Tenant:
        loaded = self.base(base)
        return loaded.full(name) if lora is None else loaded.lora(_lora(lora), name)

    def drop(self, model: str) -> None:
        """Forget a model, and give its memory back."""
        old = self._models.pop(model, None)
        if old is not None:
            self.base(old.base).drop(old.tenant)
            del old
            give_back()

    def load(self, model: str, snapshot: Snapshot, *, optimizer: bool) -> None:
        """Take over saved weights, and with `optimizer` what the optimizer remembers."""
        trained = self._models[model]
        moments = part(snapshot.tensors, ADAM) if optimizer else {}
        adam.check(moments, {name: one.shape for name, one in trained.tenant.parameters().items()})
        trained.tenant.load_state(weights_of(snapshot))
        trained.grads = {}
        trained.moments = self._own(trained.tenant, moments)

    def restore(self, model: str, base: str, lora: ops.Lora | None, snapshot: Snapshot) -> None:
        """Everything as it was captured."""
        self.create(model, base, lora)
        self.load(model, snapshot, optimizer=True)
        trained = self._models[model]
        trained.grads = self._own(trained.tenant, part(snapshot.tensors, GRADS))

    def capture(self, model: str) -> Snapshot:
        """Everything as it is."""
        trained = self._models[model]
        tenant = trained.tenant
        tensors = {
            **named(WEIGHTS, self._wholes(tenant, tenant.state())),
            **named(ADAM, self._wholes(tenant, trained.moments)),
            **named(GRADS, self._wholes(tenant, trained.grads)),
        }
        return Snapshot(tensors, {"kind": "state", "base": trained.base}, {})

    def export(self, model: str) -> Snapshot:
        """The weights, in the form in which others load them."""
        trained = self._models[model]
        tensors = self._wholes(trained.tenant, trained.tenant.state())
        kind = "model" if trained.lora is None else "adapter"
        facts = {"kind": kind, "base": trained.base}
        return Snapshot(tensors, facts, trained.tenant.carried_files())

    def _wholes(self, tenant: Tenant, held: Mapping[str, Tensor]) -> dict[str, Tensor]:  # noqa: ARG002 -- of a part it matters whose
        """Copies of what this rank holds of weights, moments or gradients, as others know it."""
        return {name: one.detach().clone() for name, one in held.items()}

    def _own(self, tenant: Tenant, wholes: Mapping[str, Tensor]) -> dict[str, Tensor]:  # noqa: ARG002 -- as above
        """Copies of what this rank is to hold of moments or gradients."""
        return {name: one.clone() for name, one in wholes.items()}

    # ---- training --------------------------------------------------------------

    def forward_backward(self, model: str, op: ops.ForwardBackward) -> ops.Output:
        """The loss, and with `op.backward` its gradients on top of those there are."""
        trained = self._models[model]
        base = trained.tenant.base
        losses.validate(op, base.vocabulary_size, base.context_length)
        parameters = trained.tenant.parameters() if op.backward else {}
        gradient, found, metrics = self._gather(trained.tenant, op, parameters)
        told = losses.merge_metrics(metrics)
        if not np.isfinite(told["loss:sum"]):
            raise Mistake(f"the loss is {told['loss:sum']}: nothing was changed")
        if op.backward:
            if not self._is_finite(gradient):
                raise Mistake("the gradients are not finite: nothing was changed")
            self._add(trained, gradient)
        outputs = [
            {name: ops.Tensor.of(values.numpy()) for name, values in one.items()} for one in found
        ]
        return ops.Output(outputs=outputs, metrics=told)

    def _gather(
        self, tenant: Tenant, op: ops.ForwardBackward, parameters: Mapping[str, Tensor]
    ) -> tuple[Tensor, list[Outputs], list[dict[str, float]]]:
        """The gradient of what this rank holds, as one vector; outputs and metrics of all data."""
        return self._gradients.gather(tenant, op, parameters)

    def _held(self, tenant: Tenant) -> dict[str, Tensor]:
        """What this rank holds of each parameter: the memory itself."""
        return {name: one.data for name, one in tenant.parameters().items()}

    def _is_finite(self, gradient: Tensor) -> bool:
        """Every rank says the same."""
        return bool(torch.isfinite(gradient).all())

    def _norm(self, gradients: Mapping[str, Tensor]) -> float:
        """The norm of all gradients, wherever they are; every rank says the same."""
        return adam.global_norm(gradients)

    def _add(self, trained: Trained, gradient: Tensor) -> None:
        held = self._held(trained.tenant)
        sizes = [one.numel() for one in held.values()]
        for (name, one), piece in zip(held.items(), torch.split(gradient, sizes), strict=True):
            shaped = piece.reshape(one.shape)
            if name in trained.grads:
                trained.grads[name] += shaped
            else:
                trained.grads[name] = shaped.clone()

    def optim_step(self, model: str, op: ops.OptimStep) -> ops.Stepped:
        """One step of Adam; the gradients are used up."""
        trained = self._models[model]
        norm = self._norm(trained.grads)
        held = self._held(trained.tenant)
        metrics = adam.step(held, trained.grads, trained.moments, op, norm=norm)
        trained.grads = {}
        return ops.Stepped(metrics=metrics)

    # ---- sampling --------------------------------------------------------------

    def has_sampler(self, key: str) -> bool:
        """Whether these weights are in memory."""
        return key in self._samplers

    def open_sampler(
        self, key: str, base: str, lora: ops.Lora | None, snapshot: Snapshot | None
    ) -> None:
        """Have weights in memory; those that were used least recently go."""
        if snapshot is None:
            tenant = self._frozen(base)
        else:
            tenant = self._tenant(f"sampler {key}", base, lora)
            try:
                tenant.load_state(weights_of(snapshot))
            except Exception:
                tenant.base.drop(tenant)
                raise
        self._samplers[key] = tenant
        while len(self._samplers) > SAMPLERS:
            _, old = self._samplers.popitem(last=False)
            old.base.drop(old)

    def _frozen(self, base: str) -> Tenant:
        return self.base(base).frozen()

    def sample(self, key: str, line: str, number: int, op: ops.Sample) -> ops.Sampled:
        """Continue a prompt. The seed is the caller's, or stands for (run, line, number)."""
        self._samplers.move_to_end(key)
        settings = Settings(
            **{name: getattr(op, name) for name in _SETTINGS},
            targets=None if op.target_prompt is None else targets_of(op.target_prompt),
            alternatives=op.prompt_alternatives,
        )
        prompt = np.frombuffer(op.prompt, "<i4").tolist()
        seed = op.seed if op.seed is not None else _seed(self._run, line, number)
        found = self._generate(self._samplers[key], prompt, settings, op.num_samples, seed)
        return sampled_of(found, op.target_prompt)

    def _generate(
        self, tenant: Tenant, prompt: list[int], settings: Settings, count: int, seed: int
    ) -> Generation:
        return generate(tenant, prompt, settings, num_samples=count, seed=seed)


def give_back() -> None:
    """Give free memory back to the system: glibc keeps what torch has freed otherwise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _seed(run: str, line: str, number: int) -> int:
    text = f"{run}\n{line}\n{number}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:6])


def _lora(given: ops.Lora) -> EngineLora:
    return EngineLora(**msgspec.structs.asdict(given))
