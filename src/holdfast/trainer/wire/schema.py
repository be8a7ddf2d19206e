"""The protobuf messages of Tinker's public schema that a server reads or writes.

Names, numbers and types are facts of the protocol (package `tinker_public`); the table below
has those that matter here. Wire format knows neither message names nor packages, so these live
in a pool and a package of their own, and never meet a copy that a client library brings along.

A field reads `name=number type`. `*type` is repeated, `?type` has presence, `{type}` is a map
from strings, `group/type` is one of its group. Messages without fields are only recognised.
Fields that are not listed are skipped, whoever sends them.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

__all__ = [
    "DTYPES",
    "ENUMS",
    "MESSAGES",
    "STOP_REASONS",
    "FieldSpec",
    "ForwardBackwardOutput",
    "ForwardBackwardRequest",
    "SampleResponse",
    "fields",
]

PACKAGE = "holdfast.tinker"

DTYPES = {"unspecified": 0, "float32": 1, "int64": 2, "int32": 3, "bfloat16": 4}
STOP_REASONS = {"stop": 0, "length": 1}
ENUMS = {"DType": DTYPES, "StopReason": STOP_REASONS}

MESSAGES = {
    # what is asked
    "ForwardBackwardRequest": """
        model_id=1 string, seq_id=2 int32, data=3 *Datum, loss_fn=4 string,
        loss_fn_config=5 {double}, forward_only=6 bool, loss_fn_config_v2=7 {LossConfigValue}""",
    "LossConfigValue": "number=1 value/double, text=2 value/string",
    "Datum": "model_input=1 *Chunk, loss_fn_inputs=2 {Tensor}",
    "Chunk": "encoded_text=1 chunk/EncodedTextChunk, image=2 chunk/ImageChunk, "
    "dmel=3 chunk/DmelChunk",
    "EncodedTextChunk": "tokens=1 bytes",
    "ImageChunk": "",
    "DmelChunk": "",
    "Tensor": "dense=1 encoding/bytes, sparse_csr=2 encoding/SparseCsr, dtype=3 DType, "
    "shape=4 *int64",
    "SparseCsr": "values=1 bytes, crow_indices=2 bytes, col_indices=3 bytes",
    # what is answered
    "ForwardBackwardOutput": """
        loss_fn_output_type=1 string, loss_fn_outputs=2 *ArrayRecord, metrics=3 {double}""",
    "ArrayRecord": "type_tag=1 string, fields=2 {BatchedTensor}, num_datums=3 int64",
    "BatchedTensor": "data=1 bytes, offsets=2 bytes, dtype=3 DType, trailing_shape=4 *int64",
    "SampleResponse": """
        sequences=1 *SampledSequence, prompt_logprobs=2 ?bytes,
        topk_prompt_logprobs=3 ?TopkLogprobs, prompt_cache_hit_tokens=4 int32,
        target_prompt_logprobs=5 ?Tensor, prompt_alt_tokens=6 ?PromptAltTokens""",
    "PromptAltTokens": "tokens=1 Tensor, logprobs=2 Tensor",
    "SampledSequence": """
        stop_reason=1 StopReason, tokens=2 bytes, logprobs=3 ?bytes,
        topk_sampled_logprobs=4 ?TopkLogprobs""",
    "TopkLogprobs": "token_ids=1 bytes, logprobs=2 bytes, k=3 uint32, length=4 uint32",
}

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bool": _Field.TYPE_BOOL,
    "bytes": _Field.TYPE_BYTES,
    "double": _Field.TYPE_DOUBLE,
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
    "string": _Field.TYPE_STRING,
    "uint32": _Field.TYPE_UINT32,
}


class FieldSpec:
    """One entry of the table: `mark` is "", "*" (repeated), "?" (presence) or "{" (map)."""

    def __init__(self, text: str) -> None:
        named, kind = text.split()
        self.name, _, number = named.partition("=")
        self.number = int(number)
        self.group, _, kind = kind.rpartition("/")
        self.mark = kind[0] if kind[0] in "*?{" else ""
        self.kind = kind.strip("*?{}")


def fields(message: str) -> list[FieldSpec]:
    """The fields of a message of the table."""
    return [FieldSpec(part) for part in MESSAGES[message].split(",") if part.strip()]


def _typed(field: _Field, kind: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
        return
    field.type = _Field.TYPE_ENUM if kind in ENUMS else _Field.TYPE_MESSAGE
    field.type_name = f".{PACKAGE}.{kind}"


def _declare(file: descriptor_pb2.FileDescriptorProto, name: str) -> None:
    message = file.message_type.add(name=name)
    specs = fields(name)
    groups = list(dict.fromkeys(spec.group for spec in specs if spec.group))
    for group in groups:
        message.oneof_decl.add(name=group)
    for spec in specs:
        field = message.field.add(name=spec.name, number=spec.number)
        field.label = _Field.LABEL_REPEATED if spec.mark in ("*", "{") else _Field.LABEL_OPTIONAL
        if spec.mark == "{":
            entry = message.nested_type.add(name=_entry(spec.name))
            entry.options.map_entry = True
            for at, (part, kind) in enumerate((("key", "string"), ("value", spec.kind)), 1):
                half = entry.field.add(name=part, number=at, label=_Field.LABEL_OPTIONAL)
                _typed(half, kind)
            field.type = _Field.TYPE_MESSAGE
            field.type_name = f".{PACKAGE}.{name}.{entry.name}"
            continue
        _typed(field, spec.kind)
        if spec.group:
            field.oneof_index = groups.index(spec.group)
        elif spec.mark == "?":
            field.proto3_optional = True
            field.oneof_index = len(message.oneof_decl)
            message.oneof_decl.add(name=f"_{spec.name}")


def _entry(name: str) -> str:
    """How the schema language names the entries of a map."""
    return "".join(part.capitalize() for part in name.split("_")) + "Entry"


def _build() -> descriptor_pool.DescriptorPool:
    file = descriptor_pb2.FileDescriptorProto(
        name="holdfast/tinker.proto", package=PACKAGE, syntax="proto3"
    )
    for name, values in ENUMS.items():
        enum = file.enum_type.add(name=name)
        for value, number in values.items():
            enum.value.add(name=f"{name}_{value}".upper(), number=number)
    for name in MESSAGES:
        _declare(file, name)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return pool


_POOL = _build()


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


# Their fields are made at run time, so that a type checker knows none of them.
ForwardBackwardRequest: Any = _message("ForwardBackwardRequest")
ForwardBackwardOutput: Any = _message("ForwardBackwardOutput")
SampleResponse: Any = _message("SampleResponse")
