"""The curves of a run for other people's tools. What they need is asked for when it is used."""

import importlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast.errors import MissingPackage
from holdfast.views.picture import Picture

__all__ = ["need_tensorboard", "scalars", "write_tensorboard"]

_TRAIN = ("reward", "exact", "loss", "grad_norm", "lag", "seconds")
_EVAL = ("exact", "reward")


def scalars(picture: Picture) -> Iterator[tuple[int, dict[str, float]]]:
    """What is known of each step, in order; numbers only."""
    steps: dict[int, dict[str, float]] = {}
    for group, names, curve in (("train", _TRAIN, picture.train), ("eval", _EVAL, picture.evals)):
        for step, *values in curve.points():
            known = zip(names, values, strict=True)
            numbers = {f"{group}/{name}": each for name, each in known if math.isfinite(each)}
            steps.setdefault(int(step), {}).update(numbers)
    yield from sorted(steps.items())


def need_tensorboard() -> Any:
    """The package that writes them. Raises `MissingPackage`."""
    try:
        return importlib.import_module("tensorboardX")
    except ImportError:
        raise MissingPackage("TensorBoard's files need: pip install tensorboardX") from None


def write_tensorboard(picture: Picture, folder: Path) -> None:
    """Write the curves into a folder that TensorBoard reads."""
    with need_tensorboard().SummaryWriter(str(folder)) as writer:
        for step, numbers in scalars(picture):
            for name, value in numbers.items():
                writer.add_scalar(name, value, step)
