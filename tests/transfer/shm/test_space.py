"""Space: the budget, adoption, compaction, other owners' empty segments, twins."""

from pathlib import Path

import pytest

from holdfast import faults
from holdfast.errors import BatchFailed, Mistake, NoRoom, TooLarge, Unavailable
from holdfast.transfer import Store
from transfer.outcomes import fails

from .children import content
from .conftest import Opener
from .family import session, start

BUDGET = 8 << 20
OPTIONS = f"?budget={BUDGET}&segment=1M"
SIZE = 250_000


def _fill(store: Store, prefix: str, size: int = SIZE) -> list[str]:
    """Put values until there is no room."""
    keys: list[str] = []
    while True:
        key = f"{prefix}-{len(keys)}"
        answer = store.backend.put(store._frames({key: content(key, 1, size)}, None))
        if answer[key] is not None:
            assert isinstance(answer[key], NoRoom)
            return keys
        keys.append(key)


def _check(store: Store, keys: list[str], size: int = SIZE) -> None:
    found = store.get(keys)
    assert all(found[key] == content(key, 1, size) for key in keys)


def test_the_budget_is_kept(opener: Opener) -> None:
    """Nothing is taken beyond the budget; what does not fit is refused, and the rest stays."""
    store, other = opener(OPTIONS), opener()
    keys = _fill(store, "a")
    assert 24 <= len(keys) <= 32
    assert store.stat().taken <= BUDGET
    assert _fill(other, "b") == []
    _check(other, keys)
    with fails({"big": TooLarge}):
        store.put({"big": bytes(BUDGET)})
    store.delete(keys[:8])
    _check(store, keys[8:])


def test_empty_segments_of_a_living_owner_are_used(opener: Opener) -> None:
    """Whoever deleted, and however idle the owner is: a second process can use the space."""
    owner, other = opener(OPTIONS), opener()
    keys = _fill(owner, "a")
    other.delete(keys)
    again = _fill(other, "b")
    assert len(again) >= len(keys) - 5  # one segment is kept back, another is the owner's open one
    _check(owner, again)
    other.delete(again[:1])
    other.put({"theirs": b""})
    owner.delete(again[4:12])
    owner.put({"mine": b"still"})
    assert other.get(["mine"]) == {"mine": b"still"}
    assert owner.stat().taken <= BUDGET


@pytest.mark.parametrize("another", [False, True])
def test_compaction(opener: Opener, another: bool) -> None:
    """With one living value in each segment, most of the budget can be used again.

    Also by another process than the owner, who lives and is idle.
    """
    owner, other = opener(OPTIONS), opener()
    keys = _fill(owner, "a")
    kept = keys[::4]
    refs = {one.key: one.generation for one in owner.scan()}
    needy = other if another else owner
    needy.delete([key for key in keys if key not in kept])
    more = _fill(needy, "b")
    assert len(kept) + len(more) >= len(keys) - (8 if another else 5)
    for one in (owner, other, opener()):
        _check(one, kept + more)
        assert {s.key: s.generation for s in one.scan("a-")} == {key: refs[key] for key in kept}
    assert owner.stat().taken <= BUDGET
    owner.delete(kept)
    assert {one.key for one in other.scan()} == set(more)


def test_a_dead_owner(name: str, opener: Opener, tmp_path: Path) -> None:
    """When all processes are gone, by kill -9, the next one finds everything.

    The space of what it deletes is its own.
    """
    keys = {f"a-{n}": SIZE for n in range(20)}
    url = f"shm://{name}{OPTIONS}"
    with start("keeper", folder=tmp_path, url=url, sizes=keys, generation=1) as owner:
        owner.hear("ready")
        owner.kill()
    store = opener()
    assert store.stat().budget == BUDGET
    _check(store, list(keys))
    assert len(_fill(store, "b")) <= 10
    store.delete(list(keys))
    store.delete([one.key for one in store.scan("b")])
    assert len(_fill(store, "c")) >= 26


def test_one_call_with_more_than_a_segment(opener: Opener) -> None:
    """A put may be larger than a segment: it is cut, and every key answers for itself."""
    store = opener(OPTIONS)
    values = {f"k-{n}": content(f"k-{n}", 1, SIZE) for n in range(100)}
    with pytest.raises(BatchFailed) as caught:
        store.put(values)
    put = list(caught.value.values)
    assert 24 <= len(put) <= 32
    for key, error in caught.value.failures.items():
        assert isinstance(error, NoRoom)
        assert (error.key, str(error).startswith(f"{key}: ")) == (key, True)
    _check(store, put)
    assert not any(store.exists([key for key in values if key not in put]).values())


def test_twins(opener: Opener) -> None:
    """A compaction that stops between copy and burial: a delete takes both, room takes one."""
    store, other = opener(OPTIONS), opener()
    keys = _fill(store, "a")
    kept = [key for n, key in enumerate(keys) if n % 4 < 2]
    store.delete([key for key in keys if key not in kept])
    faults.arm("shm.compact.committed:raise=Unavailable")
    try:
        with pytest.raises(Unavailable):
            _fill(store, "b")
    finally:
        faults.disarm()
    late = opener()
    index = session(late).catalog.index
    late.stat()
    assert len(index.older) > 1, "there should be twins"
    twin = next(iter(index.older))
    assert other.delete([twin]) == {twin: True}
    for one in (store, other, late, opener()):
        assert one.exists([twin]) == {twin: False}
        assert twin not in {s.key for s in one.scan()}
    more = _fill(late, "c")
    assert len(more) + len(kept) >= len(keys) - 8
    left = [key for key in kept if key != twin]
    for one in (store, other, late, opener()):
        _check(one, left + more)
        assert one.stat().keys == len({one.key for one in store.scan()})


@pytest.mark.parametrize("point", ["frames", "directory", "headed", "row", "committed"])
def test_an_interrupted_put(opener: Opener, point: str) -> None:
    """An exception in the middle of a put: nothing of it is there, or all of it.

    The next puts go on, also in other segments, and do not bring it to life.
    """
    store, reader = opener(OPTIONS), opener()
    store.put({"before": b"1"})
    faults.arm(f"shm.put.{point}:raise=Unavailable")
    try:
        with pytest.raises(Unavailable):
            store.backend.put(store._frames({"x": b"2" * 1000, "before": b"3"}, None))
    finally:
        faults.disarm()
    there = point == "committed"
    for size in (1_052_000, 10, 1_052_000, 10):
        for one in (store, reader, opener()):
            found = one.get(["x", "before"], partial=True).values
            expected = {"x": b"2" * 1000, "before": b"3"} if there else {"before": b"1"}
            assert found == expected
        store.put({"next": bytes(size)})
    store.delete(["x"])
    assert not opener().exists(["x"])["x"]


def test_options(name: str, opener: Opener) -> None:
    """The first opener decides; who asks for something else is told."""
    opener(OPTIONS)
    opener()
    opener(OPTIONS)
    for wrong in ("?budget=9M", "?segment=2M"):
        with pytest.raises(Mistake):
            opener(wrong)
