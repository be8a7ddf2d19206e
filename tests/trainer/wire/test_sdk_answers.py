"""What the real libraries make of our answers is what the outcome said."""

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.trainer import ops
from holdfast.trainer.wire import answers
from holdfast.trainer.wire.body import PROTOBUF

from .conftest import FAST, Codec, floats, ints, longs

FLOATS = st.floats(width=32)
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
ACCEPT = {"tinker": PROTOBUF, "fireworks": "application/x-protobuf, application/json"}


def tensor(values: Any, dtype: Any, shape: tuple[int, ...]) -> ops.Tensor:
    data = np.asarray(values, dtype=dtype).tobytes()
    return ops.Tensor(dtype=dtype, shape=shape, data=data)


@st.composite
def outputs(draw: st.DrawFn, values: st.SearchStrategy[float] = FLOATS) -> ops.Output:
    """Ragged datums: lengths and trailing dimensions differ."""
    fields = draw(
        st.dictionaries(
            st.sampled_from(["logprobs", "other"]), st.sampled_from(["float32", "int64"])
        )
    )
    data = []
    for _ in range(draw(st.integers(0, 4))):
        datum = {}
        for name, dtype in fields.items():
            shape = draw(
                st.tuples(st.integers(0, 3)) | st.tuples(st.integers(0, 3), st.integers(1, 3))
            )
            count = math.prod(shape)
            value: Any = values if dtype == "float32" else st.integers(-(2**53), 2**53)
            flat = draw(st.lists(value, min_size=count, max_size=count))
            datum[name] = tensor(flat, dtype, shape)
        data.append(datum)
    metrics = draw(st.dictionaries(st.sampled_from(["loss:sum", "a:mean"]), values))
    return ops.Output(outputs=data, metrics=metrics)


def told(output: ops.Output) -> dict[str, Any]:
    """What `sdk_codec.output` says of an outcome that arrived unchanged."""
    return {
        "type": "ArrayRecord",
        "outputs": [
            {
                name: [
                    one.dtype,
                    list(one.shape),
                    [repr(float(v)) for v in np.frombuffer(one.data, dtype=one.dtype)],
                ]
                for name, one in datum.items()
            }
            for datum in output.outputs
        ],
        "metrics": {name: repr(value) for name, value in output.metrics.items()},
    }


@FAST
@given(output=outputs(), library=st.sampled_from(["tinker", "fireworks"]))
def test_outputs_in_protobuf(sdk: Codec, output: ops.Output, library: str) -> None:
    """Arrays of any lengths, NaN and infinity too, come out bit for bit."""
    answer = answers.result(output, accept=ACCEPT[library])
    assert (answer.status, answer.content_type) == (200, PROTOBUF)
    name = "ForwardBackwardOutput"
    said = sdk.decode("decode_protobuf", answer.body, library=library, name=name)
    assert said == told(output)


@FAST
@given(output=outputs(FINITE))
def test_outputs_in_json(sdk: Codec, output: ops.Output) -> None:
    """Fireworks' client reads JSON, too, where protobuf was not asked for."""
    answer = answers.result(output, accept="application/json")
    assert answer.content_type == "application/json"
    name = "ForwardBackwardOutput"
    said = sdk.decode("decode_json", answer.body, library="fireworks", name=name)
    assert said == told(output)


TOPK = ops.TopK(
    k=2,
    length=3,
    tokens=ints(9, 9, 5, 6, 7, 9),
    logprobs=floats(math.nan, math.nan, -0.5, -1.5, -0.25, math.nan),
)
TOPK_LISTS = [None, [[5, -0.5], [6, -1.5]], [[7, -0.25]]]
SAMPLED = ops.Sampled(
    sequences=[
        ops.Sequence(stop_reason="stop", tokens=ints(5, 0), logprobs=floats(-0.5, -2.0)),
        ops.Sequence(
            stop_reason="length",
            tokens=ints(1, 2, 3),
            logprobs=floats(-1.0, -1.5, -0.125),
            topk=TOPK,
        ),
    ],
    prompt_logprobs=floats(math.nan, -0.5, -0.75),
    topk_prompt=TOPK,
    target_prompt=ops.Cells(shape=(2, 3), values=floats(-0.5), crow=longs(0, 0, 1), col=longs(2)),
    alternatives=ops.TopK(k=1, length=2, tokens=ints(5, 0), logprobs=floats(-0.5, -2.0)),
)


@pytest.mark.parametrize(
    ("library", "accept"),
    [*ACCEPT.items(), ("fireworks", "application/json")],
)
def test_samples(sdk: Codec, library: str, accept: str) -> None:
    """Tokens, log probabilities and the likeliest tokens; what was not scored is None."""
    answer = answers.result(SAMPLED, accept=accept)
    form = "protobuf" if answers.accepts_protobuf(accept) else "json"
    said = sdk.decode(f"decode_{form}", answer.body, library=library, name="SampleResponse")
    topk = TOPK_LISTS if library == "tinker" else None
    assert said["sequences"] == [
        ["stop", [5, 0], ["-0.5", "-2.0"], None],
        ["length", [1, 2, 3], ["-1.0", "-1.5", "-0.125"], topk],
    ]
    assert said["prompt_logprobs"] == [None, -0.5, -0.75]
    assert said["topk_prompt_logprobs"] == TOPK_LISTS
    if library == "tinker":
        assert said["targets"] == ["float32", [2, 3], [-0.5], [0, 0, 1], [2]]
        assert said["alternatives"] == [
            ["int64", [2, 1], [5, 0], None, None],
            ["float32", [2, 1], [-0.5, -2.0], None, None],
        ]


def test_a_blank_is_no_token() -> None:
    """What the engine has left blank along the prompt is None in JSON, too, and not token 0."""
    blank = ops.TopK(k=1, length=2, tokens=ints(0, 5), logprobs=floats(-99999.0, -0.5))
    said = json.loads(answers.result(ops.Sampled(sequences=[], topk_prompt=blank)).body)
    assert said["topk_prompt_logprobs"] == [None, [[5, -0.5]]]


Row = tuple[str, str, answers.Answer, dict[str, Any]]
"""Which libraries hear it, as which class of theirs, the answer, and what it says among others."""

BOTH, TINKER = "tinker fireworks", "tinker"
MODULES = {
    "FuturesRetrieveResponse": "futures_retrieve_response",
    "JoinSamplingSessionResponse": "join_sampling_session_response",
    "SaveWeightsForSamplerResponseInternal": "save_weights_for_sampler_response",
    "TryAgainResponse": "try_again_response",
}
"""Where the libraries have classes that are not among their `types`."""
LOADED = ops.Created(model="m", path="tinker://m/weights/a")
SMALL: list[Row] = [
    (BOTH, "CreateModelResponse", answers.result(ops.Created(model="m")), {"model_id": "m"}),
    (BOTH, "OptimStepResponse",
     answers.result(ops.Stepped(metrics={"a:mean": 0.5, "b:mean": math.nan})),
     {"metrics": {"a:mean": 0.5}}),
    (BOTH, "SaveWeightsResponse", answers.result(ops.Saved(path="p")), {"path": "p"}),
    (BOTH, "LoadWeightsResponse", answers.result(ops.Loaded(path="p")), {"path": "p"}),
    (BOTH, "UnloadModelResponse", answers.result(ops.Done(what="unload_model", model="m")),
     {"model_id": "m"}),
    (BOTH, "UntypedAPIFuture", answers.promise("r", model="m"),
     {"request_id": "r", "model_id": "m"}),
    (BOTH, "GetServerCapabilitiesResponse",
     answers.capabilities([answers.Offer("b/m", 512)], probe="/probe"), {}),
    (BOTH, "GetInfoResponse",
     answers.info("m", "b/m", arch="qwen", tokenizer="t", lora_rank=8),
     {"model_id": "m", "is_lora": True, "lora_rank": 8, "model_name": "b/m"}),
    (BOTH, "CreateSessionResponse", answers.typed("create_session", session_id="s"), {}),
    (TINKER, "LoadWeightsResponse", answers.result(LOADED),
     {"model_id": "m", "path": "tinker://m/weights/a"}),
    (TINKER, "UntypedAPIFuture", answers.promise("r", sequences=["a", "b"]),
     {"request_id": "r", "sample_sequence_ids": ["a", "b"]}),
    (TINKER, "SaveWeightsForSamplerResponseInternal",
     answers.result(ops.SamplerSaved(sampling_session="x")),
     {"path": None, "sampling_session_id": "x"}),
    (TINKER, "SaveWeightsForSamplerResponseInternal",
     answers.result(ops.SamplerSaved(path="p")), {"path": "p"}),
    (TINKER, "FuturesRetrieveResponse", answers.completions([("a", 5), ("b", None)], 7),
     {"completions": [
         {"state": "finished", "request_id": "a", "response_payload_uncompressed_size": 5},
         {"state": "failed", "request_id": "b"}],
      "cursor": 7}),
    (TINKER, "GetSamplerResponse", answers.sampler_info("x", "b/m", None),
     {"sampler_id": "x", "base_model": "b/m", "model_path": None}),
    (TINKER, "WeightsInfoResponse", answers.weights_info("b/m", ops.Lora(rank=8)),
     {"base_model": "b/m", "is_lora": True, "lora_rank": 8, "train_attn": True}),
    (TINKER, "JoinSamplingSessionResponse",
     answers.typed("join_sampling_session", client_counter=3), {"client_counter": 3}),
    (TINKER, "TryAgainResponse", answers.pending("r", "paused_capacity"),
     {"request_id": "r", "queue_state": "paused_capacity"}),
    (TINKER, "RequestFailedResponse", answers.result(ops.Failed(error="no", category="server")),
     {"error": "no", "category": "server"}),
]  # fmt: skip


@pytest.mark.parametrize(("libraries", "name", "answer", "want"), SMALL)
def test_small_answers(
    sdk: Codec, libraries: str, name: str, answer: answers.Answer, want: dict[str, Any]
) -> None:
    """Each of the small answers passes the library's own types, and says what it should."""
    for library in libraries.split():
        module = MODULES.get(name)
        said = sdk.decode("decode_json", answer.body, library=library, name=name, module=module)
        assert want.items() <= said.items()


def test_the_capabilities_name_the_models(sdk: Codec) -> None:
    """`get_server_capabilities` tells names and lengths."""
    answer = answers.capabilities([answers.Offer("b/m", 512)])
    name = "GetServerCapabilitiesResponse"
    said = sdk.decode("decode_json", answer.body, library="tinker", name=name)
    (model,) = said["supported_models"]
    assert (model["model_name"], model["max_context_length"]) == ("b/m", 512)
    assert model["trainable"]
    assert "probe" not in json.loads(answer.body)
