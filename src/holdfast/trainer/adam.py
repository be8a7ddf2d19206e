"""Adam as Tinker has it: decoupled weight decay, bias correction, clipping by the global norm.

The same as `torch.optim.AdamW`, written as one function over plain tensors, so that its state
can be saved like weights and a step is a function of (parameters, gradients, state, settings):

- The state has, for each parameter NAME that ever had a gradient, `m/NAME` and `v/NAME`
  (float32, of its shape) and `step/NAME` (int64, a scalar).
- A parameter without a gradient is left alone: no decay, no change of its moments or its count.
- Gradients are only read. With a `grad_clip_norm` above 0 they count as if scaled so that the
  norm of all of them together is at most that.
- A norm that is not finite is refused before anything is changed: one bad batch must not
  destroy a model.
- The norm is summed in float64, and over the parameters exactly: equal inputs give equal bits,
  whatever the order of the dictionaries.
"""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from holdfast.errors import Mistake
from holdfast.trainer.ops import OptimStep

__all__ = ["State", "check", "global_norm", "norm_of", "squares", "step"]

State = dict[str, Tensor]


def global_norm(gradients: Mapping[str, Tensor | None]) -> float:
    """The L2 norm of all gradients as one vector."""
    return norm_of(squares(gradients))


def squares(gradients: Mapping[str, Tensor | None]) -> list[float]:
    """The sum of the squares of each gradient, or of each part of one."""
    return [
        float(gradient.double().square().sum())
        for gradient in gradients.values()
        if gradient is not None
    ]


def norm_of(found: Iterable[float]) -> float:
    """The norm, given all `squares`, in any order."""
    all_of_them = list(found)
    if not all(map(math.isfinite, all_of_them)):
        return math.nan
    return math.sqrt(math.fsum(all_of_them))


def check(state: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> None:
    """Refuse a state that is not one of parameters of these shapes."""
    for key, tensor in state.items():
        kind, _, name = key.partition("/")
        wanted = torch.Size() if kind == "step" else shapes.get(name)
        if kind not in ("m", "v", "step") or name not in shapes or tensor.shape != wanted:
            raise Mistake(f"the optimizer's state has {key!r}, which is not of this model")
    for name in {key.partition("/")[2] for key in state}:
        if not {f"m/{name}", f"v/{name}", f"step/{name}"} <= state.keys():
            raise Mistake(f"the optimizer's state of {name!r} is not whole")


@torch.no_grad()
def step(
    parameters: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor | None],
    state: State,
    settings: OptimStep,
    *,
    norm: float | None = None,
) -> dict[str, float]:
    """Change `parameters` and `state` in place; the metrics, with the norm before clipping.

    `norm` is for whoever knows it already, or holds only a part of the gradients.
    """
    present = {name: gradient for name, gradient in gradients.items() if gradient is not None}
    for name, gradient in present.items():
        if name not in parameters or parameters[name].shape != gradient.shape:
            raise Mistake(f"there is a gradient for {name!r}, but no parameter of its shape")
    if norm is None:
        norm = global_norm(present)
    if not math.isfinite(norm):
        raise Mistake("the gradients are not finite: nothing was changed")
    limit = settings.grad_clip_norm
    scale = limit / norm if 0 < limit < norm else 1.0
    for name, gradient in present.items():
        exact = gradient.float()
        _update(name, parameters[name], exact if scale == 1.0 else exact * scale, state, settings)
    return {"grad_norm:mean": norm}


def _update(
    name: str, parameter: Tensor, gradient: Tensor, state: State, settings: OptimStep
) -> None:
    if f"step/{name}" not in state:
        state[f"step/{name}"] = torch.zeros((), dtype=torch.int64)
        state[f"m/{name}"] = torch.zeros_like(gradient)
        state[f"v/{name}"] = torch.zeros_like(gradient)
    count, mean, square = (state[f"{part}/{name}"] for part in ("step", "m", "v"))
    count += 1
    steps = int(count)
    mean.lerp_(gradient, 1 - settings.beta1)
    square.mul_(settings.beta2).addcmul_(gradient, gradient, value=1 - settings.beta2)
    # Lower precisions are rounded once, at the end.
    exact = parameter.float()
    exact.mul_(1 - settings.learning_rate * settings.weight_decay)
    correction = math.sqrt(1 - settings.beta2**steps)
    divisor = (square.sqrt() / correction).add_(settings.eps)
    rate = settings.learning_rate / (1 - settings.beta1**steps)
    exact.addcdiv_(mean, divisor, value=-rate)
    if exact is not parameter:
        parameter.copy_(exact)
