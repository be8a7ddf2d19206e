"""What the trainer computes is what plain PyTorch computes, for the same data and base."""

import itertools
import json
import math
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainer.house import House
from trainer.sdk import reference
from trainer.sdk.programs import run
from trainer.sdk.reference import Adam, Example, load
from trainer.sdk.saved import folder, tensors

LENGTHS = (3, 9, 4, 12, 7)
CLIPS = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
LOSSES: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": CLIPS,
    "cispo": CLIPS,
    "dro": {"beta": 0.4},
    "gspo": {"clip_low_threshold": 0.95, "clip_high_threshold": 1.05},
}
INPUTS = {
    "cross_entropy": ["target_tokens", "weights"],
    "gspo": ["target_tokens", "logprobs", "advantages", "sequence_ratio_mask"],
}
RATIO = ["target_tokens", "logprobs", "advantages"]
# With an eps of the size of the gradients a step is a smooth function of them, so that
# rounding does not become a sign.
ADAM = {
    "learning_rate": 1e-2,
    "beta1": 0.8,
    "beta2": 0.9,
    "eps": 0.1,
    "weight_decay": 0.3,
}


def base(there: House) -> Path:
    return there.folder / "trainers" / "bases" / "tiny"


@pytest.fixture(scope="module")
def data(there: House) -> list[Example]:
    """Sequences of several lengths; the sampler's log probabilities are near the model's."""
    random = np.random.default_rng(4)
    model = load(base(there))
    found: list[Example] = []
    for length in LENGTHS:
        ids = random.integers(4, 101, length + 1).tolist()
        one: Example = {"tokens": ids[:-1], "target_tokens": ids[1:]}
        with torch.no_grad():
            now = reference.logprobs(model, one).numpy()
        one["weights"] = random.choice([0.0, 0.5, 1.0], length).tolist()
        one["logprobs"] = (now + random.normal(0, 0.15, length)).astype("f4").tolist()
        one["advantages"] = random.choice([-1.0, 0.0, 0.75, 2.0], length).tolist()
        one["sequence_ratio_mask"] = [0.0, *[1.0] * (length - 1)]
        found.append(one)
    return found


PROGRAM = """
for loss, config in GIVEN["losses"].items():
    client = lora(rank=0)
    data = made(GIVEN["data"], GIVEN["inputs"].get(loss, GIVEN["ratio"]))
    quiet = client.forward(data, loss, config).result()
    found = client.forward_backward(data, loss, config).result()
    stepped = client.optim_step(types.AdamParams(**GIVEN["adam"])).result()
    say(metrics=found.metrics, norm=stepped.metrics["grad_norm:mean"], path=published(client),
        logprobs=[one["logprobs"].tolist() for one in found.loss_fn_outputs],
        same=[one["logprobs"].tolist() for one in quiet.loss_fn_outputs],
        tokens=[one["elementwise_loss"].tolist() for one in found.loss_fn_outputs],
        quiet=quiet.metrics)
"""


@pytest.fixture(scope="module")
def told(there: House, data: list[Example]) -> dict[str, Any]:
    """What the client heard of each loss, all on models of their own."""
    given = {"losses": LOSSES, "inputs": INPUTS, "ratio": RATIO, "data": data, "adam": ADAM}
    return dict(zip(LOSSES, run(there, PROGRAM, given), strict=True))


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_and_its_gradient_are_those_of_pytorch(
    there: House, data: list[Example], told: dict[str, Any], name: str
) -> None:
    """Log probabilities, loss, norm of the gradient, and every weight after one step."""
    said = told[name]
    model = load(base(there))
    wanted = [reference.logprobs(model, one).detach() for one in data]
    for got, want in zip(said["logprobs"], wanted, strict=True):
        torch.testing.assert_close(torch.tensor(got), want, atol=1e-5, rtol=1e-5)
    assert said["same"] == said["logprobs"]
    check_tokens(name, data, wanted, said)
    assert said["quiet"] == said["metrics"]
    total = reference.backward(model, name, data, LOSSES[name])
    assert said["metrics"]["loss:sum"] == pytest.approx(total, rel=1e-5, abs=1e-4)
    assert said["norm"] == pytest.approx(Adam(model).step(**ADAM), rel=1e-4)
    close(tensors(there, said["path"]), reference.trained(model))
    if "clip_low_threshold" in LOSSES[name]:
        assert 0 < said["metrics"]["clipped_tokens:sum"] < sum(LENGTHS), "nothing was clipped"


def check_tokens(name: str, data: list[Example], now: list[Any], said: dict[str, Any]) -> None:
    """The loss of every token is told, and their sum is the loss."""
    assert [len(one) for one in said["tokens"]] == list(LENGTHS)
    for one, p, tokens in zip(data, now, said["tokens"], strict=True):
        total = float(reference.loss(name, p, one, LOSSES[name]))
        assert sum(tokens) == pytest.approx(total, rel=1e-4, abs=1e-4)
        if name == "cross_entropy":
            want = -torch.tensor(one["weights"]) * p
            torch.testing.assert_close(torch.tensor(tokens), want, atol=1e-5, rtol=1e-5)
    assert math.fsum(itertools.chain(*said["tokens"])) == pytest.approx(
        said["metrics"]["loss:sum"], rel=1e-5, abs=1e-5
    )


def close(got: dict[str, torch.Tensor], want: dict[str, Any]) -> None:
    """The same names, and values that agree to a thousandth of a step."""
    assert got.keys() == want.keys()
    assert {name: one.shape for name, one in got.items()} == {
        name: one.shape for name, one in want.items()
    }
    for name, tensor in got.items():
        difference = float((tensor - want[name].detach()).abs().max())
        assert difference < 1e-5, f"{name} differs by {difference}"


CANDIDATES = """
client = lora(rank=0)
found = client.forward_backward(made(GIVEN), "cross_entropy").result()
say(loss=found.metrics["loss:sum"], logprobs=found.loss_fn_outputs[0]["logprobs"].tolist(),
    shape=list(found.loss_fn_outputs[0]["logprobs"].shape),
    tokens=list(found.loss_fn_outputs[0]["elementwise_loss"].shape))
"""


@pytest.mark.long
def test_several_targets_for_a_position(there: House) -> None:
    """Targets and weights of shape [N, K]: the loss is the weighted sum over all of them."""
    one: Example = {
        "tokens": [1, 20, 30],
        "target_tokens": [[20, 21], [30, 31], [2, 3]],
        "weights": [[0.25, 0.75], [1.0, 0.0], [0.5, 0.5]],
    }
    (said,) = run(there, CANDIDATES, [one])
    model = load(base(there))
    now = reference.logprobs(model, one).detach()
    assert said["shape"] == said["tokens"] == [3, 2]
    torch.testing.assert_close(
        torch.tensor(said["logprobs"]).reshape(3, 2), now, atol=1e-5, rtol=1e-5
    )
    assert said["loss"] == pytest.approx(float(reference.loss("cross_entropy", now, one, {})))


STEPS = """
client = lora(rank=GIVEN["rank"])
before = published(client, "before")
data = made(GIVEN["data"], ["target_tokens", "weights"])
norms = []
for adam in GIVEN["steps"]:
    client.forward_backward(data[:2], "cross_entropy").result()
    client.forward_backward(data[2:], "cross_entropy").result()
    client.forward(data[1:], "cross_entropy").result()  # leaves no gradient
    norms.append(client.optim_step(types.AdamParams(**adam)).result().metrics["grad_norm:mean"])
after = client.forward(data, "cross_entropy").result()
say(before=before, after=published(client, "after"), norms=norms,
    logprobs=[one["logprobs"].tolist() for one in after.loss_fn_outputs])
"""


@pytest.mark.parametrize(
    "rank", [pytest.param(0, marks=pytest.mark.long, id="full"), pytest.param(4, id="lora")]
)
def test_several_steps_are_those_of_adamw(there: House, data: list[Example], rank: int) -> None:
    """Clipping, weight decay, bias correction, settings that change: full, and with peft.

    The gradients of two batches add up, and a step uses them up.
    """
    steps = [
        {**ADAM, "grad_clip_norm": 5.0, "eps": 1e-2},
        {**ADAM, "weight_decay": 0.0},
        {**ADAM, "grad_clip_norm": 1e6, "beta1": 0.9},
    ]
    (said,) = run(there, STEPS, {"rank": rank, "data": data, "steps": steps})
    model = load(base(there), folder(there, said["before"]) if rank else None)
    adam, norms = Adam(model), []
    for settings in steps:
        reference.backward(model, "cross_entropy", data)
        norms.append(adam.step(**settings))
    assert said["norms"] == pytest.approx(norms, rel=1e-3)
    assert norms[0] > 5.0, "nothing was clipped"
    close(tensors(there, said["after"]), reference.trained(model))
    # What was published is a folder that others load: it scores as the trainer does.
    where = folder(there, said["after"])
    again = load(base(there), where) if rank else load(where)
    for got, one in zip(said["logprobs"], data, strict=True):
        want = reference.logprobs(again, one).detach()
        torch.testing.assert_close(torch.tensor(got), want, atol=1e-4, rtol=1e-4)


CUSTOM = """
import torch
def squares(data, logprobs):
    total = sum((one ** 2).sum() for one in logprobs)
    return total, {"seen": float(sum(len(one) for one in logprobs))}
client = lora()
before = published(client, "before")
data = made(GIVEN["data"], ["target_tokens"])
found = client.forward_backward_custom(data, squares).result()
client.optim_step(types.AdamParams(**GIVEN["adam"])).result()
say(metrics=found.metrics, before=before, after=published(client, "after"))
"""


@pytest.mark.long
def test_a_loss_of_the_clients_own(there: House, data: list[Example], tmp_path: Path) -> None:
    """`forward_backward_custom`: a function of log probabilities that the server never sees.

    The client needs torch for it. Its environment has none; ours is at the end of its path.
    """
    packages = sysconfig.get_path("purelib")
    text = f"import sys\nsys.path.append({json.dumps(packages)})\n"
    (tmp_path / "sitecustomize.py").write_text(text)
    given = {"data": data, "adam": ADAM}
    (said,) = run(there, CUSTOM, given, PYTHONPATH=str(tmp_path), OMP_NUM_THREADS="1")
    model = load(base(there), folder(there, said["before"]))
    total = torch.zeros(())
    for one in data:
        total = total + (reference.logprobs(model, one) ** 2).sum()
    total.backward()  # type: ignore[no-untyped-call]
    Adam(model).step(**ADAM)
    assert said["metrics"]["loss:sum"] == pytest.approx(float(total.detach()), rel=1e-5)
    assert said["metrics"]["seen"] == sum(LENGTHS)
    close(tensors(there, said["after"]), reference.trained(model))
