"""Servers that several parts' tests share; started once, when the first test asks for them."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.servers import EtcdServer

ROOT = Path(__file__).parent
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Whatever runs in the background of a shell ignores Ctrl-C, and so would what it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)


SLOW = (
    "run/test_real.py",
    "trainer/kills/test_points.py",
    "launch/test_launch.py",
    "gateway/test_stale_routes.py",
    "weights/test_commands.py",
    "ledger/test_conformance_model.py",
    "ledger/test_commands.py",
    "ledger/sqlite/test_sqlite_kill.py",
    "rollout/environments/test_judge.py",
    "trainer/test_references.py",
    "transfer/test_commands.py",
)
"""Files that take long; several processes begin with these, so that none is alone at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow files first, everything else as it was."""
    places = {name: place for place, name in enumerate(SLOW)}

    def place(item: pytest.Item) -> int:
        return places.get("/".join(item.path.parts[len(ROOT.parts) :]), len(SLOW))

    items.sort(key=place)


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A ledger of this test alone."""
    return f"sqlite:///{tmp_path}/ledger.db"


@pytest.fixture(scope="session")
def etcd_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real etcd. Each test keeps to a prefix of its own."""
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as server:
        yield f"etcd://{server.host}:{server.port}"
