"""Models that go on from a save."""

import pytest

from trainer.house import House
from trainer.sdk.programs import run
from trainer.sdk.saved import digest

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
