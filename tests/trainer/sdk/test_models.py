"""One model's gradients, several models side by side, and models that go on from a save."""

from typing import Any

import pytest

from trainer.house import House
from trainer.sdk.programs import run
from trainer.sdk.saved import digest, tensors

ACCUMULATED = """
FIRST, SECOND = [datum("one two"), datum("three")], [datum("four"), datum("five six seven")]
ADAM = types.AdamParams(learning_rate=1e-2, eps=0.1, weight_decay=0.1)
def back(client, data):
    return client.forward_backward(data, "cross_entropy").result().metrics["loss:sum"]
def end(name, client):
    norm = client.optim_step(ADAM).result().metrics["grad_norm:mean"]
    say(name=name, norm=norm, path=published(client))
twice = lora(); back(twice, FIRST); back(twice, SECOND); end("twice", twice)
whole = lora(); back(whole, FIRST + SECOND); end("whole", whole)
alone = lora(); back(alone, FIRST); end("alone", alone)
looked = lora(); back(looked, FIRST)
looked.forward(SECOND, "cross_entropy").result(); end("looked", looked)
untouched = lora(); say(name="untouched", path=published(untouched))
nothing = lora(); end("nothing", nothing)
after = lora(); back(after, FIRST); after.optim_step(ADAM).result()
say(name="stepped", path=published(after, "stepped")); end("used up", after)
"""


@pytest.fixture(scope="module")
def accumulated(there: House) -> dict[str, Any]:
    """What became of models that were given the same data in different ways."""
    return {one["name"]: one for one in run(there, ACCUMULATED)}


def distance(there: House, one: str, other: str) -> float:
    """The largest difference between two sets of weights."""
    first, second = tensors(there, one), tensors(there, other)
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def test_gradients_add_up(there: House, accumulated: dict[str, Any]) -> None:
    """Two batches and a step are one batch of both and a step, and not one of them alone."""
    twice, whole, alone = (accumulated[name] for name in ("twice", "whole", "alone"))
    assert twice["norm"] == pytest.approx(whole["norm"], rel=1e-5)
    assert distance(there, twice["path"], whole["path"]) < 1e-6
    assert distance(there, twice["path"], alone["path"]) > 1e-4


def test_forward_leaves_no_gradient(there: House, accumulated: dict[str, Any]) -> None:
    """A step after forward_backward and forward is, bit for bit, one without the forward."""
    looked, alone = accumulated["looked"], accumulated["alone"]
    assert looked["norm"] == alone["norm"]
    assert digest(there, looked["path"]) == digest(there, alone["path"])


def test_a_step_without_gradients_changes_nothing(
    there: House, accumulated: dict[str, Any]
) -> None:
    """No decay, no momentum: a parameter without a gradient is left alone; a step uses them up."""
    assert accumulated["nothing"]["norm"] == 0.0
    assert digest(there, accumulated["nothing"]["path"]) == digest(
        there, accumulated["untouched"]["path"]
    )
    assert accumulated["used up"]["norm"] == 0.0
    assert digest(there, accumulated["used up"]["path"]) == digest(
        there, accumulated["stepped"]["path"]
    )


SEVERAL = """
other = tinker.ServiceClient(base_url=os.environ["HOUSE_URL"], api_key=os.environ["HOUSE_KEY"])
TEXTS = {"a": ["alpha", "beta"], "b": ["gamma"], "c": ["delta", "epsilon"], "full": ["eta"]}
def begin(name, where):
    return where.create_lora_training_client(
        base_model=BASE, rank=0 if name == "full" else 4, seed=ord(name[0]))
def rounds(clients, count=3):
    for _ in range(count):
        sent = []
        for name, client in clients.items():
            data = [datum(text) for text in TEXTS[name]]
            sent.append(client.forward_backward(data, "cross_entropy"))
        for client in clients.values():
            sent.append(client.optim_step(types.AdamParams(learning_rate=1e-2)))
        for future in sent:
            future.result()
together = {name: begin(name, other if name == "c" else service) for name in TEXTS}
rounds(together)
for name in TEXTS:
    alone = {name: begin(name, service)}
    rounds(alone)
    say(name=name, alone=published(alone[name]), together=published(together[name]),
        ids=[alone[name].model_id, together[name].model_id])
"""


def test_models_do_not_see_each_other(there: House) -> None:
    """Four models of two sessions, interleaved: each ends with the bits that it has alone."""
    said = run(there, SEVERAL)
    for one in said:
        assert digest(there, one["alone"]) == digest(there, one["together"]), one["name"]
    assert len({digest(there, one["alone"]) for one in said}) == 4
    assert len({model for one in said for model in one["ids"]}) == 8
    sessions = {one["ids"][1].rpartition("-")[0] for one in said}
    assert len(sessions) == 2


RESUMED = """
EARLY, LATE = ["before", "the save"], ["after", "it"]
with_optimizer = service.create_training_client_from_state_with_optimizer
def go_on(name, client):
    losses = [step(client, *LATE) for _ in range(3)]
    say(name=name, losses=losses, path=client.save_state("end").result().path)
def begin():
    client = lora(rank=GIVEN)
    for _ in range(3):
        step(client, *EARLY)
    return client
straight = begin()
path = straight.save_state("middle").result().path
go_on("straight", straight)
go_on("with optimizer", with_optimizer(path))
go_on("without", service.create_training_client_from_state(path))
old = lora(rank=GIVEN, seed=99)
step(old, "something else")
old.load_state_with_optimizer(path).result()
go_on("loaded", old)
plain = lora(rank=GIVEN, seed=98)
plain.forward_backward([datum("left over")], "cross_entropy").result()
plain.load_state(path).result()
go_on("plain", plain)
pending = begin()
pending.forward_backward([datum("pending")], "cross_entropy").result()
halfway = pending.save_state("halfway").result().path
go_on("pending", pending)
go_on("halfway", with_optimizer(halfway))
kept = with_optimizer(path)
assert straight.save_state("middle", overwrite=True).result().path == path
go_on("kept", kept)
say(name="later", path=published(with_optimizer(path)))
say(name="now", path=published(straight))
"""


@pytest.mark.parametrize("rank", [4, pytest.param(0, marks=pytest.mark.long)])
def test_going_on_from_a_save_is_not_having_stopped(there: House, rank: int) -> None:
    """Weights and optimizer: bit for bit, in a new model and in one that was something else.

    - Without the optimizer it is another way, the same from a new model and by `load_state`.
    - Gradients are not part of a save: whoever loads it begins without, the saved one keeps them.
    - `overwrite`: the path has the new weights; a model that loaded the old ones keeps these.
    """
    said = {one["name"]: one for one in run(there, RESUMED, rank)}
    state = {name: digest(there, one["path"]) for name, one in said.items()}
    assert said["with optimizer"]["losses"] == said["straight"]["losses"]
    for name in ("with optimizer", "loaded", "halfway", "kept"):
        assert state[name] == state["straight"], name
    assert state["without"] != state["straight"]
    assert state["plain"] == state["without"]
    assert said["without"]["losses"][0] == said["straight"]["losses"][0], "other weights"
    assert state["pending"] != state["straight"]
    assert state["later"] == state["now"]
