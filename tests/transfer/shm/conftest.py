"""A store for a test, removed afterwards."""

import os
import random
from collections.abc import Callable, Iterator

import pytest

from holdfast.transfer import Store, connect

from .children import QUICK
from .family import fresh_name, remove

Opener = Callable[..., Store]


@pytest.fixture
def name() -> Iterator[str]:
    """The name of a store that is removed at the end."""
    found = fresh_name()
    yield found
    remove(found)


@pytest.fixture
def opener(name: str) -> Iterator[Opener]:
    """Opens the store, as often as one likes; all are closed at the end."""
    opened: list[Store] = []

    def open_store(options: str = "") -> Store:
        opened.append(connect(f"shm://{name}{options}", QUICK))
        return opened[-1]

    yield open_store
    for one in opened:
        one.close()


@pytest.fixture
def seed() -> int:
    """Another one each time, printed when the test fails; HOLDFAST_SEED repeats it."""
    found = int(os.environ.get("HOLDFAST_SEED") or random.SystemRandom().getrandbits(30))
    print(f"HOLDFAST_SEED={found}")
    return found
