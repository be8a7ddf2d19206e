"""The small requests of the real libraries are read as what their users meant."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from holdfast.errors import Mistake
from holdfast.trainer import ops
from holdfast.trainer.wire import requests, sampling, sessions
from holdfast.trainer.wire.body import BadOp, Numbered

from .conftest import Codec

Read = Callable[[bytes], Any]

PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
ADAM = {"learning_rate": 0.5, "grad_clip_norm": 2}
TOKENS = np.asarray([1, 2, 3], dtype="<i4").tobytes()


def longs(*values: int) -> bytes:
    return np.asarray(values, dtype="<i8").tobytes()


SENT: list[tuple[Read, str, dict[str, Any], Any]] = [
    (
        requests.optim_step,
        "OptimStepRequest",
        {"adam_params": ADAM, "model_id": "m", "seq_id": 3},
        Numbered("m", 3, ops.OptimStep(learning_rate=0.5, grad_clip_norm=2.0)),
    ),
    (
        requests.save_weights,
        "SaveWeightsRequest",
        {"model_id": "m", "seq_id": 3, "path": "a-1", "ttl_seconds": 9, "overwrite": True},
        Numbered("m", 3, ops.SaveWeights(name="a-1", ttl_s=9, overwrite=True)),
    ),
    (
        requests.save_weights_for_sampler,
        "SaveWeightsForSamplerRequest",
        {"model_id": "m", "seq_id": 3, "path": "a-1"},
        Numbered("m", 3, ops.SaveForSampler(name="a-1")),
    ),
    (
        requests.save_weights_for_sampler,
        "SaveWeightsForSamplerRequest",
        {"model_id": "m", "seq_id": 3, "sampling_session_seq_id": 0},
        Numbered("m", 3, ops.SaveForSampler(session_seq=0)),
    ),
    (
        requests.load_weights,
        "LoadWeightsRequest",
        {"model_id": "m", "seq_id": 1, "path": "tinker://m/weights/a", "optimizer": True},
        Numbered("m", 1, ops.LoadWeights(path="tinker://m/weights/a", optimizer=True)),
    ),
    (
        requests.create_model,
        "CreateModelRequest",
        {
            "session_id": "s",
            "model_seq_id": 0,
            "base_model": "b/m",
            "lora_config": {"rank": 8, "seed": 5, "train_mlp": False},
            "user_metadata": {"a": "x", "n": [1]},
        },
        requests.NewModel(
            "s",
            0,
            ops.CreateModel(
                session="s",
                base="b/m",
                lora=ops.Lora(rank=8, seed=5, train_mlp=False),
                metadata={"a": "x", "n": "[1]"},
            ),
        ),
    ),
    (
        sampling.create_sampling_session,
        "CreateSamplingSessionRequest",
        {"session_id": "s", "sampling_session_seq_id": 2, "model_path": "tinker://m/w/a"},
        sampling.NewSampler(session="s", sampler_seq=2, path="tinker://m/w/a"),
    ),
    (
        sampling.asample,
        "SampleRequest",
        {
            "sampling_session_id": "s",
            "seq_id": 0,
            "num_samples": 2,
            "prompt": PROMPT,
            "sampling_params": {"max_tokens": 4, "seed": 7, "temperature": 0, "stop": ["x"]},
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
                stop_strings=["x"],
                prompt_logprobs=True,
                topk_prompt_logprobs=2,
            ),
        ),
    ),
    (
        sessions.create_session,
        "CreateSessionRequest",
        {"tags": ["t"], "user_metadata": {"k": "v"}, "sdk_version": "1"},
        sessions.NewSession(["t"], "1", {"k": "v"}),
    ),
    (sessions.heartbeat, "SessionHeartbeatRequest", {"session_id": "s"}, "s"),
    (sessions.model_of, "GetInfoRequest", {"model_id": "m"}, "m"),
    (sessions.model_of, "UnloadModelRequest", {"model_id": "m"}, "m"),
    (
        sampling.retrieve_future,
        "FutureRetrieveRequest",
        {"request_id": "r", "allow_metadata_only": True},
        sampling.Poll("r", True),
    ),
]


@pytest.mark.parametrize("library", ["tinker", "fireworks"])
@pytest.mark.parametrize(("read", "name", "fields", "want"), SENT)
def test_small_requests(
    sdk: Codec, library: str, read: Read, name: str, fields: dict[str, Any], want: Any
) -> None:
    """Each of the small requests means the same from either library."""
    modules = {"SessionHeartbeatRequest": "session_heartbeat_request"}
    modules |= {"FutureRetrieveRequest": "future_retrieve_request"}
    body = sdk.encode(
        "encode_model", library=library, name=name, fields=fields, module=modules.get(name)
    )
    assert read(body) == want


NEWER: list[tuple[Read, str, dict[str, Any], Any]] = [
    (
        requests.load_weights,
        "load_weights_request:LoadWeightsRequest",
        {"session_id": "s", "model_seq_id": 1, "path": "tinker://m/weights/a", "optimizer": False},
        requests.NewModel(
            "s",
            1,
            ops.CreateModel(
                session="s", base="", load=ops.LoadWeights(path="tinker://m/weights/a")
            ),
        ),
    ),
    (
        sampling.retrieve_futures,
        "futures_retrieve_request:FuturesRetrieveRequest",
        {
            "target": {"sampling_session_id": "s", "cloned_sampler_id": 3},
            "prev_cursor": 5,
            "retrieved_request_ids": ["r"],
        },
        sampling.MultiPoll(sampling.Target("s", 3), 5, None, ["r"]),
    ),
    (
        sampling.join_sampling_session,
        "join_sampling_session_request:JoinSamplingSessionRequest",
        {"sampling_session_id": "s"},
        "s",
    ),
    (
        sampling.asample,
        "sample_request:SampleRequest",
        {
            "sampling_session_id": "s",
            "seq_id": 999_999_999_000_000_123,
            "prompt": PROMPT,
            "sampling_params": {"stop": []},
            "prompt_logprobs": True,
            "prompt_logprobs_last_n": 2,
            "topk_sample_logprobs": 3,
        },
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
    (
        sampling.asample,
        "sample_request:SampleRequest",
        {
            "base_model": "b",
            "prompt": PROMPT,
            "sampling_params": {},
            "target_prompt_logprobs": {"data": [1, -1], "dtype": "int64", "shape": [2, 1]},
            "prompt_alt_tokens_k": 4,
        },
        sampling.Sampling(
            base="b",
            op=ops.Sample(
                prompt=TOKENS,
                target_prompt=ops.Cells(shape=(2, 1), values=longs(1, -1)),
                prompt_alternatives=4,
            ),
        ),
    ),
    (
        sampling.asample,
        "sample_request:SampleRequest",
        {
            "base_model": "b",
            "prompt": PROMPT,
            "sampling_params": {},
            "target_prompt_logprobs": {
                "data": [7],
                "dtype": "int64",
                "shape": [2, 3],
                "sparse_crow_indices": [0, 0, 1],
                "sparse_col_indices": [2],
            },
        },
        sampling.Sampling(
            base="b",
            op=ops.Sample(
                prompt=TOKENS,
                target_prompt=ops.Cells(
                    shape=(2, 3), values=longs(7), crow=longs(0, 0, 1), col=longs(2)
                ),
            ),
        ),
    ),
]


@pytest.mark.parametrize(("read", "name", "fields", "want"), NEWER)
def test_newer_requests(
    sdk: Codec, read: Read, name: str, fields: dict[str, Any], want: Any
) -> None:
    """What only `tinker` asks."""
    module, _, name = name.partition(":")
    body = sdk.encode("encode_model", library="tinker", name=name, fields=fields, module=module)
    assert read(body) == want


REFUSED: list[tuple[Read, str, str, dict[str, Any], str]] = [
    (
        requests.optim_step,
        "tinker",
        "OptimStepRequest",
        {
            "optimizer_params": {"type": "dimuon", "learning_rate": 0.1},
            "model_id": "m",
            "seq_id": 3,
        },
        "'dimuon' is not supported",
    ),
    (
        requests.create_model,
        "tinker",
        "CreateModelRequest",
        {
            "session_id": "s", "model_seq_id": 0, "base_model": "b",
            "optimizer_config": {"type": "dimuon", "version": 1},
        },
        "'dimuon' is not supported",
    ),
    (
        requests.create_model,
        "fireworks",
        "CreateModelRequest",
        {
            "session_id": "s", "model_seq_id": 0, "base_model": "b",
            "lora_config": {"rank": 8, "alpha": 64},
        },
        "alpha",
    ),
    (
        sampling.asample,
        "tinker",
        "SampleRequest",
        {
            "base_model": "b", "prompt": PROMPT, "sampling_params": {},
            "record_stability_info": True,
        },
        "stable_reinforce",
    ),
    (
        sampling.asample,
        "tinker",
        "SampleRequest",
        {
            "base_model": "b", "prompt": PROMPT, "sampling_params": {},
            "target_prompt_logprobs": {"data": [1, 2, 3], "dtype": "int64", "shape": [3, 1]},
        },
        r"it has 2 rows",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("read", "library", "name", "fields", "why"), REFUSED)
def test_what_we_cannot_do_is_refused(
    sdk: Codec, read: Read, library: str, name: str, fields: dict[str, Any], why: str
) -> None:
    """Nothing that a library can ask for is silently done differently."""
    body = sdk.encode("encode_model", library=library, name=name, fields=fields)
    with pytest.raises(Mistake, match=why) as caught:
        read(body)
    assert isinstance(caught.value, BadOp) == (read is requests.optim_step)


def test_fireworks_rank_0_means_all_weights(sdk: Codec) -> None:
    """Fireworks' client asks for full training with a rank of 0, and for LoRA with alpha 32."""
    for lora, want in (
        ({"rank": 0}, None),
        ({"rank": 4, "alpha": 32}, ops.Lora(rank=4)),
    ):
        fields = {"session_id": "s", "model_seq_id": 0, "base_model": "b", "lora_config": lora}
        body = sdk.encode(
            "encode_model", library="fireworks", name="CreateModelRequest", fields=fields
        )
        assert requests.create_model(body).op.lora == want
