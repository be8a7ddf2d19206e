"""Real etcd servers and what goes with them."""

from collections.abc import AsyncIterator, Iterator

import pytest

from holdfast.ledger.etcd import EtcdLedger
from holdfast.servers import EtcdServer


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """One server for every test that does not break it."""
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
async def ledger(etcd: EtcdServer) -> AsyncIterator[EtcdLedger]:
    async with EtcdLedger(etcd.endpoints) as one:
        yield one
