"""The client libraries' own encoders and decoders, in a process of their own environment.

Reads one JSON object a line (`{"do": ..., ...}`) and writes one (`{"ok": ...}` or
`{"error": ...}`); bytes are base64. It is run with `.venv-sdks/bin/python` by `conftest.py`.
"""

import base64
import json
import sys
from importlib import import_module
from typing import Any

Spec = dict[str, Any]

HOMES = {
    "tinker": ("tinker", "tinker"),
    "fireworks": ("fireworks.training.sdk", "fireworks.training.sdk._core"),
}
"""Where a library has its types, and where all the rest."""


def kind_of(ask: Spec) -> Any:
    """The class of a library that is asked for; `module`: it is not among the library's types."""
    module = ask.get("module")
    home = f"{HOMES[ask['library']][0]}.types" + (f".{module}" if module else "")
    return getattr(import_module(home), ask["name"])


def inner(library: str, name: str) -> Any:
    """One of a library's own modules."""
    return import_module(f"{HOMES[library][1]}.{name}")


def posted(library: str, model: Any) -> bytes:
    """The JSON that a library makes of a request."""
    dump = inner(library, "_compat").model_dump
    return json.dumps(dump(model, exclude_unset=False, exclude_none=True, mode="json")).encode()


def numbers(array: Any) -> list[Any]:
    """Flat and exact: JSON would lose what is not finite."""
    return [repr(float(one)) for one in array.flatten().tolist()]


def tensor(types: Any, spec: Spec) -> Any:
    numpy = import_module("numpy")
    data = numpy.asarray([float(x) if spec["dtype"] == "float32" else x for x in spec["data"]])
    return types.TensorData(
        data=data.astype(spec["dtype"]),
        dtype=spec["dtype"],
        shape=spec["shape"],
        sparse_crow_indices=spec.get("crow"),
        sparse_col_indices=spec.get("col"),
    )


def datum(types: Any, spec: Spec) -> Any:
    chunks = [types.EncodedTextChunk(tokens=tokens) for tokens in spec["chunks"]]
    inputs = {name: tensor(types, one) for name, one in spec["inputs"].items()}
    return types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs=inputs)


def request(types: Any, spec: Spec, *, forward: bool = False) -> Any:
    given = types.ForwardBackwardInput(
        data=[datum(types, one) for one in spec["data"]],
        loss_fn=spec["loss"],
        loss_fn_config=spec["config"],
    )
    at = {"model_id": spec["model"], "seq_id": spec["seq"]}
    if forward:
        return types.ForwardRequest(forward_input=given, **at)
    return types.ForwardBackwardRequest(forward_backward_input=given, **at)


def encode_tinker(ask: Spec) -> bytes:
    """The bytes that `tinker` posts to forward_backward."""
    convert = import_module("tinker.proto.request_conv").forward_backward_request_to_proto
    message = convert(request(import_module("tinker.types"), ask["spec"]))
    message.forward_only = ask["forward"]
    body: bytes = message.SerializeToString()
    if ask["zstd"]:
        body = import_module("zstandard").ZstdCompressor().compress(body)
    return body


def encode_fireworks(ask: Spec) -> bytes:
    """The JSON that `fireworks-ai` posts to forward or forward_backward."""
    types = import_module("fireworks.training.sdk.types")
    asked = request(types, ask["spec"], forward=ask["forward"])
    convert = inner("fireworks", "lib._pydantic_conv").to_pydantic_request
    return posted("fireworks", convert(asked))


def encode_model(ask: Spec) -> bytes:
    """The JSON of any other request, made by the library's own class."""
    return posted(ask["library"], kind_of(ask)(**ask["fields"]))


def decode_protobuf(ask: Spec) -> Spec:
    """What either library makes of a protobuf answer."""
    conv = inner(ask["library"], "proto.response_conv")
    body = base64.b64decode(ask["body"])
    if ask["name"] == "ForwardBackwardOutput":
        return output(conv.deserialize_forward_backward_output(body))
    return sample(conv.deserialize_sample_response(body))


def output(said: Any) -> Spec:
    outputs = [
        {name: [one.dtype, one.shape, numbers(one.to_numpy())] for name, one in datum.items()}
        for datum in said.loss_fn_outputs
    ]
    metrics = {name: repr(value) for name, value in said.metrics.items()}
    return {"type": said.loss_fn_output_type, "outputs": outputs, "metrics": metrics}


def sample(said: Any) -> Spec:
    return {
        "sequences": [
            [
                one.stop_reason,
                one.tokens,
                [repr(value) for value in one.logprobs or []],
                getattr(one, "topk_logprobs", None),
            ]
            for one in said.sequences
        ],
        "prompt_logprobs": said.prompt_logprobs,
        "topk_prompt_logprobs": said.topk_prompt_logprobs,
        "targets": matrix(getattr(said, "target_prompt_logprobs", None)),
        "alternatives": [
            matrix(getattr(getattr(said, "prompt_alt_tokens", None), name, None))
            for name in ("tokens", "logprobs")
        ],
    }


def matrix(said: Any) -> Any:
    if said is None:
        return None
    return [said.dtype, said.shape, said.data, said.sparse_crow_indices, said.sparse_col_indices]


def decode_json(ask: Spec) -> Any:
    """What either library makes of a JSON answer, through the path that its futures take."""
    read = inner(ask["library"], "lib._pydantic_conv").deserialize_json_response
    said = read(json.loads(base64.b64decode(ask["body"])), kind_of(ask))
    if ask["name"] == "ForwardBackwardOutput":
        return output(said)
    if ask["name"] == "SampleResponse":
        return sample(said)
    return said.model_dump(mode="json")


def schema(_: Spec) -> Spec:
    """The public schema, as the library has it."""
    proto = import_module("google.protobuf.descriptor_pb2").FileDescriptorProto()
    import_module("tinker.proto.tinker_public_pb2").DESCRIPTOR.CopyToProto(proto)
    messages = {
        message.name: {
            field.name: [
                field.number,
                field.label,
                field.type,
                field.type_name.rpartition(".")[2],
                field.proto3_optional,
                message.oneof_decl[field.oneof_index].name
                if field.HasField("oneof_index")
                else "",
            ]
            for field in message.field
        }
        for top in proto.message_type
        for message in [top, *top.nested_type]
    }
    enums = {enum.name: {one.name: one.number for one in enum.value} for enum in proto.enum_type}
    return {"messages": messages, "enums": enums}


def main() -> None:
    """Answer until the input ends."""
    for line in sys.stdin:
        ask = json.loads(line)
        try:
            said = globals()[ask.pop("do")](ask)
            if isinstance(said, bytes):
                said = base64.b64encode(said).decode()
            line = json.dumps({"ok": said})
        except Exception as error:  # noqa: BLE001  it is what the test wants to hear of
            line = json.dumps({"error": f"{type(error).__name__}: {error}"})
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
