"""The parent's end of `children.py`, and stores that are removed after each test."""

import functools
import os
import time
from pathlib import Path

import kids
from holdfast.transfer import Store, shm
from holdfast.transfer.shm.backend import ShmBackend
from holdfast.transfer.shm.session import Session
from patience import HANG_S

LIMIT_S = HANG_S
start = functools.partial(kids.start, Path(__file__).with_name("children.py"))


def session(store: Store) -> Session:
    """A store as this process has it open."""
    assert isinstance(store.backend, ShmBackend)
    return store.backend.session()


def fresh_name() -> str:
    """The name of a store that nobody has."""
    return f"test-{os.getpid()}-{time.monotonic_ns()}"


def remove(name: str) -> None:
    """Remove a test's store, which nobody may have open any more."""
    if any(one.name == name for one in shm.stores()):
        assert shm.remove(name), f"{name} is still in use: {shm.stores()}"
