"""A service of before: its next incarnation answers old futures, and goes on training."""

from pathlib import Path
from typing import Any

import pytest

from compat.sides import Service, Side, facts, serve, unpack


def flags(folder: Path) -> tuple[str, ...]:
    """How the service of the fixture was started."""
    return "--trainer", "holdfast", "--model", f"tiny={folder / 'model'}", "--allow-commands"


def adopt(service: Service, told: dict[str, Any]) -> None:
    """Old promises are given again, with the old results; what had none gets one."""
    service.wait("one")
    for one in told["asked"]:
        request = one["promise"]["request_id"]
        assert service.result("one", request) == one["result"], one["path"]
        if one["path"] != "asample":
            assert service.post("one", one["path"], one["body"]) == one["promise"]
    for request in told["pending"]:
        result = service.result("one", request)
        assert result.keys() & {"loss_fn_outputs", "metrics"}, result


def go_on(service: Service, told: dict[str, Any], step: int = 0) -> None:
    """Train both models for one more step, and load what was saved."""
    for model, done in told["models"].items():
        given = told["asked"][2]["body"]["forward_backward_input"]
        number = done + 1 + 3 * step
        for path, more in (
            ("forward_backward", {"forward_backward_input": given}),
            ("optim_step", {"adam_params": {"learning_rate": 1e-2}}),
            ("load_weights", {"path": f"tinker://{model}/weights/middle", "optimizer": True}),
        ):
            promise = service.post("one", path, {"model_id": model, "seq_id": number, **more})
            assert "error" not in service.result("one", promise["request_id"])
            number += 1


@pytest.mark.timeout(600)
def test_a_trainer_is_taken_up(tmp_path: Path, new: Side) -> None:
    """Journal, segments, checkpoints, saved weights and the records of its job are all of use."""
    folder = unpack("house", tmp_path)
    told = facts(folder)
    with serve(new, folder, *flags(folder)) as service:
        adopt(service, told)
        go_on(service, told)
        listed = service.trainer("one", "checkpoints").json["checkpoints"]
        assert {one["checkpoint_id"] for one in listed} == {
            "weights/middle",
            "sampler_weights/served",
        }
        assert service.job("one")["epoch"] > 1


@pytest.mark.long
@pytest.mark.timeout(900)
def test_back_and_forth(tmp_path: Path, sides: tuple[Side, Side]) -> None:
    """Services of both versions take turns on one folder: an upgrade, and the way back."""
    folder = unpack("house", tmp_path)
    told = facts(folder)
    epochs = []
    for step in range(3):
        with serve(sides[step % 2], folder, *flags(folder)) as service:
            adopt(service, told)
            go_on(service, told, step)
            epochs.append(service.job("one")["epoch"])
    assert epochs == sorted(set(epochs)), epochs
