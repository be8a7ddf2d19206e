"""Batches by reference: fetched once, journaled, and trained on like those that come inline."""

import json
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from holdfast import transfer
from holdfast.transfer.shm.folder import remove
from trainer.house import JOB, House, house


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


def post(there: House, path: str, body: dict[str, Any]) -> Any:
    answer = there.service.ask("POST", there.service.way(JOB, f"/api/v1/{path}"), body)
    return answer.status, answer.json


def model(there: House) -> str:
    _, session = post(there, "create_session", {"tags": [], "sdk_version": "0"})
    _, made = post(
        there,
        "create_model",
        {"session_id": session["session_id"], "model_seq_id": 0, "base_model": "holdfast/tiny"},
    )
    result(there, made["request_id"])
    return str(made["model_id"])


def result(there: House, request: str) -> Any:
    while True:
        status, said = post(there, "retrieve_future", {"request_id": request})
        if status != 408:
            return said


TOKENS = np.array([1, 20, 30, 40], dtype=np.int32)
TARGETS = np.array([20, 30, 40, 2], dtype=np.int64)


def by_reference(store: transfer.Store, model: str, key: str) -> dict[str, Any]:
    refs = store.put({f"{key}/t": TOKENS, f"{key}/y": TARGETS})
    told = {key: [ref.key, ref.generation, ref.checksum, ref.nbytes] for key, ref in refs.items()}
    datum = {"tokens": told[f"{key}/t"], "loss_fn_inputs": {"target_tokens": told[f"{key}/y"]}}
    return {"model_id": model, "seq_id": 1, "loss_fn": "cross_entropy", "data": [datum]}


def test_a_batch_by_reference_is_the_same_as_inline(there: House, name: str) -> None:
    """Result and journal entry are equal, whichever way the batch came."""
    one, other = model(there), model(there)
    with transfer.connect(name) as store:
        status, promise = post(
            there, "forward_backward_references", by_reference(store, one, "same")
        )
    assert status == 200, promise
    tensor = {"data": TARGETS.tolist(), "dtype": "int64", "shape": [4]}
    chunk = {"type": "encoded_text", "tokens": TOKENS.tolist()}
    datum = {"model_input": {"chunks": [chunk]}, "loss_fn_inputs": {"target_tokens": tensor}}
    given = {"data": [datum], "loss_fn": "cross_entropy"}
    body = {"model_id": other, "seq_id": 1, "forward_backward_input": given}
    status, inline = post(there, "forward_backward", body)
    assert status == 200, inline
    assert result(there, promise["request_id"]) == result(there, inline["request_id"])


def test_values_that_are_gone_are_not_needed_again(there: House, name: str) -> None:
    """A duplicate, and a trainer that replays, go by the journal."""
    name_of_model = model(there)
    with transfer.connect(name) as store:
        body = by_reference(store, name_of_model, "gone")
        _, promise = post(there, "forward_backward_references", body)
        before = result(there, promise["request_id"])
        store.delete(["gone/t", "gone/y"])
    again = post(there, "forward_backward_references", body)
    assert again == (200, promise)
    there.kill_trainer()
    assert post_until(there, "forward_backward_references", body) == (200, promise)
    assert result(there, promise["request_id"]) == before


def post_until(there: House, path: str, body: dict[str, Any]) -> Any:
    while True:
        status, said = post(there, path, body)
        if status not in (502, 503):
            return status, said


def test_missing_values_do_not_use_the_number_up(there: House, name: str) -> None:
    """The answer names what is missing, and the number may be sent again with other values."""
    name_of_model = model(there)
    with transfer.connect(name) as store:
        body = by_reference(store, name_of_model, "lost")
        store.delete(["lost/y"])
        status, said = post(there, "forward_backward_references", body)
        assert status == 424
        assert "lost/y" in json.dumps(said)
        status, promise = post(
            there, "forward_backward_references", by_reference(store, name_of_model, "found")
        )
    assert status == 200, promise
    assert "error" not in result(there, promise["request_id"])


def test_what_is_no_batch_is_refused(there: House) -> None:
    """The message names the field."""
    status, said = post(there, "forward_backward_references", {"model_id": "x", "seq_id": 1})
    assert status == 400
    assert "data" in json.dumps(said)


def test_what_is_given_inline_counts_like_a_reference(there: House, name: str) -> None:
    """Weights that the caller has computed make the same loss as the same weights in the store."""
    one, other = model(there), model(there)
    weights = np.array([0.0, 0.5, 1.0, 0.25], dtype=np.float32)
    with transfer.connect(name) as store:
        ref = store.put({"w": weights})["w"]
        referred = by_reference(store, one, "in")
        told = [ref.key, ref.generation, ref.checksum, ref.nbytes]
        referred["data"][0]["loss_fn_inputs"]["weights"] = told
        inline = by_reference(store, other, "in2")
        inline["data"][0]["inline"] = {"weights": weights.tolist()}
        promises = [post(there, "forward_backward_references", one) for one in (referred, inline)]
    assert [status for status, _ in promises] == [200, 200], promises
    results = [result(there, promise["request_id"]) for _, promise in promises]
    assert results[0] == results[1]
    assert results[0]["metrics"]["loss:sum"] > 0


def test_published_versions(there: House) -> None:
    """Versions of a model's channel: the same number again is the same, an older one is refused,
    and a changed model has another hash."""
    name_of_model = model(there)

    def publish(seq: int, version: int) -> Any:
        body = {"model_id": name_of_model, "seq_id": seq, "version": version}
        _, promise = post(there, "publish_weights", body)
        return result(there, promise["request_id"])

    first = publish(1, 5)
    assert (first["channel"], first["version"]) == (f"{name_of_model}.policy", 5)
    assert publish(1, 5) == first
    assert publish(2, 6)["content"] == first["content"]
    refused = publish(3, 4)
    assert refused["category"] == "user"
    assert publish(4, 7)["content"] == first["content"]
    status, said = post(
        there, "publish_weights", {"model_id": name_of_model, "seq_id": 5, "version": -1}
    )
    assert status == 200
    assert result(there, said["request_id"])["category"] == "user"
