"""The curves for other people's tools."""

import sys
from pathlib import Path

import pytest

from holdfast.errors import MissingPackage
from holdfast.views.picture import Picture
from holdfast.views.tail import look
from holdfast.views.told import Told
from holdfast.views.writers import scalars, write_tensorboard

from .logs import storm


def test_scalars_by_step() -> None:
    """What training and evaluation say of a step is together; what is no number is left out."""
    picture = Picture()
    trained = {"step": 2, "reward": 0.5, "exact": 0.25, "loss": None, "grad_norm": 1.0}
    picture.take(Told("step.trained", 1.0, "o", 5, 1, trained))
    picture.take(Told("eval.done", 1.1, "o", 5, 2, {"step": 2, "exact": 0.75, "reward": 0.9}))
    assert list(scalars(picture)) == [
        (
            2,
            {
                "train/reward": 0.5,
                "train/exact": 0.25,
                "train/grad_norm": 1.0,
                "train/lag": 0,
                "train/seconds": 0.0,
                "eval/exact": 0.75,
                "eval/reward": 0.9,
            },
        )
    ]


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package the error says what to install."""
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(MissingPackage, match="pip install tensorboardX"):
        write_tensorboard(Picture(), tmp_path)


def test_tensorboard_files(tmp_path: Path) -> None:
    """Every curve is in the file that TensorBoard reads."""
    storm(tmp_path)
    write_tensorboard(look(tmp_path), tmp_path / "board")
    [file] = (tmp_path / "board").iterdir()
    assert file.read_bytes().count(b"train/reward") == 30
    assert file.read_bytes().count(b"eval/exact") == 6
