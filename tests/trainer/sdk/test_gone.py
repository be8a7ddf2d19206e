"""Weights that were deleted, or whose time ran out, with the real client: an answer, no death."""

import pytest

from trainer.house import House
from trainer.sdk.programs import run
from trainer.sdk.saved import digest, folder
from trainer.sdk.wire import Session

GONE = """
rest = service.create_rest_client()
client = lora()
def sample(sampler):
    return sampler.sample(prompt=types.ModelInput.from_ints([1]), num_samples=1,
        sampling_params=types.SamplingParams(max_tokens=1)).result()
def both(path):
    used, unused = (service.create_sampling_client(model_path=path) for _ in range(2))
    sample(used)
    return {"used": used, "unused": unused}
deleted = client.save_weights_for_sampler("deleted").result().path
state = client.save_state("state").result().path
expired = client.save_weights_for_sampler("expired", ttl_seconds=1).result().path
samplers = {"deleted": both(deleted), "state": both(state)}
samplers["expired"] = {"unused": service.create_sampling_client(model_path=expired)}
say(there=[deleted, state])
rest.delete_checkpoint_from_tinker_path(deleted).result()
rest.delete_checkpoint_from_tinker_path(state).result()
def listed():
    return [one.tinker_path for one in rest.list_user_checkpoints(1000).result().checkpoints]
while expired in listed():
    time.sleep(0.1)
for way, two in samplers.items():
    for use, sampler in two.items():
        for turn in range(2):
            attempt(f"{way} {use} {turn}", lambda: sample(sampler))
attempt("load", lambda: client.load_state(state).result())
attempt("load optimizer", lambda: client.load_state_with_optimizer(state).result())
attempt("load expired", lambda: client.load_state(expired).result())
step(client, "still here")
attempt("begin", lambda: service.create_training_client_from_state(state))
attempt("sampler", lambda: service.create_sampling_client(model_path=deleted))
attempt("delete twice", lambda: rest.delete_checkpoint_from_tinker_path(state).result())
say(path=client.save_state("state").result().path, gone=[deleted, expired])
"""


@pytest.mark.long
def test_weights_that_are_gone(there: House) -> None:
    """Samples, loads and sessions of them are the caller's error, whether the weights were used
    before or not; no trainer dies of it, the files are gone, and the name may be used again."""
    before = there.epoch()
    _, *said, last = run(there, GONE)
    assert len(said) == 16, [one["name"] for one in said]
    for one in said[:13]:
        assert (one["error"], one["category"]) == ("RequestFailedError", "user"), one
    for one in said[13:]:
        assert one["error"] == "NotFoundError", one
    assert there.epoch() == before, there.log()
    assert digest(there, last["path"])
    for path in last["gone"]:
        model, _, name = path.removeprefix("tinker://").split("/")
        home = there.folder / "trainers" / "local" / "one" / "weights"
        assert not (home / f"{model}.s.{name}").exists()


def test_weights_that_are_damaged(there: House) -> None:
    """Their bytes are not those that were saved: an answer of category server, to each operation
    that needs them. Nothing else suffers."""
    before = there.epoch()
    session = Session(there)
    model = session.model()
    path = model.do(model.save(1))["path"]
    sampler = session.post(
        "create_sampling_session",
        {"session_id": session.id, "sampling_session_seq_id": 0, "model_path": path},
    ).json["sampling_session_id"]
    (file,) = folder(there, path).glob("*.safetensors")
    raw = file.read_bytes()
    file.chmod(0o600)
    file.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    answers = [
        session.result("asample", session.sample(sampler, 0, [1])),
        session.result("load_weights", model.body(2, path=path, optimizer=False)),
        session.result("load_weights", session.create(path=path, optimizer=False)),
    ]
    for answer in answers:
        assert answer["category"] == "server", answers
        assert "cannot be read" in answer["error"]
    assert "metrics" in model.do(model.step(3))
    assert there.epoch() == before, there.log()
