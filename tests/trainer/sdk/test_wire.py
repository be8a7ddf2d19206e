"""Exactly once and in order, on the wire: duplicates, other orders, gaps, codings.

A number means one operation, for ever. Every model here ends as a twin that heard everything
once and in order.
"""

import base64
import json
import time
from typing import Any

import pytest
import zstandard

from trainer.house import House
from trainer.sdk import programs
from trainer.sdk.saved import digest
from trainer.sdk.wire import JSON, PROTOBUF, Model, Session, at_once, post, promised

GAP_S = 6.0  # many times what operations without a gap take
POLICY = {"gap_s": GAP_S, "checkpoint_ops": 8}
A, B, C = [1, 40, 41, 42, 2], [1, 50, 51, 2], [1, 60, 61, 62, 63, 2]
NAMED = {"A": A, "B": B}


@pytest.fixture
def session(there: House) -> Session:
    return Session(there)


def end(there: House, model: Model, seq: int) -> str:
    """The state of a model, saved under this number."""
    return digest(there, model.do(model.save(seq))["path"])


def twin(there: House, session: Session, *operations: str) -> str:
    """The state of a model that hears these once, in order: sequences, and steps."""
    model = session.model()
    for seq, name in enumerate(operations, 1):
        model.do(model.step(seq) if name == "step" else model.backward(seq, NAMED[name]))
    return end(there, model, len(operations) + 1)


def test_every_operation_is_done_once(there: House, session: Session) -> None:
    """Sent three times at once and once more when it is done: one promise and one result, for
    every kind; and the weights are those of a model that heard each once.
    """
    creation = ("create_model", session.create())
    model = Model(session, f"{session.id}-0")
    kinds: list[tuple[str, Any]] = [
        creation,
        model.backward(1, A),
        model.forward(2, B),
        model.step(3),
        model.save(4, "state"),
        ("save_weights_for_sampler", model.body(5, path="named")),
        ("save_weights_for_sampler", model.body(6, sampling_session_seq_id=0)),
        model.backward(7, C),
        model.step(8),
        (
            "load_weights",
            model.body(9, path=f"tinker://{model.name}/weights/state", optimizer=True),
        ),
        model.backward(10, B),
        model.step(11),
    ]
    heard = []
    for operation in kinds:
        answers = at_once([lambda operation=operation: model.send(operation)] * 3)  # type: ignore[misc]
        (request,) = {promised(answer) for answer in answers}
        first = session.wait(request)
        assert "error" not in first.json, (operation, first)
        assert promised(model.send(operation)) == request
        assert session.wait(request).raw == first.raw
        heard.append((request, operation, first.raw))
    assert end(there, model, 12) == twin(there, session, "A", "step", "B", "step")
    # All of it once more, when checkpoints have covered it.
    for request, operation, raw in heard:
        assert promised(model.send(operation)) == request
        assert session.wait(request).raw == raw


def test_unloading_and_sampling_are_done_once(session: Session) -> None:
    """These have numbers of another kind, or none. A model that was unloaded is gone."""
    maker = {"session_id": session.id, "sampling_session_seq_id": 3, "base_model": "holdfast/tiny"}
    samplers = {session.post("create_sampling_session", maker).raw for _ in range(3)}
    assert len(samplers) == 1
    sampler = session.post("create_sampling_session", maker).json["sampling_session_id"]
    sample = session.sample(sampler, 0, A, max_tokens=5) | {"num_samples": 2}
    answers = at_once([lambda: session.post("asample", sample)] * 4)
    (request,) = {promised(answer) for answer in answers}
    assert len(answers[0].json["sample_sequence_ids"]) == 2
    first = session.wait(request).raw
    assert promised(session.post("asample", sample)) == request
    assert session.wait(request).raw == first
    other = session.post("asample", {**sample, "sampling_params": {"max_tokens": 6}})
    assert other.status == 400, other
    model = session.model()
    answers = at_once([lambda: session.post("unload_model", {"model_id": model.name})] * 4)
    (request,) = {promised(answer) for answer in answers}
    assert session.wait(request).json["model_id"] == model.name
    assert promised(session.post("unload_model", {"model_id": model.name})) == request
    assert model.send(model.step(7)).status == 410


def test_numbers_decide_the_order(there: House, session: Session) -> None:
    """Sent as 5, 3, 4, 2 and then 1: carried out as 1, 2, 3, 4, 5."""

    def five(model: Model) -> list[Any]:
        first = [model.backward(1, A), model.step(2), model.backward(3, B), model.step(4)]
        return [*first, model.forward(5, A)]

    model, straight = session.model(), session.model()
    sent = five(model)
    requests = {seq: promised(model.send(sent[seq - 1])) for seq in (5, 3, 4, 2, 1)}
    results = {seq: session.wait(request).json for seq, request in requests.items()}
    for seq, operation in enumerate(five(straight), 1):
        assert straight.do(operation) == results[seq], seq
    assert end(there, model, 6) == twin(there, session, "A", "step", "B", "step")


def test_a_number_means_one_operation(there: House, session: Session) -> None:
    """Another operation under a number, waiting, done or sent at the same moment, is refused and
    changes nothing."""
    model = session.model()
    waiting = promised(model.send(model.step(2)))
    assert model.send(model.backward(2, B)).status == 400
    assert model.send(model.step(2, rate=0.5)).status == 400
    done = model.do(model.backward(1, A))
    for other in (
        model.backward(1, B),
        model.forward(1, A),
        model.step(1),
        model.save(1),
        ("load_weights", model.body(1, path="tinker://x/weights/y", optimizer=False)),
        ("save_weights_for_sampler", model.body(1, sampling_session_seq_id=9)),
    ):
        answer = model.send(other)
        assert answer.status == 400, (other, answer)
        assert "stands for another operation" in answer.json["error"]["message"]
    assert session.wait(f"{model.name}:1").json == done
    assert "metrics" in session.wait(waiting).json
    mine, theirs = model.forward(3, A), model.forward(3, B)
    raced = at_once([lambda: model.send(mine), lambda: model.send(theirs)])
    assert sorted(answer.status for answer in raced) == [200, 400], raced
    assert end(there, model, 4) == twin(there, session, "A", "step")
    other_base = {**session.create(), "model_seq_id": 0, "lora_config": {"rank": 8}}
    assert session.post("create_model", other_base).status == 400


def test_a_publication_sent_again_for_another_session(session: Session) -> None:
    """A retried ephemeral save comes with another sampling session's number: the same answer."""
    model = session.model()
    first, again, later = (
        ("save_weights_for_sampler", model.body(1, sampling_session_seq_id=number))
        for number in (4, 5, 6)
    )
    answers = at_once([lambda: model.send(first), lambda: model.send(again)])
    (request,) = {promised(answer) for answer in answers}
    told = session.wait(request).json
    assert promised(model.send(later)) == request
    assert session.wait(request).json == told
    assert told["path"] is None
    assert greedy(session, told["sampling_session_id"], 0)


def test_a_number_that_never_comes(there: House, session: Session) -> None:
    """It is given up after `gap_s`, not before; those behind it go on; who comes with it later
    has a user error, every time, and no effect.
    """
    model = session.model()
    model.do(model.backward(1, A))
    began = time.monotonic()
    behind = promised(model.send(model.step(3)))
    assert "metrics" in session.wait(behind).json
    took_s = time.monotonic() - began
    assert took_s >= GAP_S, f"given up after {took_s} s"
    for late in (model.backward(2, B), model.step(2), model.backward(2, B)):
        answer = session.wait(promised(model.send(late))).json
        assert answer["category"] == "user", answer
        assert "given up" in answer["error"]
    assert end(there, model, 4) == twin(there, session, "A", "step")


def test_any_numbered_request_uses_its_number_up(there: House, session: Session) -> None:
    """Refused by its form, by its data, by an endpoint that nobody knows or for any other reason:
    a promise that fails as the user's, again and again; those behind it do not wait."""
    model = session.model()
    both = model.body(6, path="tinker://x/weights/y", optimizer=False, session_id=session.id)
    cut = b'{"model_id": "%s", "seq_id": 3, "adam_params": {"eps": NaN}}' % model.name.encode()
    refused: list[tuple[str, Any, str]] = [
        (*model.backward(1, [1, 2, 5000]), JSON),
        ("optim_step", model.body(2, adam_params={"learning_rate": -1}), JSON),
        ("optim_step", cut, JSON),
        ("no_such_operation", model.body(4), JSON),
        ("no_such_operation", message_of(model.name, 5), PROTOBUF),
        ("load_weights", both, JSON),
        ("load_weights", model.body(7, path="x", optimizer=False, session_id=7), JSON),
        ("forward_backward_references", model.body(8), JSON),
        ("forward_backward_references", model.body(9, data=[], loss_fn="ppo"), JSON),
        ("optim_step/", model.body(10), JSON),
    ]
    began = time.monotonic()
    for name, body, kind in refused:
        answers = [post(there, name, body, kind=kind) for _ in range(2)]
        (request,) = {promised(answer) for answer in answers}
        said = session.wait(request).json
        assert said["category"] == "user", (name, said)
        assert said["error"], name
    model.do(model.backward(11, A))
    model.do(model.step(12))
    assert time.monotonic() - began < GAP_S, "somebody waited"
    assert end(there, model, 13) == twin(there, session, "A", "step")
    for body in ({}, {"model_id": model.name}, {"model_id": "nobody", "seq_id": 1}):
        assert session.post("no_such_operation", body).status == 404


def message_of(model: str, seq: int) -> bytes:
    """A message in protobuf, of whatever kind, that begins as all operations do."""
    name = model.encode()
    return bytes([0x0A, len(name)]) + name + bytes([0x10, seq]) + bytes([0x7A, 1, 0])


MESSAGE = """
import base64
from tinker.proto.request_conv import forward_backward_request_to_proto
ids = GIVEN["tokens"]
datum = types.Datum(
    model_input=types.ModelInput.from_ints(ids[:-1]),
    loss_fn_inputs={"target_tokens": ids[1:], "weights": [0.1] * (len(ids) - 1)})
request = types.ForwardBackwardRequest(
    forward_backward_input=types.ForwardBackwardInput(data=[datum], loss_fn="cross_entropy"),
    model_id=GIVEN["model"], seq_id=GIVEN["seq"])
message = forward_backward_request_to_proto(request)
say(body=base64.b64encode(message.SerializeToString()).decode())
"""


def test_the_same_operation_in_every_coding(there: House, session: Session) -> None:
    """JSON and the library's protobuf, plain and as zstd, are one operation: one promise."""
    model = session.model()
    endpoint, body = model.backward(1, A)
    given = {"tokens": A, "model": model.name, "seq": 1}
    message = base64.b64decode(programs.run(there, MESSAGE, given)[0]["body"])
    pack = zstandard.ZstdCompressor().compress
    plain = json.dumps(body).encode()
    answers = [
        post(there, endpoint, message, kind=PROTOBUF),
        post(there, endpoint, plain),
        post(there, endpoint, pack(message), kind=PROTOBUF, coding="zstd"),
        post(there, endpoint, pack(plain), coding="zstd"),
        post(there, endpoint, pack(plain), kind="application/json; charset=utf-8", coding="ZSTD"),
    ]
    assert {promised(answer) for answer in answers} == {f"{model.name}:1"}
    assert "metrics" in session.wait(f"{model.name}:1").json
    assert post(there, endpoint, pack(plain)[:-3], coding="zstd").status == 400
    assert post(there, endpoint, plain, coding="gzip").status == 400
    assert post(there, endpoint, b"\xff\xff", kind=PROTOBUF).status == 400
    model.do(model.step(2))
    assert end(there, model, 3) == twin(there, session, "A", "step")


def greedy(session: Session, sampler: str, seq: int) -> Any:
    """What a sampling session continues with."""
    sample = session.sample(sampler, seq, A, max_tokens=6, temperature=0.0, stop=[])
    return session.wait(promised(session.post("asample", sample))).json["sequences"]


def test_publications_never_share_a_sampling_session(session: Session) -> None:
    """Two models publish under one sampling session's number, which a sampler of the base has as
    well: three samplers, each with its own weights.
    """
    maker = {"session_id": session.id, "sampling_session_seq_id": 0, "base_model": "holdfast/tiny"}
    names = [session.post("create_sampling_session", maker).json["sampling_session_id"]]
    for tokens in (B, C):
        model = session.model()
        model.do(model.backward(1, tokens))
        model.do(model.step(2))
        publish = ("save_weights_for_sampler", model.body(3, sampling_session_seq_id=0))
        names.append(model.do(publish)["sampling_session_id"])
    assert len(set(names)) == 3, names
    found = [str(greedy(session, name, 0)) for name in names]
    assert len(set(found)) == 3, found
    assert [str(greedy(session, name, 1)) for name in names] == found


def test_a_sampling_session_has_one_kind_of_weights(session: Session) -> None:
    """Its number asked for again with other weights is refused, not answered with the old ones."""
    model = session.model()
    path = model.do(("save_weights_for_sampler", model.body(1, path="named")))["path"]
    number = {"session_id": session.id, "sampling_session_seq_id": 0}
    base, saved = {**number, "base_model": "holdfast/tiny"}, {**number, "model_path": path}
    first = session.post("create_sampling_session", saved)
    assert first.status == 200
    assert session.post("create_sampling_session", saved).raw == first.raw
    assert session.post("create_sampling_session", base).status == 400


def test_models_that_could_not_be_made_take_no_room(session: Session) -> None:
    """As many failures as there may be models: the next good one is made all the same."""
    for _ in range(64):
        bad = session.create(base_model="no/such")
        assert "error" in session.wait(promised(session.post("create_model", bad))).json
    assert "metrics" in (model := session.model()).do(model.step(1))
