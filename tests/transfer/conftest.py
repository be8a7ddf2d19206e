"""One store per test, on every back end, and ways to open it again.

Redis and Mooncake are shared by all tests, so each test keeps to a prefix of its own and
takes away what it put. Mooncake's data is held by a process of its own.
"""

import contextlib
import os
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from holdfast import ledger as ledgers
from holdfast import transfer
from holdfast.errors import NotFound
from holdfast.ledger import Ledger
from holdfast.retry import Policy
from holdfast.servers import MooncakeHolder, MooncakeServer, RedisServer
from holdfast.transfer import Store, shm
from transfer import members

# Read when the library is loaded, by whichever test comes first.
os.environ.setdefault("MC_LOG_LEVEL", "WARNING")
os.environ.setdefault("MC_TCP_BIND_ADDRESS", "127.0.0.1")

HOLDER_BYTES = 1 << 30
QUICK = Policy(attempts=5, base_s=0.01, factor=2.0, max_s=0.1, deadline_s=20.0)
"""Retries that a test can wait for."""

Opener = Callable[[], Store]


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session")
def mooncake_master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeServer]:
    with MooncakeServer(tmp_path_factory.mktemp("mooncake")) as server:
        yield server


@pytest.fixture(scope="session")
def mooncake_holder(mooncake_master: MooncakeServer) -> Iterator[MooncakeHolder]:
    folder = mooncake_master.folder
    with MooncakeHolder(folder, mooncake_master, nbytes=HOLDER_BYTES) as holder:
        yield holder


@pytest.fixture
def shm_url() -> Iterator[str]:
    """A store in shared memory that is not there yet, and is removed at the end."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    yield f"shm://{name}"
    with contextlib.suppress(NotFound):
        shm.remove(name, force=True)


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    return f"{redis_server.url}?prefix=t:{uuid.uuid4().hex}:"


@pytest.fixture
def mooncake_url(mooncake_master: MooncakeServer, mooncake_holder: MooncakeHolder) -> str:
    assert mooncake_holder.segment
    return f"{mooncake_master.url}&prefix=t:{uuid.uuid4().hex}:"


@pytest.fixture(scope="session")
def mooncake_client(
    mooncake_master: MooncakeServer, mooncake_holder: MooncakeHolder
) -> Iterator[Any]:
    """One client for all tests: setting one up and closing it takes a second."""
    from mooncake.store import MooncakeDistributedStore

    assert mooncake_holder.segment
    client = MooncakeDistributedStore()
    master = f"{mooncake_master.host}:{mooncake_master.port}"
    code = client.setup("127.0.0.1", mooncake_master.metadata, 0, 16 << 20, "tcp", "", master)
    assert code == 0
    yield client
    client.close()


@pytest.fixture(params=["memory", "shm", "redis", "mooncake"])
def store_url(request: pytest.FixtureRequest) -> str:
    """The same back end for everybody in one test."""
    if request.param == "memory":
        return f"memory:{uuid.uuid4().hex}"
    url: str = request.getfixturevalue(f"{request.param}_url")
    return f"{url}?segment=8M" if request.param == "shm" else url


@pytest.fixture
def open_store(store_url: str) -> Iterator[Opener]:
    """Opens one more client of the same store."""
    with contextlib.ExitStack() as stack:
        opened: list[Store] = []

        def again() -> Store:
            store = stack.enter_context(transfer.connect(store_url, QUICK))
            opened.append(store)
            return store

        yield again
        if opened:
            opened[-1].delete([found.key for found in opened[-1].scan()])


@pytest.fixture
def store(request: pytest.FixtureRequest, store_url: str) -> Iterator[Store]:
    """The only client of its store."""
    if not store_url.startswith("mooncake:"):
        yield request.getfixturevalue("open_store")()
        return
    from holdfast.contrib.mooncake import MooncakeBackend

    client = request.getfixturevalue("mooncake_client")
    query = dict(parse_qsl(urlsplit(store_url).query))
    backend = MooncakeBackend(client, prefix=query["prefix"], admin=query["admin"])
    with Store(backend, QUICK) as store:
        yield store
        store.delete([found.key for found in store.scan()])


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'ledger.db'}"


@pytest.fixture
def ledger_url() -> str:
    """The ledger of a queue; where other processes take part, a test has another one."""
    return f"memory:{uuid.uuid4().hex}"


@pytest.fixture
async def ledger(ledger_url: str) -> AsyncIterator[Ledger]:
    async with ledgers.open(ledger_url) as opened:
        yield opened


@pytest.fixture
async def opener(ledger: Ledger, store: Store) -> AsyncIterator[members.Opener]:
    """Opens one more member of the same queue."""
    async with members.opening(ledger, store, uuid.uuid4().hex) as opened:
        yield opened
