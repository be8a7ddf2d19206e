"""Batches by reference: fetched once, journaled, and trained on like those that come inline."""

import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from gateway.service import Answer
from holdfast import transfer
from holdfast.transfer.shm.folder import remove
from trainer.house import House, house
from trainer.sdk.wire import Session, promised


@pytest.fixture(scope="module")
def name() -> Iterator[str]:
    """A store of its own."""
    made = f"test-{uuid.uuid4().hex[:12]}"
    yield f"shm://{made}?budget=64M&segment=4M"
    remove(made)


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory, name: str) -> Iterator[House]:
    with house(tmp_path_factory.mktemp("house"), "--store", name) as made:
        yield made


@pytest.fixture
def session(there: House) -> Session:
    return Session(there)


def result(session: Session, promise: Answer) -> Any:
    return session.wait(promised(promise)).json


TOKENS = np.array([1, 20, 30, 40], dtype=np.int32)
BY_REFERENCE = "forward_backward_references"
TARGETS = np.array([20, 30, 40, 2], dtype=np.int64)


def by_reference(store: transfer.Store, model: str, key: str) -> dict[str, Any]:
    refs = store.put({f"{key}/t": TOKENS, f"{key}/y": TARGETS})
    told = {key: [ref.key, ref.generation, ref.checksum, ref.nbytes] for key, ref in refs.items()}
    datum = {"tokens": told[f"{key}/t"], "loss_fn_inputs": {"target_tokens": told[f"{key}/y"]}}
    return {"model_id": model, "seq_id": 1, "loss_fn": "cross_entropy", "data": [datum]}


def test_a_batch_by_reference_is_the_same_as_inline(session: Session, name: str) -> None:
    """Result and journal entry are equal, whichever way the batch came."""
    one, other = session.model().name, session.model().name
    with transfer.connect(name) as store:
        referred = session.post(BY_REFERENCE, by_reference(store, one, "same"))
    tensor = {"data": TARGETS.tolist(), "dtype": "int64", "shape": [4]}
    chunk = {"type": "encoded_text", "tokens": TOKENS.tolist()}
    datum = {"model_input": {"chunks": [chunk]}, "loss_fn_inputs": {"target_tokens": tensor}}
    given = {"data": [datum], "loss_fn": "cross_entropy"}
    body = {"model_id": other, "seq_id": 1, "forward_backward_input": given}
    inline = session.post("forward_backward", body)
    assert result(session, referred) == result(session, inline)


def test_values_that_are_gone_are_not_needed_again(session: Session, name: str) -> None:
    """A duplicate, and a trainer that replays, go by the journal."""
    model = session.model().name
    with transfer.connect(name) as store:
        body = by_reference(store, model, "gone")
        first = session.post(BY_REFERENCE, body)
        before = result(session, first)
        store.delete(["gone/t", "gone/y"])
    assert session.post(BY_REFERENCE, body).json == first.json
    session.there.kill_trainer()
    while (again := session.post(BY_REFERENCE, body)).status in (502, 503):
        pass
    assert again.json == first.json
    assert result(session, again) == before


def test_missing_values_do_not_use_the_number_up(session: Session, name: str) -> None:
    """The answer names what is missing, and the number may be sent again with other values."""
    model = session.model().name
    with transfer.connect(name) as store:
        body = by_reference(store, model, "lost")
        store.delete(["lost/y"])
        answer = session.post(BY_REFERENCE, body)
        assert answer.status == 424
        assert b"lost/y" in answer.raw
        found = session.post(BY_REFERENCE, by_reference(store, model, "found"))
    assert "error" not in result(session, found)


def test_what_is_given_inline_counts_like_a_reference(session: Session, name: str) -> None:
    """Weights that the caller has computed make the same loss as the same weights in the store."""
    one, other = session.model().name, session.model().name
    weights = np.array([0.0, 0.5, 1.0, 0.25], dtype=np.float32)
    with transfer.connect(name) as store:
        ref = store.put({"w": weights})["w"]
        referred = by_reference(store, one, "in")
        told = [ref.key, ref.generation, ref.checksum, ref.nbytes]
        referred["data"][0]["loss_fn_inputs"]["weights"] = told
        inline = by_reference(store, other, "in2")
        inline["data"][0]["inline"] = {"weights": weights.tolist()}
        promises = [session.post(BY_REFERENCE, one) for one in (referred, inline)]
    results = [result(session, promise) for promise in promises]
    assert results[0] == results[1]
    assert results[0]["metrics"]["loss:sum"] > 0


def test_published_versions(session: Session) -> None:
    """Versions of a model's channel: the same number again is the same, an older one is refused,
    and a changed model has another hash."""
    model = session.model()

    def publish(seq: int, version: int) -> Any:
        return model.do(("publish_weights", model.body(seq, version=version)))

    first = publish(1, 5)
    assert (first["channel"], first["version"]) == (f"{model.name}.policy", 5)
    assert publish(1, 5) == first
    assert publish(2, 6)["content"] == first["content"]
    refused = publish(3, 4)
    assert refused["category"] == "user"
    assert publish(4, 7)["content"] == first["content"]
    assert publish(5, -1)["category"] == "user"
