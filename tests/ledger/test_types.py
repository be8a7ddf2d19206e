"""Prefixes and parts of keys. The limits are held by the conformance suite, on every back end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import Mistake
from holdfast.ledger import join
from holdfast.ledger.types import prefix_end

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


def test_names_from_outside_cannot_climb() -> None:
    """A part of a key is one level, whatever somebody calls their run."""
    assert join("runs", "my run") == "/runs/my run"
    for part in ("", "a/b", "/", "a\nb"):
        with pytest.raises(Mistake):
            join("runs", part)
