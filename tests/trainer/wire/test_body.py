"""Bodies: bounded whatever they claim, and read whole or not at all."""

import tracemalloc

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import Mistake, TooLarge
from holdfast.trainer.wire.body import JSON, PROTOBUF, BadOp, Limits, numbered, read_body
from holdfast.trainer.wire.requests import _Save

FAST = settings(max_examples=50, deadline=None, derandomize=True)
SMALL = Limits(body_bytes=1 << 20, plain_bytes=1 << 20)


@FAST
@given(plain=st.binary(max_size=5000), repeat=st.integers(1, 50), level=st.sampled_from([1, 3, 9]))
def test_what_was_compressed_comes_back(plain: bytes, repeat: int, level: int) -> None:
    """With or without the size in its header, whatever the level."""
    plain *= repeat
    for sized in (True, False):
        packed = zstandard.ZstdCompressor(level=level, write_content_size=sized).compress(plain)
        assert read_body(packed, PROTOBUF, "zstd", SMALL) == plain
    assert read_body(plain, PROTOBUF, "identity", SMALL) == plain


def test_a_bomb_is_refused_before_it_goes_off() -> None:
    """32 GiB in 1 MiB, as dense as the format allows: refused, and never allocated."""
    # A frame without a size, a window of 128 KiB, then blocks of 128 KiB that repeat one byte.
    block = ((128 << 10) << 3 | 1 << 1).to_bytes(3, "little") + b"x"
    bomb = b"\x28\xb5\x2f\xfd\x00\x38" + block * ((1 << 18) - 2)
    assert len(bomb) <= SMALL.body_bytes
    tracemalloc.start()
    with pytest.raises(TooLarge, match="decompressed"):
        read_body(bomb, JSON, "zstd", SMALL)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 128 << 20


PACKED = zstandard.ZstdCompressor().compress(bytes(range(256)) * 40)


@pytest.mark.parametrize(
    ("raw", "kind", "coding", "why"),
    [
        (PACKED[:-1], PROTOBUF, "zstd", "cut short"),
        (b"", PROTOBUF, "zstd", "cut short"),
        (PACKED + b"x", PROTOBUF, "zstd", "behind"),
        (PACKED + bytes(5000), PROTOBUF, "zstd", "behind"),
        (PACKED + PACKED, PROTOBUF, "zstd", "behind"),
        (b"not zstd at all", PROTOBUF, "zstd", "cannot be decompressed"),
        (b"x", PROTOBUF, "gzip", "gzip"),
        (b"x", PROTOBUF, "zstd, zstd", "zstd, zstd"),
        (b"x", "text/plain", "", "text/plain"),
        (bytes((1 << 20) + 1), JSON, "", "1048576 are allowed"),
    ],
)
def test_bad_bodies(raw: bytes, kind: str, coding: str, why: str) -> None:
    """Each is refused, and says what to send instead."""
    with pytest.raises(Mistake, match=why):
        read_body(raw, kind, coding, SMALL)


NO_NUMBERS = (b"0", b"-1", b"2147483648", b'"7"', b"true", b"7.0", b"null")


@pytest.mark.parametrize(
    ("body", "known", "why"),
    [
        (b'{"model_id":"m","seq_id":7,"path":5}', True, r"\$\.path"),
        (b'{"model_id":"m","seq_id":7,"path":NaN}', True, "malformed"),
        (b'{"model_id":"m","seq_id":7,"ttl_seconds":Infinity}', True, "malformed"),
        (b'{"model_id":"m","seq_id":7,"path":"\xff"}', True, "utf-8"),
        *((b'{"model_id":"m","seq_id":%s}' % seq, False, "seq_id") for seq in NO_NUMBERS),
        (b'{"model_id":"m"}', False, "seq_id"),
        (b'{"seq_id":7}', False, "model_id"),
        (b'{"model_id":"","seq_id":7}', False, "model_id"),
        (b'{"model_id":"' + b"m" * 257 + b'","seq_id":7}', False, "model_id"),
        (b'{"model_id":"m","seq_id":7', False, "truncated"),
        (b'{"model_id":"m","seq_id":7}{}', False, "malformed"),
        (b"[1]", False, "object"),
        (b"", False, "truncated"),
        (b'{"model_id":"m","seq_id":7,"x":' + b"[" * 100_000, False, "recursion"),
    ],
)
def test_who_is_to_blame(body: bytes, known: bool, why: str) -> None:
    """Where model and number can be read, the error has them; the message names the field."""
    with pytest.raises(Mistake, match=why) as caught:
        numbered(body, _Save)
    assert isinstance(caught.value, BadOp) == known
    if isinstance(caught.value, BadOp):
        assert (caught.value.model, caught.value.seq) == ("m", 7)


def test_fields_of_newer_clients_are_ignored() -> None:
    """What nobody here knows does no harm."""
    body = b'{"model_id":"m","seq_id":2147483647,"type":"x","new":{"a":[1]}}'
    assert numbered(body, _Save)[:2] == ("m", 2**31 - 1)
