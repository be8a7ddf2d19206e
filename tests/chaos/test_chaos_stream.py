"""The pure part of the proxy: where bits are flipped and where streams end."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.chaos.stream import DIRECTIONS, Faults, Stream, drop_point

SIZE = 200_000


def passed(stream: Stream, data: bytes, faults: Faults, sizes: list[int]) -> tuple[bytes, int]:
    """Send `data` in chunks of these sizes, again and again; return what came out."""
    out, total, at, turn = bytearray(), 0, 0, 0
    while at < len(data):
        chunk = data[at : at + sizes[turn % len(sizes)]]
        flipped, count = stream.flip(chunk, faults)
        out += flipped
        total += count
        at += len(chunk)
        stream.offset += len(chunk)
        turn += 1
    return bytes(out), total


@settings(deadline=None)
@given(
    seed=st.integers(0, 1000),
    sizes=st.lists(st.integers(1, 70_000), min_size=1, max_size=5).filter(lambda s: max(s) > 500),
    faults=st.sampled_from([Faults(flip_probability=0.0005), Faults(flip_every_bytes=777)]),
)
def test_flips_do_not_depend_on_chunks(seed: int, sizes: list[int], faults: Faults) -> None:
    """The same stream, cut differently, is corrupted in the same bits."""
    data = bytes(SIZE)
    whole = passed(Stream(seed, 3, "to_server"), data, faults, [SIZE])
    parts = passed(Stream(seed, 3, "to_server"), data, faults, sizes)
    assert whole == parts


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 1000), st.sampled_from([1, 2, 100, 65_536, 100_000]))
def test_one_flip_in_every_window(seed: int, every: int) -> None:
    """`flip_every_bytes` hits each window exactly once, by one bit."""
    size = every * (5 if every > 1000 else 50)
    out, count = passed(
        Stream(seed, 0, "to_client"), bytes(size), Faults(flip_every_bytes=every), [10_000]
    )
    assert count == size // every
    for window in range(0, size, every):
        assert sum(byte.bit_count() for byte in out[window : window + every]) == 1


@pytest.mark.parametrize("probability", [1.0, 0.1, 0.001, 5e-324])
def test_the_probability_is_per_byte(probability: float) -> None:
    """Over many bytes the share of flips is the probability, within five deviations;
    also where the gap to the next flip is beyond any number of bytes."""
    seed = 11
    out, count = passed(
        Stream(seed, 0, "to_server"), bytes(SIZE), Faults(flip_probability=probability), [4096]
    )
    mean = SIZE * probability
    spread = 5 * math.sqrt(SIZE * probability * (1 - probability)) + 1e-9
    assert abs(count - mean) <= spread, f"seed {seed}"
    assert count == sum(byte != 0 for byte in out)


def test_streams_are_independent() -> None:
    """Seed, connection and direction each give other positions."""
    faults = Faults(flip_probability=0.001)
    outputs = {
        passed(Stream(seed, connection, direction), bytes(SIZE), faults, [SIZE])[0]
        for seed in (0, 1)
        for connection in (0, 1)
        for direction in DIRECTIONS
    }
    assert len(outputs) == 8


def test_drop_points_follow_the_probability_and_the_bounds() -> None:
    """0 never, 1 always, a half about half; each within its bytes and directions."""
    points = [drop_point(5, n, 0.5, 1000, "both") for n in range(1000)]
    hits = [point for point in points if point is not None]
    assert 400 < len(hits) < 600
    assert {direction for direction, _ in hits} == set(DIRECTIONS)
    assert all(1 <= size <= 1000 for _, size in hits)
    assert min(size for _, size in hits) < 5, "headers must be hit as well"
    assert all(drop_point(5, n, 0.0, 1000, "both") is None for n in range(100))
    for n in range(100):
        point = drop_point(5, n, 1.0, 1, "to_client")
        assert point == ("to_client", 1)


def test_jitter_varies_the_delay_within_its_bounds() -> None:
    """Never less than nothing, never more than delay plus jitter."""
    stream = Stream(random.Random(1).randrange(100), 0, "to_server")
    drawn = [stream.delay_s(Faults(delay_s=0.1, jitter_s=0.2)) for _ in range(200)]
    assert all(0.0 <= delay <= 0.3 for delay in drawn)
    assert len(set(drawn)) > 50
    assert stream.delay_s(Faults(delay_s=0.1)) == 0.1
