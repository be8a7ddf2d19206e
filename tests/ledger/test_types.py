"""Prefixes and parts of keys. The limits are held by the conformance suite, on every back end."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.errors import Mistake
from holdfast.ledger import join
from holdfast.ledger.types import prefix_end


@given(st.text(min_size=1), st.text(min_size=1))
@example("\U0010ffff", "\U0010ffff\U0010ffff")
@example("\ud7ff", "\ue000")
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
