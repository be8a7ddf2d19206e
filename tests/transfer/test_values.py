"""Values become bytes and come back the same; what cannot be carried is refused by name."""

import collections
import dataclasses
import datetime
import enum
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from holdfast import transfer
from holdfast.errors import Corrupt, Mistake
from holdfast.transfer.frame import make_head, open_head
from holdfast.transfer.values import pack, unpack
from transfer.samples import same


def there_and_back(value: object) -> Any:
    store = transfer.connect("memory:")
    return store.get(store.put({"k": value}).values())["k"]


@pytest.mark.parametrize(
    "value", [bytearray(b"abc"), memoryview(b"abc"), memoryview(b"aXbXc")[::2]]
)
def test_everything_made_of_bytes_comes_back_as_bytes(value: object) -> None:
    assert same(there_and_back(value), b"abc")


def test_what_lies_contiguous_is_not_copied() -> None:
    """Packing a tensor costs nothing: the payload is its memory."""
    tensor = torch.zeros(1000)
    (part,) = pack("k", tensor).parts
    tensor[0] = 1.0
    assert bytes(part[:4]) == np.float32(1.0).tobytes()


def test_a_tensor_comes_back_without_gradients() -> None:
    found = there_and_back(torch.ones(3, requires_grad=True))
    assert not found.requires_grad
    assert torch.equal(found, torch.ones(3))


class Odd:
    pass


class Text(str):
    __slots__ = ()


def nested(depth: int) -> list[Any]:
    return [nested(depth - 1)] if depth else []


class Colour(enum.IntEnum):
    RED = 1


Pair = collections.namedtuple("Pair", "left right")


@dataclasses.dataclass
class Point:
    x: int = 1


@pytest.mark.parametrize(
    ("value", "instead"),
    [
        (Colour.RED, "use value.value"),
        ([Pair(1, 2)], r"use tuple\(value\)"),
        ({"a": Point()}, r"use dataclasses.asdict\(value\)"),
        (collections.OrderedDict(a=1), r"use dict\(value\)"),
        (Path("/x"), r"use str\(value\)"),
        (datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC), r"use value.isoformat\(\)"),
        (np.array([range(3), None], dtype=object), r"use list\(value\)"),
        (torch.float32, r"use str\(value\)"),
        (Odd(), "use plain numbers, text"),
        ({"a": {"b": Odd}}, ""),
        ({(1, 2): 3}, ""),
        (np.array([object()]), ""),
        (np.array(["2020-01-01"], "M8[D]"), ""),
        (np.array([(1, "x")], [("a", "i4"), ("b", "O")]), ""),
        (torch.empty(3, device="meta"), ""),
        ("\ud800", ""),
        ([Text("x")], ""),
        (nested(200), ""),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_carried_is_refused(value: object, instead: str) -> None:
    """With the key in the message, before anything is sent, and what to use where that is known.

    Also a subclass, for its base.
    """
    reason = rf"^the value of some key has .*cannot be carried: {instead}"
    with pytest.raises(Mistake, match=reason if instead else "some key"):
        pack("some key", value)


def test_arrays_of_objects_are_not_pickled() -> None:
    """Their bytes are msgpack with the items in it; a dtype that is none of theirs is damage."""
    packed = pack("k", np.array(["text-1", None], dtype=object))
    assert (packed.kind, b"text-1" in bytes(packed.parts[0])) == ("object", True)
    assert b"numpy" not in bytes(packed.parts[0])
    for dtype in ("<i8", "V8", "m8[s]", ",", "<U9999999999"):
        data = msgspec.msgpack.encode([dtype, [1], False, ["x"]])
        payload = msgspec.msgpack.encode(msgspec.msgpack.Ext(9, data))
        head, _ = make_head("object", "k", 1, (payload,))
        with pytest.raises(Corrupt, match="k: "):
            unpack(open_head(head + payload, "k"), memoryview(payload))


def test_an_object_that_is_none_is_damage() -> None:
    head, _ = make_head("object", "k", 1, (b"\xc1",))
    with pytest.raises(Corrupt):
        unpack(open_head(head, "k", len(head) + 1), memoryview(b"\xc1"))
