"""The curves of a run for other people's tools. What they need is asked for when it is used."""

import contextlib
import importlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from holdfast.errors import MissingPackage, Unavailable
from holdfast.views.picture import Picture

__all__ = ["metrics", "need_tensorboard", "need_wandb", "scalars"]
__all__ += ["write_tensorboard", "write_wandb"]

_TRAIN = ("reward", "exact", "loss", "grad_norm", "lag", "seconds")
_EVAL = ("exact", "reward")
_EVAL_BEGIN = "eval_"


def scalars(picture: Picture) -> Iterator[tuple[int, dict[str, float]]]:
    """What is known of each step, in order; numbers only."""
    steps: dict[int, dict[str, float]] = {}
    for group, names, curve in (("train", _TRAIN, picture.train), ("eval", _EVAL, picture.evals)):
        for step, *values in curve.points():
            known = zip(names, values, strict=True)
            numbers = {f"{group}/{name}": each for name, each in known if math.isfinite(each)}
            steps.setdefault(int(step), {}).update(numbers)
    yield from sorted(steps.items())


def _need(package: str, what: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise MissingPackage(f"{what}: pip install {package}") from None


def need_tensorboard() -> Any:
    """The package that writes them. Raises `MissingPackage`."""
    return _need("tensorboardX", "TensorBoard's files need")


def need_wandb() -> Any:
    """The package that writes to Weights & Biases. Raises `MissingPackage`."""
    return _need("wandb", "Weights & Biases needs")


def write_tensorboard(picture: Picture, folder: Path) -> None:
    """Write the curves into a folder that TensorBoard reads."""
    with need_tensorboard().SummaryWriter(str(folder)) as writer:
        for step, numbers in scalars(picture):
            for name, value in numbers.items():
                writer.add_scalar(name, value, step)


def metrics(path: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """What `metrics.jsonl` says of each step, in order; numbers only."""
    steps: dict[int, dict[str, float]] = {}
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        for line in file:
            said = msgspec.json.decode(line, type=dict[str, Any])
            step = said.pop("step")
            for name, value in said.items():
                if isinstance(value, int | float) and math.isfinite(value):
                    held = name.startswith(_EVAL_BEGIN)
                    told = f"eval/{name.removeprefix(_EVAL_BEGIN)}" if held else f"train/{name}"
                    steps.setdefault(step, {})[told] = value
    yield from sorted(steps.items())


def write_wandb(folder: Path, *, run: str, config: dict[str, Any], facts: dict[str, Any]) -> None:
    """Write the curves of the run in a folder to a run of Weights & Biases of the same name.

    In the mode, project and account that its own environment variables say; what is written
    again takes the place of what was there. Raises `Unavailable` where it cannot be written.
    """
    wandb = need_wandb()
    project = os.environ.get("WANDB_PROJECT", "holdfast")
    try:
        with wandb.init(project=project, id=run, name=run, dir=folder, config=config) as opened:
            for step, numbers in metrics(folder / "metrics.jsonl"):
                opened.log(numbers, step=step)
            opened.summary.update(facts)
    except wandb.Error as error:
        raise Unavailable(
            f"Weights & Biases did not take the curves ({error}): try again with "
            f"`holdfast run --resume {folder} --wandb`, or set WANDB_MODE=offline"
        ) from error
