"""Whatever goes wrong with a key, the error carries the user's key and begins with it."""

from pathlib import Path

import pytest

from holdfast import transfer
from holdfast.errors import (
    BatchFailed,
    Gone,
    HoldfastError,
    NoRoom,
    NotFound,
)
from holdfast.servers import RedisServer
from holdfast.transfer import Store
from transfer.outcomes import ONCE

KEYS = ["user/key-1", "user/key-2"]


def check(failures: dict[str, Exception], kind: type[Exception]) -> None:
    """These keys failed, each with an error of its own that says so."""
    assert list(failures) == KEYS
    for key, error in failures.items():
        assert isinstance(error, kind), repr(error)
        assert isinstance(error, HoldfastError)
        assert error.key == key
        assert str(error).startswith(key), str(error)
        assert not any(other in str(error) for other in KEYS if other != key), str(error)


def failed(store: Store, kind: type[Exception], *calls: str) -> None:
    """These calls fail for both keys."""
    for call in calls:
        with pytest.raises(BatchFailed) as caught:
            wanted = dict.fromkeys(KEYS, b"") if call == "put" else KEYS
            getattr(store, call)(wanted)
        check(caught.value.failures, kind)
        assert all(key in str(caught.value) for key in KEYS)


def test_what_is_missing_replaced_or_deleted(store: Store) -> None:
    """On every back end: by key, by reference, into buffers, as a view."""
    failed(store, NotFound, "get")
    check(store.get(KEYS, partial=True).failures, NotFound)
    with pytest.raises(BatchFailed) as caught:
        store.get_into({key: bytearray(1) for key in KEYS})
    check(caught.value.failures, NotFound)
    with pytest.raises(BatchFailed) as caught, store.view(KEYS):
        pass
    check(caught.value.failures, NotFound)
    old = store.put(dict.fromkeys(KEYS, b"1"))
    store.put(dict.fromkeys(KEYS, b"22"))
    check(store.get(old.values(), partial=True).failures, Gone)
    with pytest.raises(BatchFailed) as caught, store.view(old.values()):
        pass
    check(caught.value.failures, Gone)
    store.delete(KEYS)
    check(store.get(old.values(), partial=True).failures, Gone)


def test_shared_memory_that_is_full(shm_url: str) -> None:
    with transfer.connect(f"{shm_url}?budget=1M&segment=64K", ONCE) as store:
        with pytest.raises(BatchFailed) as caught:
            store.put({f"fill-{at}": bytes(60_000) for at in range(100)})
        for key, error in caught.value.failures.items():
            assert str(error).startswith(f"{key}: ")
        with pytest.raises(BatchFailed) as caught:
            store.put({key: bytes(60_000) for key in KEYS})
        check(caught.value.failures, NoRoom)


def test_a_dead_redis(tmp_path: Path) -> None:
    """Every call: not reached, and maybe changed."""
    with (
        RedisServer(tmp_path) as server,
        transfer.connect(f"{server.url}?prefix=other:", ONCE) as store,
    ):
        store.put(dict.fromkeys(KEYS, b"1"))
        server.kill()
        for call in ("get", "put", "delete", "exists"):
            failed(store, HoldfastError, call)
