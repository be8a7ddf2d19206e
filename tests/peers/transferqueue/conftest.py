"""A Ray cluster for all tests with TransferQueue, and a TransferQueue for each kind of store."""

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import pytest

# Without TransferQueue this folder has no tests. The other files import what is not there then.
collect_ignore_glob = [] if importlib.util.find_spec("transfer_queue") else ["*.py"]

os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0")
os.environ["TQ_NUM_THREADS"] = "1"
# Ray takes another address than loopback otherwise, whatever it is told.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
# How long TransferQueue lets its controller think about a publication.
os.environ["TQ_DATA_UPDATE_RESPONSE_TIMEOUT"] = "10"


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """Ray on loopback. It ends with the tests, and with this process."""
    from peers.transferqueue.system import ray

    ray.init(
        num_cpus=4, _node_ip_address="127.0.0.1", include_dashboard=False, log_to_driver=False
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="module", params=["shm", "redis"])
def place(
    request: pytest.FixtureRequest, cluster: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """The store of a TransferQueue that runs."""
    from peers.transferqueue import system

    folder = tmp_path_factory.mktemp("store")
    with system.place(request.param, folder) as found:
        with system.running(found.url):
            yield found
        assert found.names() == [], "closing has left values in the store"


@pytest.fixture
def part(place: Any) -> Iterator[str]:
    """A partition that no other test uses, and that is cleared at the end."""
    from peers.transferqueue import system

    name = system.fresh("part")
    yield name
    system.tq.get_client().clear_partition(name)
