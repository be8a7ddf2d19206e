"""Servers that several parts' tests share; started once, when the first test asks for them."""

import signal
from collections.abc import Iterator

import pytest

from holdfast.servers import EtcdServer

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Whatever runs in the background of a shell ignores Ctrl-C, and so would what it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def etcd_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real etcd. Each test keeps to a prefix of its own."""
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as server:
        yield f"etcd://{server.host}:{server.port}"
