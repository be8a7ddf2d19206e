"""Requests that no library would send: every one is refused, with its reason."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.errors import Mistake
from holdfast.trainer.wire import requests, sampling, sessions
from holdfast.trainer.wire.body import BadOp, Limits

from .conftest import of

LIMITS = Limits(tokens=10, samples=4, stops=2, topk=5)
NUMBERED = {"model_id": "m", "seq_id": 7}
ADAM = "adam_params"
PROMPT = {"prompt": {"chunks": [{"tokens": [1, 2, 3]}]}, "sampling_params": {}}
BASE = {**PROMPT, "base_model": "b"}
MODEL = {"session_id": "s", "model_seq_id": 0, "base_model": "b"}
BAD_ADAM = {"learning_rate": -1, "beta1": 1, "beta2": -0.1, "eps": 0, "grad_clip_norm": -1,
            "weight_decay": "x"}  # fmt: skip
BAD_NAMES = ("a/b", "../x", ".hidden", "-x", "", "x" * 129, "x\n")
BAD_PARAMS = [
    *(("max_tokens", 0), ("temperature", -1), ("seed", 2**63)),
    *(("top_p", 0), ("top_p", 1.5), ("top_k", 0), ("top_k", -2)),
    *(("stop", [""]), ("stop", [-1]), ("stop", [1, 2, 3])),
]


@pytest.mark.parametrize(
    ("ask", "fields", "why"),
    [
        (requests.optim_step, {}, "adam_params"),
        *((requests.optim_step, {ADAM: {key: bad}}, key) for key, bad in BAD_ADAM.items()),
        (requests.optim_step, {ADAM: {}, "grad_accumulation_normalization": "num_sequences"},
         "divide"),
        *((requests.save_weights, {"path": bad}, "path") for bad in BAD_NAMES),
        (requests.save_weights, {"ttl_seconds": 0}, "ttl_seconds"),
        (requests.save_weights_for_sampler, {"path": "x", "sampling_session_seq_id": 1},
         "exclude"),
        (requests.load_weights, {"optimizer": True}, "path"),
        (requests.load_weights, {"path": "p"}, "optimizer"),
        (requests.load_weights, {"path": "p", "optimizer": True,
                                 "optimizer_config": {"type": "dimuon"}}, "dimuon"),
    ],
)  # fmt: skip
def test_bad_operations(ask: Callable[[bytes], Any], fields: dict[str, Any], why: str) -> None:
    """Each names the field, and carries the number that is now used up."""
    with pytest.raises(BadOp, match=why) as caught:
        ask(json.dumps(NUMBERED | fields).encode())
    assert (caught.value.model, caught.value.seq) == ("m", 7)


@pytest.mark.parametrize(
    ("ask", "fields", "why"),
    [
        (requests.load_weights, {"path": "p", "optimizer": True, "session_id": "s",
                                 "model_id": "m"}, "exclude"),
        (requests.load_weights, {"path": "p", "optimizer": True, "session_id": "s"},
         "model_seq_id"),
        (requests.load_weights, {"path": "p", "optimizer": True}, "model_id"),
        (requests.create_model, MODEL | {"base_model": ""}, "base_model"),
        (requests.create_model, MODEL | {"model_seq_id": -1}, "model_seq_id"),
        (requests.create_model, MODEL | {"lora_config": {}}, "rank"),
        (requests.create_model, MODEL | {"lora_config": {"rank": -1}}, "rank"),
        (requests.create_model, MODEL | {"lora_config": {"rank": 1, "init_method": "x"}}, "init"),
        (requests.create_model, MODEL | {"lora_config": {
            "rank": 1, "train_mlp": False, "train_attn": False, "train_unembed": False}},
         "trains nothing"),
        (requests.create_model, MODEL | {"projection_head_dim": 4}, "projection_head_dim"),
        (requests.create_model, MODEL | {"user_metadata": {"k": "x" * 5000}}, "user_metadata"),
        (sessions.create_session, {"tags": ["x"] * 100}, "tags"),
        (sampling.create_sampling_session, {"session_id": "s", "sampling_session_seq_id": 0},
         "model_path"),
        (sampling.asample, PROMPT, "base_model"),
        (sampling.asample, PROMPT | {"sampling_session_id": "s"}, "seq_id"),
        (sampling.asample, BASE | {"num_samples": 0}, "num_samples"),
        (sampling.asample, BASE | {"num_samples": 5}, "num_samples"),
        (sampling.asample, BASE | {"topk_prompt_logprobs": 6}, "likeliest"),
        (sampling.asample, BASE | {"topk_sample_logprobs": -1}, "topk_sample"),
        (sampling.asample, BASE | {"prompt_alt_tokens_k": 6}, "prompt_alt_tokens_k"),
        (sampling.asample, BASE | {"prompt_alt_tokens_k": -1}, "prompt_alt_tokens_k"),
        *((sampling.asample, BASE | {"target_prompt_logprobs": given}, why) for given, why in (
            ({"data": [1, 1], "dtype": "float32", "shape": [2, 1]}, "int64"),
            ({"data": [1, 1], "dtype": "int64"}, "two dimensions"),
            ({"data": [1, 1], "dtype": "int64", "shape": [1, 2]}, "it has 2 rows"),
            ({"data": [1] * 12, "dtype": "int64", "shape": [2, 6]}, "at most 5 columns"),
            ({"data": [-1, -1], "dtype": "int64", "shape": [2, 1]}, "names no token"),
            ({"data": [1], "dtype": "int64", "shape": [2, 1]}, "does not fit"),
            ({"data": [1], "dtype": "int64", "shape": [2, 1], "sparse_crow_indices": [0]},
             "belong together"),
            ({"data": [1], "dtype": "int64", "shape": [2, 1], "sparse_crow_indices": [0, 1, 2],
              "sparse_col_indices": [0]}, "go up"),
        )),
        (sampling.asample, BASE | {"prompt": {"chunks": []}}, "prompt"),
        (sampling.asample, BASE | {"prompt": {"chunks": [{"tokens": [1] * 11}]}}, "prompt"),
        (sampling.asample, BASE | {"prompt": {"chunks": [{"type": "image"}]}}, "'image'"),
        (sampling.asample, BASE | {"prompt_logprobs_last_n": 1}, "needs `prompt_logprobs`"),
        (sampling.asample, BASE | {"prompt_logprobs_last_n": 3, "prompt_logprobs": True},
         "longer"),
        *((sampling.asample, BASE | {"sampling_params": {key: bad}}, key)
          for key, bad in BAD_PARAMS),
        (sampling.asample, BASE | {"sampling_params": {"stop": ["a", 1]}}, "not both"),
        (of(sampling.Poll), {}, "request_id"),
        (sampling.retrieve_futures, {"target": {"type": "x", "sampling_session_id": "s"}}, "'x'"),
        (of(sampling.Poll), {"request_id": ""}, "request_id"),
        (of(sessions.OfSession), {}, "session_id"),
    ],
)  # fmt: skip
def test_bad_questions(ask: Callable[..., Any], fields: dict[str, Any], why: str) -> None:
    """What has no number is a plain mistake that names the field."""
    more = (LIMITS,) if ask is sampling.asample else ()
    with pytest.raises(Mistake, match=why) as caught:
        ask(json.dumps(fields).encode(), *more)
    assert not isinstance(caught.value, BadOp)


@pytest.mark.parametrize(
    ("stop", "strings", "tokens"),
    [
        (None, None, None),
        ([], None, []),
        ("a", ["a"], None),
        (["a"], ["a"], None),
        ([5], None, [5]),
    ],
)
def test_stops(stop: Any, strings: list[str] | None, tokens: list[int] | None) -> None:
    """No list and an empty list differ: the end of the text stops, or nothing does."""
    body = json.dumps(BASE | {"sampling_params": {"stop": stop}}).encode()
    op = sampling.asample(body).op
    assert (op.stop_strings, op.stop_tokens) == (strings, tokens)
