"""The ledger's nouns and limits: tables for the pure functions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import Mistake, TooLarge
from holdfast.ledger import MAX_KEY_BYTES, MAX_TXN_BYTES, MAX_TXN_OPS, Get, Put, absent, join
from holdfast.ledger.types import check_key, check_ttl, check_txn, prefix_end, writes

PREFIXES = ["/", "/a", "/a/", "/é", "/ÿ", "/\ud7ff", "/\U0010ffff", "/a\U0010ffff", "/~"]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_prefix_end_is_behind_everything_with_the_prefix(prefix: str) -> None:
    """In the order of bytes, also for characters at the edges of UTF-8."""
    end = prefix_end(prefix).encode()
    for tail in ("", "a", "\U0010ffff" * 3):
        assert prefix.encode() <= (prefix + tail).encode() < end


@given(st.text(min_size=1), st.text(min_size=1))
def test_prefix_end_separates(prefix: str, key: str) -> None:
    """A key lies in the range exactly when it begins with the prefix."""
    prefix, key = "/" + prefix, "/" + key
    inside = prefix.encode() <= key.encode() < prefix_end(prefix).encode()
    assert inside == key.startswith(prefix)


@pytest.mark.parametrize("key", ["", "a", "/a\n", "/\x00", "/\x7f", "/\ud800", 7, b"/a", None])
def test_what_is_no_key_is_a_mistake(key: object) -> None:
    with pytest.raises(Mistake):
        check_key(key)  # type: ignore[arg-type]


def test_limits_are_exact() -> None:
    """At the limit it is accepted, one beyond it is refused with advice."""
    check_key("/" + "k" * (MAX_KEY_BYTES - 1))
    with pytest.raises(TooLarge, match="1025 bytes"):
        check_key("/" + "k" * MAX_KEY_BYTES)
    with pytest.raises(TooLarge):
        check_key("/" + "é" * (MAX_KEY_BYTES // 2))
    check_txn([], [Get("/a")] * MAX_TXN_OPS, [])
    with pytest.raises(TooLarge, match="split it"):
        check_txn([], [Get("/a")] * (MAX_TXN_OPS + 1), [])
    with pytest.raises(TooLarge):
        check_txn([absent("/a")] * (MAX_TXN_OPS + 1), [], [])
    check_txn([], [Put("/a", b"x" * (MAX_TXN_BYTES - 2))], [])
    with pytest.raises(TooLarge, match="reference"):
        check_txn([], [Put("/a", b"x" * (MAX_TXN_BYTES - 1))], [])
    for ttl_s in (0.0, -1.0, 1e9, float("nan")):
        with pytest.raises(Mistake):
            check_ttl(ttl_s)


def test_names_from_outside_cannot_climb() -> None:
    """A part of a key is one level, whatever somebody calls their run."""
    assert join("runs", "my run") == "/runs/my run"
    for part in ("", "a/b", "/", "a\nb"):
        with pytest.raises(Mistake):
            join("runs", part)


def test_writes() -> None:
    assert writes([Get("/a"), Put("/a", b"")])
    assert not writes([Get("/a")])
