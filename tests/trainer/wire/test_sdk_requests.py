"""The small requests of the real libraries are read as what their users meant."""

from collections.abc import Callable
from typing import Any

import pytest

from holdfast.errors import Mistake
from holdfast.trainer import ops
from holdfast.trainer.wire import requests, sampling, sessions
from holdfast.trainer.wire.body import BadOp, Numbered

from .conftest import Codec, ints, longs, of

Read = Callable[[bytes], Any]
Row = tuple[str, Read, str, dict[str, Any], Any]
"""Which libraries send it, who reads it, the library's class, its fields, and what is meant."""

BOTH, TINKER, FIREWORKS = "tinker fireworks", "tinker", "fireworks"
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
TOKENS = ints(1, 2, 3)
PATH = "tinker://m/weights/a"
BASE = {"base_model": "b", "prompt": PROMPT, "sampling_params": {}}
NEW = {"session_id": "s", "model_seq_id": 0, "base_model": "b/m"}
OF_SESSION = {"sampling_session_id": "s", "seq_id": 999_999_999_000_000_123, "prompt": PROMPT}
MODULES = {
    "FutureRetrieveRequest": "future_retrieve_request",
    "FuturesRetrieveRequest": "futures_retrieve_request",
    "JoinSamplingSessionRequest": "join_sampling_session_request",
    "SessionHeartbeatRequest": "session_heartbeat_request",
}
"""Where the libraries have classes that are not among their `types`."""


def operation(read: Read, name: str, op: ops.Op, **fields: Any) -> Row:
    """An operation of a model."""
    return BOTH, read, name, {"model_id": "m", "seq_id": 3, **fields}, Numbered("m", 3, op)


def created(lora: dict[str, Any], want: ops.Lora | None, libraries: str = BOTH) -> Row:
    """A new model."""
    fields = {**NEW, "lora_config": lora, "user_metadata": {"a": "x", "n": [1]}}
    op = ops.CreateModel(session="s", base="b/m", lora=want, metadata={"a": "x", "n": "[1]"})
    read = requests.create_model
    return libraries, read, "CreateModelRequest", fields, requests.NewModel("s", 0, op)


def scored(given: dict[str, Any], want: ops.Cells) -> Row:
    """A sample that asks for tokens along the prompt."""
    fields = {**BASE, "target_prompt_logprobs": given, "prompt_alt_tokens_k": 4}
    op = ops.Sample(prompt=TOKENS, target_prompt=want, prompt_alternatives=4)
    return TINKER, sampling.asample, "SampleRequest", fields, sampling.Sampling(base="b", op=op)


SENT: list[Row] = [
    operation(
        requests.optim_step,
        "OptimStepRequest",
        ops.OptimStep(learning_rate=0.5, grad_clip_norm=2.0),
        adam_params={"learning_rate": 0.5, "grad_clip_norm": 2},
    ),
    operation(
        requests.save_weights,
        "SaveWeightsRequest",
        ops.SaveWeights(name="a-1", ttl_s=9, overwrite=True),
        path="a-1",
        ttl_seconds=9,
        overwrite=True,
    ),
    operation(
        requests.save_weights_for_sampler,
        "SaveWeightsForSamplerRequest",
        ops.SaveForSampler(name="a-1"),
        path="a-1",
    ),
    operation(
        requests.save_weights_for_sampler,
        "SaveWeightsForSamplerRequest",
        ops.SaveForSampler(session_seq=0),
        sampling_session_seq_id=0,
    ),
    operation(
        requests.load_weights,
        "LoadWeightsRequest",
        ops.LoadWeights(path=PATH, optimizer=True),
        path=PATH,
        optimizer=True,
    ),
    (
        TINKER,
        requests.load_weights,
        "LoadWeightsRequest",
        {"session_id": "s", "model_seq_id": 1, "path": PATH, "optimizer": False},
        requests.NewModel(
            "s", 1, ops.CreateModel(session="s", base="", load=ops.LoadWeights(path=PATH))
        ),
    ),
    created({"rank": 8, "seed": 5, "train_mlp": False}, ops.Lora(rank=8, seed=5, train_mlp=False)),
    # Fireworks' client asks for full training with a rank of 0, and for LoRA with alpha 32.
    created({"rank": 0}, None, FIREWORKS),
    created({"rank": 4, "alpha": 32}, ops.Lora(rank=4), FIREWORKS),
    (
        BOTH,
        sampling.create_sampling_session,
        "CreateSamplingSessionRequest",
        {"session_id": "s", "sampling_session_seq_id": 2, "model_path": PATH},
        sampling.NewSampler(session="s", sampler_seq=2, path=PATH),
    ),
    (
        BOTH,
        sampling.asample,
        "SampleRequest",
        {
            "sampling_session_id": "s",
            "seq_id": 0,
            "num_samples": 2,
            "prompt": PROMPT,
            "sampling_params": {
                "max_tokens": 4,
                "seed": 7,
                "temperature": 0,
                "top_k": 3,
                "top_p": 0.5,
                "stop": ["x"],
            },
            "prompt_logprobs": True,
            "topk_prompt_logprobs": 2,
        },
        sampling.Sampling(
            session="s",
            seq=0,
            op=ops.Sample(
                prompt=TOKENS,
                num_samples=2,
                max_tokens=4,
                seed=7,
                temperature=0.0,
                top_k=3,
                top_p=0.5,
                stop_strings=["x"],
                prompt_logprobs=True,
                topk_prompt_logprobs=2,
            ),
        ),
    ),
    (
        TINKER,
        sampling.asample,
        "SampleRequest",
        OF_SESSION
        | {"sampling_params": {"stop": []}, "topk_sample_logprobs": 3}
        | {"prompt_logprobs": True, "prompt_logprobs_last_n": 2},
        sampling.Sampling(
            session="s",
            seq=999_999_999_000_000_123,
            op=ops.Sample(
                prompt=TOKENS,
                stop_tokens=[],
                prompt_logprobs=True,
                prompt_logprobs_last_n=2,
                topk_sample_logprobs=3,
            ),
        ),
    ),
    scored(
        {"data": [1, -1], "dtype": "int64", "shape": [2, 1]},
        ops.Cells(shape=(2, 1), values=longs(1, -1)),
    ),
    scored(
        {"data": [7], "dtype": "int64", "shape": [2, 3]}
        | {"sparse_crow_indices": [0, 0, 1], "sparse_col_indices": [2]},
        ops.Cells(shape=(2, 3), values=longs(7), crow=longs(0, 0, 1), col=longs(2)),
    ),
    (
        BOTH,
        sessions.create_session,
        "CreateSessionRequest",
        {"tags": ["t"], "user_metadata": {"k": "v"}, "sdk_version": "1"},
        sessions.NewSession(["t"], "1", {"k": "v"}),
    ),
    (
        BOTH,
        of(sessions.OfSession),
        "SessionHeartbeatRequest",
        {"session_id": "s"},
        sessions.OfSession("s"),
    ),
    (BOTH, of(sessions.OfModel), "GetInfoRequest", {"model_id": "m"}, sessions.OfModel("m")),
    (BOTH, of(sessions.OfModel), "UnloadModelRequest", {"model_id": "m"}, sessions.OfModel("m")),
    (
        BOTH,
        of(sampling.Poll),
        "FutureRetrieveRequest",
        {"request_id": "r", "allow_metadata_only": True},
        sampling.Poll("r", True),
    ),
    (
        TINKER,
        sampling.retrieve_futures,
        "FuturesRetrieveRequest",
        {
            "target": {"sampling_session_id": "s", "cloned_sampler_id": 3},
            "prev_cursor": 5,
            "retrieved_request_ids": ["r"],
        },
        sampling.MultiPoll(sampling.Target("s", 3), 5, None, ["r"]),
    ),
    (
        TINKER,
        of(sampling.OfSampler),
        "JoinSamplingSessionRequest",
        {"sampling_session_id": "s"},
        sampling.OfSampler("s"),
    ),
]


@pytest.mark.parametrize(("libraries", "read", "name", "fields", "want"), SENT)
def test_small_requests(
    sdk: Codec, libraries: str, read: Read, name: str, fields: dict[str, Any], want: Any
) -> None:
    """Each of the small requests means the same from every library that sends it."""
    for library in libraries.split():
        module = MODULES.get(name)
        body = sdk.encode("encode_model", library=library, name=name, fields=fields, module=module)
        assert read(body) == want


DIMUON = {"type": "dimuon", "learning_rate": 0.1}
TARGETS = {"data": [1, 2, 3], "dtype": "int64", "shape": [3, 1]}
REFUSED: list[Row] = [
    (TINKER, requests.optim_step, "OptimStepRequest",
     {"optimizer_params": DIMUON, "model_id": "m", "seq_id": 3}, "'dimuon' is not supported"),
    (TINKER, requests.create_model, "CreateModelRequest",
     {**NEW, "optimizer_config": {"type": "dimuon", "version": 1}}, "'dimuon' is not supported"),
    (FIREWORKS, requests.create_model, "CreateModelRequest",
     {**NEW, "lora_config": {"rank": 8, "alpha": 64}}, "alpha"),
    (TINKER, sampling.asample, "SampleRequest",
     {**BASE, "record_stability_info": True}, "stable_reinforce"),
    (TINKER, sampling.asample, "SampleRequest",
     {**BASE, "target_prompt_logprobs": TARGETS}, "it has 2 rows"),
]  # fmt: skip


@pytest.mark.parametrize(("library", "read", "name", "fields", "why"), REFUSED)
def test_what_we_cannot_do_is_refused(
    sdk: Codec, library: str, read: Read, name: str, fields: dict[str, Any], why: str
) -> None:
    """Nothing that a library can ask for is silently done differently."""
    body = sdk.encode("encode_model", library=library, name=name, fields=fields)
    with pytest.raises(Mistake, match=why) as caught:
        read(body)
    assert isinstance(caught.value, BadOp) == (read is requests.optim_step)
