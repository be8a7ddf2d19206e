"""Only what failed is sent again: gets and puts, of tensors and of bytes, on every back end.

The four paths in which one bad key used to fail, or to spoil, a whole batch.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from holdfast.errors import (
    BatchFailed,
    Corrupt,
    Denied,
    Gone,
    Mistake,
    NotFound,
    Unavailable,
    UnknownOutcome,
)
from holdfast.retry import Policy
from holdfast.transfer import Ref, Store, status
from transfer.faulty import Fault, Faulty
from transfer.samples import same

KEYS = [f"k{index}" for index in range(40)]
BAD = "k17"
POLICY = Policy(attempts=4, base_s=0.01, factor=2.0, max_s=0.05, deadline_s=10.0)


@pytest.fixture(params=["tensors", "bytes"])
def values(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param == "bytes":
        return {key: key.encode() * 30 for key in KEYS}
    return {key: torch.full((5, 7), index, dtype=torch.bfloat16) for index, key in enumerate(KEYS)}


@pytest.fixture
def broken(store: Store) -> Faulty:
    return Faulty(store.backend)


@pytest.fixture
def shaky(broken: Faulty) -> Store:
    """A store with faults between it and a real back end."""
    return Store(broken, POLICY)  # type: ignore[arg-type]


def flipped(frame: memoryview) -> memoryview:
    return memoryview(bytes([*frame[:-1], frame[-1] ^ 1]))


DAMAGE: dict[str, Callable[[memoryview], memoryview]] = {
    "flipped": flipped,
    "nothing": lambda _: memoryview(b""),
    "short": lambda frame: frame[:-1],
    "zeros": lambda frame: memoryview(bytes(len(frame))),
}
ELSEWHERE = Unavailable("some other name for it", key="holdfast:elsewhere")
PASSING: dict[str, Fault] = {"error": ELSEWHERE, **DAMAGE}
ALL_BUT_ONE = [key for key in KEYS if key != BAD]


def sent(broken: Faulty, way: str) -> dict[int, list[str]]:
    """Keys by how often they were sent."""
    counts: dict[int, list[str]] = {}
    for key in KEYS:
        counts.setdefault(broken.sent[way, key], []).append(key)
    return counts


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING)
def test_a_get_asks_again_for_what_failed(
    shaky: Store, broken: Faulty, values: dict[str, Any], fault: Fault
) -> None:
    """A key that fails twice is asked for again, alone, and the batch succeeds.

    One that never succeeds is named after the attempts that the policy allows, with the reason;
    the others are there.
    """
    refs = shaky.put(values)
    broken.gets[BAD] = [fault, fault]
    found = shaky.get(refs.values())
    assert same(found, values)
    assert list(found) == KEYS
    assert sent(broken, "get") == {1: ALL_BUT_ONE, 3: [BAD]}
    broken.gets[BAD] = [fault] * 100
    with pytest.raises(BatchFailed) as caught:
        shaky.get(refs.values())
    error = caught.value
    assert list(error.failures) == [BAD]
    wanted, why = Unavailable if isinstance(fault, Exception) else Corrupt, error.failures[BAD]
    assert isinstance(why, wanted)
    assert (why.key, str(why).startswith(f"{BAD}: ")) == (BAD, True)
    assert BAD in str(error)
    assert same(error.values, {key: values[key] for key in ALL_BUT_ONE})
    assert sent(broken, "get")[3 + POLICY.attempts] == [BAD]


@pytest.mark.parametrize("fault", [Unavailable("injected"), UnknownOutcome("injected")])
def test_a_put_sends_again_what_failed(
    shaky: Store, broken: Faulty, values: dict[str, Any], fault: Fault
) -> None:
    """So does a put, under the same generation.

    Where that does not help, the others are put, and the error has their references.
    """
    broken.puts[BAD] = [fault, fault]
    refs = shaky.put(values)
    assert sent(broken, "put") == {1: ALL_BUT_ONE, 3: [BAD]}
    assert len({ref.generation for ref in refs.values()}) == 1
    assert same(shaky.get(refs.values()), values)
    shaky.delete([BAD])
    broken.puts[BAD] = [fault] * 100
    with pytest.raises(BatchFailed, match=f"{BAD}: injected") as caught:
        shaky.put(values)
    assert list(caught.value.failures) == [BAD]
    assert isinstance(caught.value.failures[BAD], type(fault))
    assert same(shaky.get(caught.value.values.values()), {key: values[key] for key in ALL_BUT_ONE})
    assert status(shaky.get([BAD], partial=True).failures[BAD]) == "missing"


@pytest.mark.parametrize("fault", [NotFound("x"), Gone("x"), Mistake("x"), Denied("x")])
def test_what_will_not_change_is_not_tried_again(
    shaky: Store, broken: Faulty, values: dict[str, Any], fault: Exception
) -> None:
    """Missing, stale and refused are answers."""
    refs = shaky.put(values)
    broken.gets[BAD] = [fault]
    found = shaky.get(refs, partial=True)
    assert type(found.failures[BAD]) is type(fault)
    assert str(found.failures[BAD]) == f"{BAD}: x"
    assert sent(broken, "get") == {1: KEYS}
    broken.puts[BAD] = [fault]
    with pytest.raises(BatchFailed):
        shaky.put(values)
    assert broken.sent["put", BAD] == 2


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_get_into_uses_the_same_buffer_again(
    shaky: Store, broken: Faulty, damage: Callable[[memoryview], memoryview]
) -> None:
    """A retry writes where the first attempt wrote; nobody allocates anew."""
    refs = shaky.put({key: torch.full((100,), index) for index, key in enumerate(KEYS)})
    places: dict[str | Ref, torch.Tensor] = {ref: torch.full((100,), -1) for ref in refs.values()}
    addresses = [place.data_ptr() for place in places.values()]
    broken.gets[BAD] = [damage, damage]
    shaky.get_into(places)
    for index, place in enumerate(places.values()):
        assert torch.equal(place, torch.full((100,), index))
    assert [place.data_ptr() for place in places.values()] == addresses
    assert broken.sent["get", BAD] == 3


async def test_the_asynchronous_twins_send_again_only_what_failed(
    shaky: Store, broken: Faulty, values: dict[str, Any]
) -> None:
    broken.puts[BAD] = [Unavailable("injected")]
    refs = await shaky.aput(values)
    broken.gets[BAD] = [flipped, Unavailable("injected")]
    assert same(await shaky.aget(refs.values()), values)
    assert sent(broken, "put") == {1: ALL_BUT_ONE, 2: [BAD]}
    assert sent(broken, "get") == {1: ALL_BUT_ONE, 3: [BAD]}
