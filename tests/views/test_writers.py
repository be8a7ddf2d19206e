"""The curves for other people's tools."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import MissingPackage
from holdfast.views.tail import look
from holdfast.views.writers import (
    metrics,
    need_tensorboard,
    need_wandb,
    scalars,
    write_tensorboard,
)

from .logs import picture_of, storm, told


def test_scalars_by_step() -> None:
    """What training and evaluation say of a step is together; what is no number is left out."""
    trained = told("step.trained", 1.0, "o", 5, step=2, reward=0.5, exact=0.25, loss=None)
    tried = told("eval.done", 1.1, "o", 5, step=2, exact=0.75, reward=0.9)
    expected = {"train/reward": 0.5, "train/exact": 0.25, "train/grad_norm": 0.0, "train/lag": 0}
    expected |= {"train/seconds": 0.0, "eval/exact": 0.75, "eval/reward": 0.9}
    assert list(scalars(picture_of(trained, tried))) == [(2, expected)]


@pytest.mark.parametrize(
    ("package", "need"), [("tensorboardX", need_tensorboard), ("wandb", need_wandb)]
)
def test_a_missing_package_is_named(
    package: str, need: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the package the error says what to install."""
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackage, match=f"pip install {package}"):
        need()


def test_metrics_by_step(tmp_path: Path) -> None:
    """What the file says of a step is together, by who found it; what is no number is left out,
    and no file is no steps."""
    path = tmp_path / "metrics.jsonl"
    assert list(metrics(path)) == []
    path.write_text(
        '{"step":1,"reward":0.5,"loss":null,"content":"ab","dropped":[2]}\n'
        '{"step":2,"reward":0.75,"samples":16}\n{"step":2,"eval_exact":1.0}\n'
    )
    assert list(metrics(path)) == [
        (1, {"train/reward": 0.5}),
        (2, {"train/reward": 0.75, "train/samples": 16, "eval/exact": 1.0}),
    ]


def test_tensorboard_files(tmp_path: Path) -> None:
    """Every curve is in the file that TensorBoard reads."""
    storm(tmp_path)
    write_tensorboard(look(tmp_path), tmp_path / "board")
    [file] = (tmp_path / "board").iterdir()
    assert file.read_bytes().count(b"train/reward") == 30
    assert file.read_bytes().count(b"eval/exact") == 6
