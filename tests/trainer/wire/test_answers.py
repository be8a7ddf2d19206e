"""Answers as such: their status, their size, and that they are functions of the outcome."""

import json

import msgspec
import pytest

from holdfast.errors import (
    Conflict,
    Corrupt,
    Denied,
    Exists,
    Fenced,
    Gone,
    HoldfastError,
    Mistake,
    NoRoom,
    NotFound,
    TooLarge,
    UnknownOutcome,
)
from holdfast.trainer import ops
from holdfast.trainer.wire import answers
from holdfast.trainer.wire.body import PROTOBUF, BadOp

BIG = ops.Output(
    outputs=[{"logprobs": ops.Tensor(dtype="float32", shape=(1000,), data=bytes(4000))}]
)


def test_large_results_are_announced_to_those_who_allow_it() -> None:
    """The announced size is that of the body that comes when it is asked for."""
    whole = answers.result(BIG, accept=PROTOBUF, inline_bytes=4000)
    assert whole.content_type == PROTOBUF
    told = answers.result(BIG, accept=PROTOBUF, metadata_only=True, inline_bytes=4000)
    said = json.loads(told.body)
    assert said == {"status": "complete_metadata", "response_payload_size": len(whole.body)}
    fits = answers.result(BIG, accept=PROTOBUF, metadata_only=True, inline_bytes=len(whole.body))
    assert fits == whole


def test_equal_outcomes_have_equal_bytes() -> None:
    """The order in which fields and metrics were made does not show."""
    one = ops.Tensor(dtype="float32", shape=(1,), data=bytes(4))
    two = ops.Tensor(dtype="int64", shape=(1,), data=bytes(8))
    first = ops.Output(outputs=[{"a": one, "b": two}], metrics={"x:sum": 1.0, "y:sum": 2.0})
    second = ops.Output(outputs=[{"b": two, "a": one}], metrics={"y:sum": 2.0, "x:sum": 1.0})
    assert answers.result(first, accept=PROTOBUF) == answers.result(second, accept=PROTOBUF)
    kept = ops.decode_outcome(ops.encode(first))
    assert answers.result(kept, accept=PROTOBUF) == answers.result(first, accept=PROTOBUF)


@pytest.mark.parametrize(
    ("accept", "protobuf"),
    [
        ("application/x-protobuf", True),
        ("application/json;q=0.1, Application/X-Protobuf ; q=1", True),
        ("application/json", False),
        ("*/*", False),
        ("", False),
        ("application/x-protobuffer", False),
    ],
)
def test_protobuf_is_for_those_who_ask_for_it(accept: str, protobuf: bool) -> None:
    """By its name, in any place of the header."""
    assert answers.accepts_protobuf(accept) is protobuf


def test_pending_is_a_408_with_the_state_of_the_queue() -> None:
    """The client reads the state from the body of a 408, and asks again."""
    answer = answers.pending("r", "paused_rate_limit", "why")
    assert answer.status == 408
    said = json.loads(answer.body)
    assert (said["queue_state"], said["queue_state_reason"]) == ("paused_rate_limit", "why")


RETRIED = {408, 409, 429, *range(500, 600)}


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (NotFound("x"), 404),
        (TooLarge("x"), 413),
        (Denied("x"), 403),
        (Exists("x"), 400),
        (Mistake("x"), 400),
        (BadOp("x", model="m", seq=1), 400),
        (Gone("x"), 410),
        (Fenced("x"), 421),
        (Conflict("x"), 503),
        (NoRoom("x"), 503),
        (UnknownOutcome("x"), 503),
        (Corrupt("x"), 500),
    ],
)
def test_refusals(error: HoldfastError, status: int) -> None:
    """Only what may go well later has a status that the client tries again on."""
    answer = answers.refusal(error)
    assert answer.status == status
    assert (status in RETRIED) == (not isinstance(error, Mistake | Gone | Fenced))
    headers = dict(answer.headers)
    assert (headers.get("x-should-retry") == "false") == (status == 404)
    assert ("retry-after-ms" in headers) == (status == 503)
    assert json.loads(answer.body)["error"]["message"] == "x"


def test_a_wait_that_the_error_asks_for_is_passed_on() -> None:
    """`retry_after_s` becomes a header in milliseconds."""
    error = Conflict("x")
    error.retry_after_s = 1.5
    assert ("retry-after-ms", "1500") in answers.refusal(error).headers


def test_what_is_not_finite_is_null_in_json() -> None:
    """A client that reads JSON sees that there is no number, and never a wrong one."""
    nan = ops.Tensor(dtype="float32", shape=(1,), data=b"\x00\x00\xc0\x7f")
    answer = answers.result(ops.Output(outputs=[{"a": nan}], metrics={"m:sum": float("inf")}))
    said = msgspec.json.decode(answer.body)
    assert said["loss_fn_outputs"][0]["a"]["data"] == [None]
    assert said["metrics"] == {}
