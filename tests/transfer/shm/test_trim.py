"""Giving back what is empty: when, how much, and whoever is killed over it."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.transfer import Store, connect, shm
from holdfast.transfer.queue import Item, open_queue
from holdfast.transfer.shm.layout import PAGE
from patience import HANG_S

from .children import content
from .conftest import Opener
from .family import start

BUDGET = 64 << 20
OPTIONS = f"?budget={BUDGET}&segment=1M"
SIZE = 250_000
LITTLE = 64 * PAGE
"""Tables, dead-bytes and one page here and there."""


def _values(prefix: str, count: int) -> dict[str, bytes]:
    return {f"{prefix}-{n}": content(f"{prefix}-{n}", 1, SIZE) for n in range(count)}


def _taken(name: str) -> int:
    return next(one.taken for one in shm.stores() if one.name == name)


def test_an_empty_store_takes_nothing_when_its_users_have_left(name: str, opener: Opener) -> None:
    """The last one to leave gives back everything that is empty, whoever had put it."""
    producer, consumer = opener(OPTIONS), opener()
    producer.put(_values("a", 60))
    producer.close()
    assert _taken(name) > 60 * SIZE, "what lives stays"
    consumer.delete([one.key for one in consumer.scan()])
    consumer.close()
    assert _taken(name) < LITTLE
    again = opener()
    again.put(_values("b", 60))
    assert again.get(list(_values("b", 60))) == _values("b", 60)
    assert again.stat().taken <= BUDGET


def test_memory_that_lies_idle_is_given_back(name: str, opener: Opener) -> None:
    """What was empty at one trim and untouched at the next goes; what is in use stays warm."""
    owner, other = opener(OPTIONS), opener()
    owner.put(_values("a", 40) | {"kept": b"x" * SIZE})
    owner.delete(_values("a", 40))
    other.trim()
    owner.trim()
    warm = _taken(name)
    assert warm > 40 * SIZE
    owner.put(_values("b", 4))
    owner.delete(_values("b", 4))
    assert other.trim() > 30 * SIZE
    assert owner.trim() == 0 or _taken(name) < warm
    other.trim()
    owner.trim()
    owner.trim()
    assert _taken(name) < 2 * (1 << 20) + LITTLE
    for one in (owner, other, opener()):
        assert one.get(["kept"]) == {"kept": b"x" * SIZE}
        assert not any(one.exists(_values("a", 40)).values())
    owner.put(_values("c", 40))
    assert other.get(list(_values("c", 40))) == _values("c", 40)


def test_an_empty_queue_gives_back_while_its_members_live(name: str, sqlite_url: str) -> None:
    """Two rounds of tidying after the last sample is acknowledged, its memory is free."""
    with open_queue(f"shm://{name}{OPTIONS}", sqlite_url, "rollouts", ["train"]) as queue:
        queue.put([Item(key, {"x": value}) for key, value in _values("s", 60).items()])
        queue.claim("train", 60).acknowledge()
        assert _taken(name) > 60 * SIZE
        queue.tidy()
        queue.tidy()
        assert _taken(name) < LITTLE
        queue.put([Item("next", {"x": b"1"})])
        assert queue.claim("train", 1).fetch() == [{"x": b"1"}]


def test_a_living_owners_warm_memory_is_its_own(name: str, opener: Opener) -> None:
    """A reader that comes and goes takes nothing from a writer that works."""
    owner = opener(OPTIONS)
    owner.put(_values("a", 20))
    owner.delete(_values("a", 20))
    warm = _taken(name)
    with connect(f"shm://{name}") as reader:
        assert reader.stat().keys == 0
    assert _taken(name) == warm


def test_dead_bytes_survive_a_newcomer(opener: Opener) -> None:
    """Given back twice, by an owner and by one who comes later, deleted values stay deleted."""
    witness, owner = opener("?budget=64M&segment=4M"), opener()
    keys = [f"k-{n}" for n in range(20_000)]
    owner.put(dict.fromkeys(keys, b""))
    owner.put({"last": bytes(3 << 20)})
    assert all(witness.exists(keys).values())
    owner.delete([*keys, "last"])
    owner.close()
    late = opener()
    assert late.stat().keys == 0
    late.trim()
    late.trim()
    late.close()
    found = witness.get(keys, partial=True)
    assert not found.values
    assert {type(one).__name__ for one in found.failures.values()} == {"NotFound"}


@pytest.fixture
def kept(opener: Opener) -> Iterator[Store]:
    """A store with values of somebody who must not lose them."""
    store = opener(OPTIONS)
    store.put(_values("kept", 10))
    yield store
    assert store.get(list(_values("kept", 10))) == _values("kept", 10)
    assert opener().get(list(_values("kept", 10))) == _values("kept", 10)


@pytest.mark.parametrize("point", ["locked", "done"])
@pytest.mark.parametrize("hit", [1, 3])
def test_killed_while_giving_back(
    point: str, hit: int, name: str, kept: Store, opener: Opener, tmp_path: Path
) -> None:
    """kill -9 in the middle of it: what lives is there, and the next one gives back the rest."""
    plan = f"shm.release.{point}:kill@{hit}"
    with start("visitor", fault=plan, folder=tmp_path, url=f"shm://{name}", rounds=1) as victim:
        victim.all()
        assert victim.fired() == f"shm.release.{point}"
    assert kept.stat().keys == 10
    opener().close()
    with connect(f"shm://{name}") as heir:
        heir.put({"x": b"1"})
        heir.delete(["x"])
    assert _taken(name) < 14 * SIZE + LITTLE


@pytest.mark.long
@pytest.mark.timeout(600)
def test_killed_at_any_moment(name: str, kept: Store, tmp_path: Path, seed: int) -> None:
    """Visitors that put, delete, leave and come again are killed 100 times; nothing is lost."""
    luck = random.Random(seed)
    for n in range(100):
        with start("visitor", folder=tmp_path, url=f"shm://{name}", rounds=10_000) as one:
            one.hear("round", HANG_S)
            one.lines(luck.uniform(0, 0.03))
            one.kill()
        if n % 10 == 0:
            assert kept.get(list(_values("kept", 10))) == _values("kept", 10)
            kept.put({"busy": bytes(SIZE)})
            kept.trim()
            kept.delete(["busy", *(one.key for one in kept.scan("visit-"))])
