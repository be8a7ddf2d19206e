"""Where bodies end, however the bytes are cut; and what is slow. Pure."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.http.wires import chunked
from holdfast.gateway.http import Limits
from holdfast.gateway.http.framing import Chunked, Malformed
from holdfast.gateway.http.pace import Pace


def cuts(data: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({place % (len(data) + 1) for place in places} | {0, len(data)})
    return [data[start:end] for start, end in itertools.pairwise(ends)]


def read(parts: list[bytes]) -> tuple[bytes, bytes | str]:
    """The body, and what follows it, or why nothing does."""
    decoder, body = Chunked(8192), b""
    try:
        for number, part in enumerate(parts, 1):
            body += decoder.feed(part)
            if decoder.done:
                return body, decoder.rest + b"".join(parts[number:])
    except Malformed:
        return b"", "malformed"
    return body, "more"


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.binary(min_size=1, max_size=40), max_size=6),
    st.binary(max_size=60),
    st.lists(st.integers(0, 10_000), max_size=12),
)
def test_chunks_are_read_the_same_however_they_are_cut(
    pieces: list[bytes], rest: bytes, places: list[int]
) -> None:
    """A chunked body and what follows it depend on the bytes alone; so does, for any bytes, the
    verdict."""
    assert read(cuts(chunked(*pieces) + rest, places)) == (b"".join(pieces), rest)
    assert read([rest]) == read(cuts(rest, places)) == read([bytes([byte]) for byte in rest])


@pytest.mark.parametrize(
    ("moved", "slow"),
    [([0, 10, 20, 30], False), ([0, 5, 9, 12], True), ([0, 0, 30, 30, 60], False)],
)
def test_a_pace_is_kept_on_average(moved: list[int], slow: bool) -> None:
    """30 bytes in each window of 3 seconds; not in each second."""
    pace = Pace(Limits(pace_s=3.0, pace_bytes_per_s=10))
    verdicts = [pace.too_slow(figure, 100.0 + at) for at, figure in enumerate(moved)]
    assert (True in verdicts) is slow


def test_a_transfer_that_had_to_wait_is_not_slow() -> None:
    """The window begins again after a rest."""
    pace = Pace(Limits(pace_s=3.0, pace_bytes_per_s=10))
    assert not pace.too_slow(0, 100.0)
    pace.rest()
    assert not pace.too_slow(0, 200.0)
    assert not pace.too_slow(0, 202.0)
    assert pace.too_slow(0, 203.0)
