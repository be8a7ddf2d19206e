"""Servers that several parts' tests share; started once, when the first test asks for them."""

from collections.abc import Iterator

import pytest

from holdfast.servers import EtcdServer


@pytest.fixture(scope="session")
def etcd_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real etcd. Each test keeps to a prefix of its own."""
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as server:
        yield f"etcd://{server.host}:{server.port}"
