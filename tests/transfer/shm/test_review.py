"""Schedules that were found by trying to break shared memory.

Each lets one process do something exactly between two steps of another.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from holdfast.errors import BatchFailed
from holdfast.transfer import Ref, Store
from transfer.outcomes import fails

from .children import content
from .conftest import Opener
from .family import session

OPTIONS = f"?budget={8 << 20}&segment=1M"
SIZE = 250_000


def put(store: Store, *keys: str) -> dict[str, Ref]:
    return store.put({key: content(key, 1, SIZE) for key in keys})


def whole(store: Store, key: str) -> bool:
    return bool(store.get([key])[key] == content(key, 1, SIZE))


def just_before(thing: Any, name: str, act: Callable[[], object]) -> None:
    """The next call of a method of `thing` finds the world as `act` has made it."""
    method = getattr(thing, name)

    def once(*args: Any, **how: Any) -> Any:
        setattr(thing, name, method)
        act()
        return method(*args, **how)

    setattr(thing, name, once)


def close_segment(store: Store) -> None:
    with session(store).writing, session(store).mutex:
        session(store).writer.close_segment()


def compact(store: Store) -> None:
    """Move what lives in mostly dead segments, as whoever needs room does."""
    found = session(store)
    with found.writing, found.mutex:
        found.writer.begin()
        found.catalog.refresh()
        found.room._compacted(900_000)
        found.writer.close_segment()


def test_memory_is_not_given_back_under_values_that_were_put_just_now(opener: Opener) -> None:
    """Who needs room knows only dead values of a segment, to which its owner adds one."""
    owner, needy = opener(OPTIONS), opener()
    put(owner, "dead")
    owner.delete(["dead"])
    held: list[str] = []
    while len(held) < 40:
        try:
            put(needy, f"held-{len(held)}")
        except BatchFailed:
            break
        held.append(f"held-{len(held)}")

    def act() -> None:
        put(owner, "new")
        close_segment(owner)

    needy.delete(held[:1])
    just_before(session(needy).room, "_adopted", act)
    with pytest.raises(BatchFailed):
        needy.put({f"more-{at}": content("m", 1, SIZE) for at in range(8)})
    assert whole(needy, "new")
    assert whole(owner, "new")
    assert all(whole(owner, key) for key in held[1:])


def mostly_dead(opener: Opener) -> tuple[Store, Store, Ref]:
    """An owner of a segment in which only `a` lives, one who may compact it, and `a`."""
    owner, mover = opener(OPTIONS), opener()
    refs = put(owner, "a", "b", "c")
    owner.delete(["b", "c"])
    close_segment(owner)
    return owner, mover, refs["a"]


def test_a_delete_that_is_overtaken_by_compaction_deletes(opener: Opener) -> None:
    """The value was moved between being found and being locked: its copy goes, too."""
    owner, mover, ref = mostly_dead(opener)
    just_before(session(owner).locks, "wait", lambda: compact(mover))
    assert owner.delete([ref]) == {"a": True}
    assert owner.exists(["a"]) == mover.exists(["a"]) == {"a": False}
    with fails({"a": "stale"}):
        mover.get([ref])
    assert owner.delete([ref]) == {"a": False}


@pytest.mark.parametrize("by", ["reference", "key"])
def test_a_view_that_is_overtaken_by_compaction_finds_the_value(opener: Opener, by: str) -> None:
    """It was moved, and its old memory given back, between being found and being locked."""
    _, mover, ref = mostly_dead(opener)
    reader = opener()
    assert whole(reader, "a")
    just_before(session(reader).locks, "wait", lambda: compact(mover))
    with reader.view([ref if by == "reference" else "a"]) as found:
        assert found["a"] == content("a", 1, SIZE)


def test_a_view_that_is_overtaken_by_a_delete_says_that_the_value_is_gone(opener: Opener) -> None:
    owner, reader = opener(OPTIONS), opener()
    refs = put(owner, "a")
    close_segment(owner)

    def act() -> None:
        owner.delete(["a"])
        with session(owner).mutex:
            for segment in list(session(owner).catalog.segments.values()):
                session(owner).room._release(segment)

    just_before(session(reader).locks, "wait", act)
    with fails({"a": "stale"}), reader.view([refs["a"]]):
        pass


def test_what_was_put_last_is_got_whatever_the_clock_says(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that was put back must not make a put lose against what is there."""
    store, other = opener(OPTIONS), opener()
    first = store.put({"k": 1})["k"]
    now = time.time_ns
    for writer, back in ((store, 1 << 50), (other, 1 << 51)):
        monkeypatch.setattr(time, "time_ns", lambda back=back: now() - back)
        value = f"put back by {back}"
        (ref,) = writer.put({"k": value}).values()
        for reader in (store, other, opener()):
            assert reader.get([ref])["k"] == value
            assert reader.get(["k"])["k"] == value
    with fails({"k": "stale"}):
        store.get([first])
    store.delete(["k"])
    assert other.exists(["k"]) == {"k": False}


def test_a_view_outlasts_the_store_that_it_was_opened_with(opener: Opener) -> None:
    """Closing the store in the middle of a view must not let its memory be used again."""
    owner, reader = opener(OPTIONS), opener()
    owner.put({"a": np.full(SIZE, 7, np.uint8)})
    with reader.view(["a"]) as found:
        reader.close()
        owner.delete(["a"])
        close_segment(owner)
        for at in range(8):
            put(owner, f"b-{at}")
        assert (found["a"] == 7).all()
    owner.delete([f"b-{at}" for at in range(8)])
    close_segment(owner)
    put(owner, "c")
    assert session(owner).writer.open is session(owner).catalog.segments[0, 0], "it is used again"
