"""Where bodies end, and what a head says: pure, however the bytes are cut."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.http.wires import chunked
from holdfast.gateway.http import Limits
from holdfast.gateway.http.framing import Chunked, Malformed
from holdfast.gateway.http.head import parse_request
from holdfast.gateway.http.pace import Pace


def cuts(data: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({place % (len(data) + 1) for place in places} | {0, len(data)})
    return [data[start:end] for start, end in itertools.pairwise(ends)]


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.binary(min_size=1, max_size=40), max_size=6),
    st.binary(max_size=20),
    st.lists(st.integers(0, 10_000), max_size=12),
)
def test_a_chunked_body_is_the_same_however_it_is_cut(
    pieces: list[bytes], rest: bytes, places: list[int]
) -> None:
    """Body and what follows it depend on the bytes alone."""
    decoder = Chunked(8192)
    body = behind = b""
    for part in cuts(chunked(*pieces) + rest, places):
        if decoder.done:
            behind += part
        else:
            body += decoder.feed(part)
            behind += decoder.rest
    assert decoder.done
    assert (body, behind) == (b"".join(pieces), rest)


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=60), st.lists(st.integers(0, 10_000), max_size=8))
def test_any_bytes_as_chunks_are_read_the_same_however_they_are_cut(
    data: bytes, places: list[int]
) -> None:
    """Malformed bytes too: the verdict and the body before it do not depend on the cuts."""

    def read(parts: list[bytes]) -> tuple[bytes, str]:
        decoder, body = Chunked(8192), b""
        try:
            for part in parts:
                body += decoder.feed(part)
                if decoder.done:
                    return body, "done"
        except Malformed:
            return b"", "malformed"
        return body, "more"

    assert read([data]) == read(cuts(data, places)) == read([bytes([byte]) for byte in data])


def test_a_trailer_is_bounded_as_a_whole() -> None:
    """Not only each of its lines."""
    decoder = Chunked(1000)
    with pytest.raises(Malformed):
        decoder.feed(b"0\r\n" + b"X: a\r\n" * 200 + b"\r\n")


def test_a_head_is_taken_apart() -> None:
    """Every part of the head that a handler sees."""
    head = parse_request(
        b"POST /a%20b/c:d?x=%2F&y HTTP/1.1\r\nHOST: h\r\nX-A:  1 \r\nx-a: 2\r\n"
        b"Content-Length: 7\r\nExpect: 100-Continue\r\n\r\n",
        Limits(),
    )
    assert (head.method, head.target) == ("POST", "/a%20b/c:d?x=%2F&y")
    assert (head.path, head.query) == ("/a%20b/c:d", "x=%2F&y")
    assert (head.length, head.minor, head.keep_alive, head.expects) == (7, 1, True, True)
    assert head.get(b"x-a") == b"1"
    assert head.get(b"x-b") is None
    assert (b"x-a", b"2") in head.headers


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
