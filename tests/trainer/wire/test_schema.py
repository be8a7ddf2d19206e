"""Our table of messages is what the client library speaks."""

from google.protobuf import descriptor_pb2

from holdfast.trainer.wire import schema

from .conftest import Codec

Field = descriptor_pb2.FieldDescriptorProto


def test_every_field_is_one_of_the_protocol(sdk: Codec) -> None:
    """Number, label, type, presence and group of each field agree with the library's."""
    theirs = sdk.do("schema")
    for name in schema.MESSAGES:
        known = theirs["messages"][name]
        for spec in schema.fields(name):
            number, label, kind, type_name, presence, group = known[spec.name]
            where = f"{name}.{spec.name}"
            assert spec.number == number, where
            assert (spec.mark in ("*", "{")) == (label == Field.LABEL_REPEATED), where
            assert (spec.mark == "?") == presence, where
            assert spec.group == ("" if presence else group), where
            if spec.mark == "{":
                key, value = (theirs["messages"][type_name][one] for one in ("key", "value"))
                assert key[2] == Field.TYPE_STRING, where
                kind, type_name = value[2], value[3]
            if kind in (Field.TYPE_MESSAGE, Field.TYPE_ENUM):
                assert spec.kind == type_name, where
            else:
                assert Field.Type.Name(kind) == f"TYPE_{spec.kind.upper()}", where


def test_enums_are_those_of_the_protocol(sdk: Codec) -> None:
    """Every value that the library knows is in ours under the same number."""
    theirs = sdk.do("schema")["enums"]
    for name, prefix in (("DType", "DTYPE_"), ("StopReason", "STOP_REASON_")):
        known = {key.removeprefix(prefix).lower(): value for key, value in theirs[name].items()}
        assert known == schema.ENUMS[name]
