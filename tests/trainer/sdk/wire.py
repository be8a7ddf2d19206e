"""The protocol as plain HTTP: what no client library would send, or not in this order."""

import concurrent.futures
from collections.abc import Callable
from typing import Any

from gateway.service import Answer, ask
from trainer.house import JOB, House

BASE = "holdfast/tiny"
JSON = "application/json"
PROTOBUF = "application/x-protobuf"


def post(there: House, name: str, body: Any, *, kind: str = JSON, coding: str = "") -> Answer:
    """One request on a connection of its own, through the gateway."""
    headers = {"X-Api-Key": there.service.key, "Content-Type": kind}
    if coding:
        headers["Content-Encoding"] = coding
    service = there.service
    return ask(service.port, "POST", service.way(JOB, f"/api/v1/{name}"), body, headers)


def promised(answer: Answer) -> str:
    """The promise that was given."""
    assert answer.status == 200, answer
    request: str = answer.json["request_id"]
    return request


def at_once(calls: list[Callable[[], Answer]]) -> list[Answer]:
    """Send them all at the same time."""
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        return [one.result() for one in [pool.submit(call) for call in calls]]


class Session:
    """A client's session."""

    def __init__(self, there: House) -> None:
        self.there = there
        self.id: str = self.post("create_session", {"tags": [], "sdk_version": "0"}).json[
            "session_id"
        ]
        self.models = 0

    def post(self, name: str, body: Any) -> Answer:
        return post(self.there, name, body)

    def wait(self, request: str) -> Answer:
        """What came of a promise."""
        while True:
            answer = self.post("retrieve_future", {"request_id": request})
            if answer.status != 408:
                return answer

    def create(self, **changes: Any) -> dict[str, Any]:
        """The body of a request for one more model."""
        self.models += 1
        return {
            "session_id": self.id,
            "model_seq_id": self.models - 1,
            "base_model": BASE,
            "lora_config": {"rank": 4, "seed": 7},
            "type": "create_model",
            **changes,
        }

    def sample(self, sampler: str, seq: int, tokens: list[int], **params: Any) -> dict[str, Any]:
        """The body of a request to continue these tokens."""
        return {
            "sampling_session_id": sampler,
            "seq_id": seq,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": tokens}]},
            "sampling_params": params,
        }

    def result(self, name: str, body: Any) -> Any:
        """What came of a request, in JSON."""
        return self.wait(promised(self.post(name, body))).json

    def model(self) -> "Model":
        """A new model."""
        request = promised(self.post("create_model", self.create()))
        return Model(self, self.wait(request).json["model_id"])


class Model:
    """A model whose numbers the test chooses."""

    def __init__(self, session: Session, name: str) -> None:
        self.session, self.name = session, name

    def body(self, seq: int, **fields: Any) -> dict[str, Any]:
        return {"model_id": self.name, "seq_id": seq, **fields}

    def backward(self, seq: int, tokens: list[int]) -> tuple[str, dict[str, Any]]:
        """forward_backward, as JSON."""
        return "forward_backward", self.body(seq, forward_backward_input=given(tokens))

    def forward(self, seq: int, tokens: list[int]) -> tuple[str, dict[str, Any]]:
        return "forward", self.body(seq, forward_input=given(tokens))

    def step(self, seq: int, rate: float = 1e-2) -> tuple[str, dict[str, Any]]:
        return "optim_step", self.body(seq, adam_params={"learning_rate": rate})

    def save(self, seq: int, name: str = "end") -> tuple[str, dict[str, Any]]:
        return "save_weights", self.body(seq, path=name)

    def send(self, operation: tuple[str, Any]) -> Answer:
        return self.session.post(*operation)

    def do(self, operation: tuple[str, Any]) -> Any:
        """Send it and wait for what comes of it."""
        answer = self.session.wait(promised(self.send(operation)))
        assert answer.status == 200, answer
        return answer.json


def given(tokens: list[int]) -> dict[str, Any]:
    """One sequence, all of it scored."""
    count = len(tokens) - 1
    inputs = {
        "target_tokens": {"data": tokens[1:], "dtype": "int64", "shape": [count]},
        "weights": {"data": [0.1] * count, "dtype": "float32", "shape": [count]},
    }
    text = {"type": "encoded_text", "tokens": tokens[:-1]}
    datum = {"model_input": {"chunks": [text]}, "loss_fn_inputs": inputs}
    return {"data": [datum], "loss_fn": "cross_entropy"}
