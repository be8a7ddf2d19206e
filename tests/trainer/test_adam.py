"""Adam against torch's own, and what it promises beyond that: equal bits, nothing half done."""

import itertools
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from holdfast.errors import Mistake
from holdfast.trainer import adam
from holdfast.trainer.ops import OptimStep

SHAPES = {"a": (3, 4), "b": (5,), "c": (), "d": (2, 1, 3)}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def made(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=source).to(dtype) for name, shape in SHAPES.items()}


def nothing() -> adam.State:
    return {}


def bits(tensors: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: one.numpy().tobytes() for name, one in tensors.items()}


GRID = list(
    itertools.product((0.0, 0.1), (0.0, 0.5, 1e9), (1e-12, 1e-3), ((0.9, 0.95), (0.0, 0.0)))
)


@pytest.mark.parametrize(("decay", "clip", "eps", "betas"), GRID)
def test_like_torch(decay: float, clip: float, eps: float, betas: tuple[float, float]) -> None:
    """Ten steps of `torch.optim.AdamW` behind `clip_grad_norm_`, with changing rates.

    Every third step one parameter has no gradient, and torch leaves it alone, too.
    """
    ours, theirs, state = made(0), made(0), nothing()
    for one in theirs.values():
        one.requires_grad_(True)
    optimizer = torch.optim.AdamW(
        theirs.values(), lr=1.0, betas=betas, eps=eps, weight_decay=decay, foreach=False
    )
    for at in range(10):
        rate = 0.1 / (1 + at)
        gradients: dict[str, Tensor | None] = dict(made(100 + at))
        if at % 3 == 0:
            gradients["b"] = None
        for name, one in theirs.items():
            given = gradients[name]
            one.grad = None if given is None else given.clone()
        norm = torch.nn.utils.clip_grad_norm_(theirs.values(), clip or math.inf)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        settings = OptimStep(
            learning_rate=rate,
            beta1=betas[0],
            beta2=betas[1],
            eps=eps,
            weight_decay=decay,
            grad_clip_norm=clip,
        )
        metrics = adam.step(ours, gradients, state, settings)
        assert metrics == {"grad_norm:mean": pytest.approx(float(norm), rel=1e-6)}
    for name in SHAPES:
        torch.testing.assert_close(ours[name], theirs[name].detach(), rtol=2e-5, atol=1e-6)
        assert int(state[f"step/{name}"]) == (6 if name == "b" else 10)


def test_equal_inputs_give_equal_bits(tmp_path: Path) -> None:
    """Order of dictionaries, saving in between and running again change nothing."""
    settings = OptimStep(learning_rate=0.1, weight_decay=0.1, grad_clip_norm=1.0)
    straight, state = made(0), nothing()
    for at in range(6):
        adam.step(straight, made(at + 1), state, settings)
    stopped, kept = made(0), nothing()
    for at in range(6):
        gradients = dict(reversed(made(at + 1).items()))
        adam.step(dict(reversed(stopped.items())), gradients, kept, settings)
        if at == 2:
            save_file(stopped, tmp_path / "weights")
            save_file(kept, tmp_path / "state")
            stopped, kept = load_file(tmp_path / "weights"), load_file(tmp_path / "state")
    assert bits(stopped) == bits(straight)
    assert bits(kept) == bits(state)
    assert {name.partition("/")[0] for name in state} == {"m", "v", "step"}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_gradients_that_are_not_finite_change_nothing(bad: float, clip: float) -> None:
    """Not even the parameters that come before the bad one, and no state."""
    parameters, state = made(0), nothing()
    adam.step(parameters, made(1), state, OptimStep())
    before = bits(parameters), bits(state)
    gradients = made(2)
    gradients["d"][0, 0, 1] = bad
    with pytest.raises(Mistake, match="not finite"):
        adam.step(parameters, gradients, state, OptimStep(grad_clip_norm=clip))
    with pytest.raises(Mistake, match="not finite"):
        adam.step(parameters, made(2), state, OptimStep(), norm=bad)
    assert (bits(parameters), bits(state)) == before


def test_gradients_too_large_to_square_are_no_reason_to_stop() -> None:
    """The norm is summed in float64: 1e30 is a number like any other, once clipped."""
    parameters = {"w": torch.zeros(2)}
    metrics = adam.step(
        parameters, {"w": torch.full((2,), 1e30)}, {}, OptimStep(grad_clip_norm=1.0)
    )
    assert metrics["grad_norm:mean"] == pytest.approx(math.sqrt(2) * 1e30)
    assert bool(torch.isfinite(parameters["w"]).all())


def test_lower_precision_is_rounded_once() -> None:
    """The state of bfloat16 parameters is float32, and the step is made in float32."""
    low, exact = made(0, torch.bfloat16), nothing()
    for name, one in low.items():
        exact[name] = one.float()
    settings, state = OptimStep(learning_rate=0.01, weight_decay=0.1), nothing()
    adam.step(low, made(1, torch.bfloat16), state, settings)
    grads = {name: one.to(torch.bfloat16).float() for name, one in made(1).items()}
    adam.step(exact, grads, {}, settings)
    for name in SHAPES:
        assert low[name].dtype == torch.bfloat16
        assert torch.equal(low[name], exact[name].to(torch.bfloat16))
        assert state[f"m/{name}"].dtype == torch.float32


def test_a_gradient_of_nobody_is_refused() -> None:
    """Before anything is changed."""
    for gradients in ({"w": torch.ones(2), "x": torch.ones(1)}, {"w": torch.ones(3)}):
        parameters, state = {"w": torch.zeros(2)}, nothing()
        with pytest.raises(Mistake, match="no parameter of its shape"):
            adam.step(parameters, gradients, state, OptimStep())
        assert not parameters["w"].any()
        assert state == {}
