"""Frames prove what they are: every damage is seen, whatever it is."""

from collections.abc import Callable
from typing import Any

import pytest

from holdfast.errors import Corrupt, Mistake, TooLarge
from holdfast.transfer import connect
from holdfast.transfer.frame import (
    MAX_HEAD,
    MAX_KEY_BYTES,
    Kind,
    Ref,
    check_key,
    make_head,
    open_head,
    prove,
)

PAYLOAD = bytes(range(150))


def framed(
    kind: Kind = "tensor", key: str = "key", payload: bytes = PAYLOAD
) -> tuple[bytearray, Ref]:
    shape = (3, 50) if kind == "tensor" else ()
    dtype = "U8" if kind == "tensor" else ""
    head, ref = make_head(kind, key, 5, (payload,), dtype=dtype, shape=shape)
    return bytearray(head + payload), ref


def opened(frame: bytearray, wanted: Ref | str) -> bytes:
    head = open_head(frame, wanted)
    payload = bytes(frame[head.nbytes :])
    prove(head, (payload,), wanted)
    return payload


@pytest.mark.parametrize("payload", [b"", PAYLOAD])
def test_every_flipped_bit_is_seen(payload: bytes) -> None:
    """Of head and payload; and it is called damage, never another value."""
    frame, ref = framed("bytes" if not payload else "tensor", payload=payload)
    for wanted in (ref, "key"):
        for bit in range(8 * len(frame)):
            frame[bit // 8] ^= 1 << bit % 8
            with pytest.raises(Corrupt):
                opened(frame, wanted)
            frame[bit // 8] ^= 1 << bit % 8


def test_every_other_length_is_seen() -> None:
    """Nothing at all, a part of it, or more than it."""
    frame, ref = framed()
    for length in range(len(frame)):
        with pytest.raises(Corrupt):
            opened(frame[:length], ref)
    with pytest.raises(Corrupt):
        opened(frame + b"\0", ref)
    with pytest.raises(Corrupt):
        opened(bytearray(len(frame)), ref)


def test_a_value_of_another_key_is_not_this_one() -> None:
    frame, ref = framed(key="other")
    with pytest.raises(Corrupt, match="another key"):
        opened(frame, "key")
    with pytest.raises(Corrupt, match="another key"):
        opened(frame, Ref("key", ref.generation, ref.checksum, ref.nbytes))


def test_a_head_alone_can_be_read() -> None:
    """Of a longer frame, its beginning and its length suffice."""
    frame, ref = framed(payload=bytes(5000))
    assert open_head(frame[:MAX_HEAD], "key", len(frame)).generation == ref.generation
    with pytest.raises(Corrupt):
        open_head(frame[:MAX_HEAD], "key", len(frame) + 1)


def test_the_largest_head_fits() -> None:
    key = "k" * MAX_KEY_BYTES
    head, _ = make_head("tensor", key, 2**63 - 1, (b"x",), dtype="U8", shape=(1,) * 64)
    assert len(head) <= MAX_HEAD
    found = open_head(head, key, len(head) + 1)
    assert found.shape == (1,) * 64


def test_keys() -> None:
    """A store refuses what is not a key, whatever it is asked to do with it."""
    for key in ("a", "ü" * 256, "k" * 512, "a b/c"):
        assert check_key(key) == key
    store = connect("memory:")
    calls: list[Callable[[Any], object]] = [check_key, lambda key: store.put({key: 1})]
    calls += [lambda key: store.get([key]), lambda key: store.exists([key])]
    for call in calls:
        for bad in ("", "a\nb", "a\0", "\x7f", "\udc80", None, 5, b"a"):
            with pytest.raises(Mistake):
                call(bad)
        for long in ("k" * 513, "ü" * 257):
            with pytest.raises(TooLarge):
                call(long)
