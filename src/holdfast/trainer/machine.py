"""Models in memory, and what is done to them: the same bits on every rank and in every life.

- Every rank has the same models and does the same to them; see `gradients.py` for how they
  share the work, and why the bits do not depend on their number.
- Whatever raises `Mistake` has changed nothing: gradients are added, and weights stepped, only
  when everything about them is known to be finite.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from holdfast.engine.base import Base, Tenant, load_base
from holdfast.engine.base import Lora as EngineLora
from holdfast.engine.generate import Settings, generate
from holdfast.errors import Mistake, NotFound
from holdfast.trainer import adam, losses, ops
from holdfast.trainer.generated import sampled_of
from holdfast.trainer.gradients import Gradients
from holdfast.trainer.ranks import Alone, Ranks
from holdfast.trainer.seams import Snapshot

__all__ = ["Machine"]

SAMPLERS = 8
WEIGHTS, ADAM, GRADS = "weights.", "adam.", "grads."


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
        self._gradients = Gradients(ranks or Alone(), exact=exact)
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
        if name not in self._folders:
            known = ", ".join(self.names)
            raise NotFound(f"there is no base model {name[:100]!r} here; there are: {known}")
        return self._folders[name]

    def base(self, name: str) -> Base:
        """A base, loaded when it is first needed."""
        if name not in self._bases:
            self._bases[name] = load_base(name, self.folder(name), device=self._device)
        return self._bases[name]

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
        """Forget a model."""
        old = self._models.pop(model, None)
        if old is not None:
            self.base(old.base).drop(old.tenant)

    def load(self, model: str, snapshot: Snapshot, *, optimizer: bool) -> None:
        """Take over saved weights, and with `optimizer` what the optimizer remembers."""
        trained = self._models[model]
        trained.tenant.load_state(_weights(snapshot))
        trained.grads = {}
        trained.moments = _part(snapshot.tensors, ADAM) if optimizer else {}

    def restore(self, model: str, base: str, lora: ops.Lora | None, snapshot: Snapshot) -> None:
        """Everything as it was captured."""
        self.create(model, base, lora)
        self.load(model, snapshot, optimizer=True)
        self._models[model].grads = _part(snapshot.tensors, GRADS)

    def capture(self, model: str) -> Snapshot:
        """Everything as it is."""
        trained = self._models[model]
        tensors = {
            **_named(WEIGHTS, trained.tenant.state()),
            **_named(ADAM, trained.moments),
            **_named(GRADS, trained.grads),
        }
        copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        return Snapshot(copies, {"kind": "state", "base": trained.base}, {})

    def export(self, model: str) -> Snapshot:
        """The weights, in the form in which others load them."""
        trained = self._models[model]
        tensors = {name: one.detach().clone() for name, one in trained.tenant.state().items()}
        kind = "model" if trained.lora is None else "adapter"
        facts = {"kind": kind, "base": trained.base}
        return Snapshot(tensors, facts, trained.tenant.carried_files())

    # ---- training --------------------------------------------------------------

    def forward_backward(self, model: str, op: ops.ForwardBackward) -> ops.Output:
        """The loss, and with `op.backward` its gradients on top of those there are."""
        trained = self._models[model]
        base = trained.tenant.base
        losses.validate(op, base.vocabulary_size, base.context_length)
        parameters = trained.tenant.parameters() if op.backward else {}
        gradient, logprobs, metrics = self._gradients.gather(trained.tenant, op, parameters)
        told = losses.merge_metrics(metrics)
        if not np.isfinite(told["loss:sum"]):
            raise Mistake(f"the loss is {told['loss:sum']}: nothing was changed")
        if op.backward:
            if not bool(torch.isfinite(gradient).all()):
                raise Mistake("the gradients are not finite: nothing was changed")
            self._add(trained, parameters, gradient)
        outputs = [{"logprobs": _tensor(values)} for values in logprobs]
        return ops.Output(outputs=outputs, metrics=told)

    def _add(self, trained: Trained, parameters: Mapping[str, Tensor], gradient: Tensor) -> None:
        sizes = [one.numel() for one in parameters.values()]
        for (name, one), part in zip(
            parameters.items(), torch.split(gradient, sizes), strict=True
        ):
            shaped = part.reshape(one.shape)
            if name in trained.grads:
                trained.grads[name] += shaped
            else:
                trained.grads[name] = shaped.clone()

    def optim_step(self, model: str, op: ops.OptimStep) -> ops.Stepped:
        """One step of Adam; the gradients are used up."""
        trained = self._models[model]
        parameters = {name: one.data for name, one in trained.tenant.parameters().items()}
        metrics = adam.step(parameters, trained.grads, trained.moments, op)
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
            tenant = self.base(base).frozen()
        else:
            tenant = self._tenant(f"sampler {key}", base, lora)
            tenant.load_state(_weights(snapshot))
        self._samplers[key] = tenant
        while len(self._samplers) > SAMPLERS:
            _, old = self._samplers.popitem(last=False)
            old.base.drop(old)

    def sample(self, key: str, line: str, number: int, op: ops.Sample) -> ops.Sampled:
        """Continue a prompt. The seed is the caller's, or stands for (run, line, number)."""
        self._samplers.move_to_end(key)
        settings = Settings(
            max_tokens=op.max_tokens,
            temperature=op.temperature,
            top_k=op.top_k,
            top_p=op.top_p,
            stop_strings=op.stop_strings,
            stop_tokens=op.stop_tokens,
            prompt_logprobs=op.prompt_logprobs,
            prompt_logprobs_last_n=op.prompt_logprobs_last_n,
            topk_prompt_logprobs=op.topk_prompt_logprobs,
            topk_sample_logprobs=op.topk_sample_logprobs,
        )
        prompt = np.frombuffer(op.prompt, "<i4").tolist()
        seed = op.seed if op.seed is not None else _seed(self._run, line, number)
        found = generate(
            self._samplers[key], prompt, settings, num_samples=op.num_samples, seed=seed
        )
        return sampled_of(found)


def _seed(run: str, line: str, number: int) -> int:
    text = f"{run}\n{line}\n{number}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:6])


def _lora(given: ops.Lora) -> EngineLora:
    return EngineLora(
        rank=given.rank,
        seed=given.seed,
        train_attn=given.train_attn,
        train_mlp=given.train_mlp,
        train_unembed=given.train_unembed,
    )


def _tensor(values: Tensor) -> ops.Tensor:
    array = values.numpy().astype("<f4")
    return ops.Tensor(dtype="float32", shape=tuple(array.shape), data=array.tobytes())


def _weights(snapshot: Snapshot) -> dict[str, Tensor]:
    """The weights of a state, or of what was saved for samplers, which has nothing else."""
    return _part(snapshot.tensors, WEIGHTS) or dict(snapshot.tensors)


def _named(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
