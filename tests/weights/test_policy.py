"""What may be deleted: tables, and any situation against a plain statement of the rules."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.weights.policy import (
    Acknowledgement,
    OnDisk,
    Pin,
    Retention,
    deletable,
    holds,
    used_bytes,
)


def versions(*numbers: int, size: int = 10) -> list[OnDisk]:
    """Versions that share nothing."""
    return [OnDisk(number, {number: size}) for number in numbers]


KEEP_2 = Retention(keep_last=2)


@pytest.mark.parametrize(
    ("there", "pins", "told", "policy", "expected"),
    [
        ([], [], [], KEEP_2, ()),
        ([7], [], [], Retention(keep_last=1), ()),
        ([1, 2, 3, 4], [], [], KEEP_2, (1, 2)),
        ([4, 1, 3, 2], [], [], KEEP_2, (1, 2)),
        ([0, 5, 10, 15, 16, 17], [], [], Retention(keep_last=1, keep_every=10), (5, 15, 16)),
        # A pin holds one version; a dead one holds nothing.
        ([1, 2, 3, 4], [Pin("a", 1)], [], KEEP_2, (2,)),
        ([1, 2, 3, 4], [Pin("a", 1, until_s=100.0)], [], KEEP_2, (1, 2)),
        ([1, 2, 3, 4], [Pin("a", 1, until_s=100.1)], [], KEEP_2, (2,)),
        # Who works through every version holds all from its floor on, and what it serves.
        ([1, 2, 3, 4, 5], [], [Acknowledgement("a", 2, "every", 2)], KEEP_2, (1,)),
        ([1, 2, 3, 4, 5], [], [Acknowledgement("a", None, "every", 3)], KEEP_2, (1, 2)),
        ([1, 2, 3, 4, 5], [], [Acknowledgement("a", 2, "latest", 2)], KEEP_2, (1, 3)),
        ([1, 2, 3, 4, 5], [], [Acknowledgement("a", None, "latest", 0)], KEEP_2, (1, 2, 3)),
        ([1, 2, 3], [], [Acknowledgement("a", 1, "every", 1, until_s=99.0)], KEEP_2, (1,)),
        # A skipped version is not leaked: every sweep looks at all of them.
        ([1, 40, 41], [], [Acknowledgement("a", 40, "every", 40)], Retention(keep_last=1), (1,)),
        # The budget takes the oldest of what is merely wanted, never what is needed.
        ([1, 2, 3], [], [], Retention(keep_last=3, max_bytes=20), (1,)),
        ([1, 2, 3], [], [], Retention(keep_last=3, max_bytes=5), (1, 2)),
        ([1, 2, 3], [Pin("a", 1)], [], Retention(keep_last=3, max_bytes=20), (2,)),
        ([0, 10, 11], [], [], Retention(keep_last=1, keep_every=10, max_bytes=20), (0,)),
    ],
)
def test_table(
    there: list[int],
    pins: list[Pin],
    told: list[Acknowledgement],
    policy: Retention,
    expected: tuple[int, ...],
) -> None:
    """One rule per line; the time is 100."""
    assert deletable(versions(*there), pins, told, policy, 100.0) == expected


def test_room_that_is_wanted_counts() -> None:
    """A publish asks for its own room before it writes."""
    policy = Retention(keep_last=3, max_bytes=40)
    assert deletable(versions(1, 2, 3), [], [], policy, 0.0) == ()
    assert deletable(versions(1, 2, 3), [], [], policy, 0.0, reserve_bytes=11) == (1,)
    assert deletable(versions(1, 2, 3), [], [], policy, 0.0, other={99: 11}) == (1,)


def test_a_shared_file_is_counted_once_and_freed_with_its_last_version() -> None:
    """Versions 1 and 2 share a large file: giving up 1 alone frees next to nothing."""
    there = [OnDisk(1, {7: 100, 1: 1}), OnDisk(2, {7: 100, 2: 1}), OnDisk(3, {8: 100, 3: 1})]
    assert used_bytes(there) == 203
    policy = Retention(keep_last=3, max_bytes=202)
    assert deletable(there, [], [], policy, 0.0) == (1,)
    policy = Retention(keep_last=3, max_bytes=201)
    assert deletable(there, [], [], policy, 0.0) == (1, 2)
    # A consumer's staging folder has the file too: it stays, whatever is given up.
    assert deletable(there, [], [], policy, 0.0, other={7: 100}) == (1, 2)


def test_who_holds_what() -> None:
    """The error of a full channel names consumers and bytes, the largest first."""
    there = versions(1, 2, 3, 4)
    told = [Acknowledgement("slow", 1, "every", 1), Acknowledgement("quick", 3, "every", 3)]
    found = holds(there, [Pin("reader", 2)], told, 0.0)
    assert [(hold.consumer, hold.versions, hold.bytes) for hold in found] == [
        ("slow", (1, 2, 3), 30),
        ("quick", (3,), 10),
        ("reader", (2,), 10),
    ]


numbers = st.lists(st.integers(0, 30), unique=True, max_size=12)
lives = st.floats(0, 200)
pins_of = st.builds(Pin, st.sampled_from("abc"), st.integers(0, 30), lives)
told_of = st.builds(
    Acknowledgement,
    st.sampled_from("abc"),
    st.none() | st.integers(0, 30),
    st.sampled_from(["every", "latest"]),
    st.integers(0, 30),
    lives,
)
policies = st.builds(
    Retention,
    keep_last=st.integers(1, 4),
    keep_every=st.integers(0, 5),
    max_bytes=st.integers(0, 60),
)


@given(
    numbers,
    st.lists(pins_of, max_size=4),
    st.lists(told_of, max_size=4),
    policies,
    st.dictionaries(st.integers(0, 5), st.integers(0, 9), max_size=3),
)
def test_any_situation(
    there: list[int],
    pins: list[Pin],
    told: list[Acknowledgement],
    policy: Retention,
    shared: dict[int, int],
) -> None:
    """What is needed is never deleted; what nobody wants always is; the budget is kept."""
    now = 100.0
    disk = [OnDisk(one, {100 + one: one, **shared}) for one in there]
    drop = deletable(disk, pins, told, policy, now)
    assert list(drop) == sorted(set(drop))
    kept = sorted(set(there) - set(drop))

    def is_needed(number: int) -> bool:
        alive = [one for one in told if one.until_s > now]
        return (
            number == max(there)
            or any(pin.version == number and pin.until_s > now for pin in pins)
            or any(one.version == number for one in alive)
            or any(one.needs == "every" and number >= one.floor for one in alive)
        )

    def is_wanted(number: int) -> bool:
        last = number in sorted(there)[-policy.keep_last :]
        return last or bool(policy.keep_every and number % policy.keep_every == 0)

    assert all(number in there and not is_needed(number) for number in drop)
    assert all(is_needed(number) or is_wanted(number) for number in kept)
    optional = [number for number in kept if not is_needed(number)]
    if policy.max_bytes and optional:
        assert used_bytes([one for one in disk if one.version in kept]) <= policy.max_bytes
    if not policy.max_bytes:
        assert all(not is_wanted(number) for number in drop)
