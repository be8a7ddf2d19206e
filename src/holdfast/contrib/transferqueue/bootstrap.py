"""Registration with TransferQueue, and the start of a run.

TransferQueue looks its back ends up by name, in each process. The first process imports this
package. The others get the configuration from the controller, and with it a `Registration`:
making that object imports this package there, before the name is looked up.
"""

import uuid
from typing import Any

import ray  # type: ignore[import-not-found]
import transfer_queue  # type: ignore[import-not-found]
from transfer_queue.storage.bootstrap.provider import (  # type: ignore[import-not-found]
    StorageBootstrapProvider,
)
from transfer_queue.storage.clients.base import (  # type: ignore[import-not-found]
    StorageClientFactory,
)
from transfer_queue.storage.managers.base import (  # type: ignore[import-not-found]
    StorageManagerFactory,
)

from holdfast.contrib.transferqueue import guards, versions
from holdfast.contrib.transferqueue.client import HoldfastStorageClient
from holdfast.contrib.transferqueue.manager import CLIENT, HoldfastStorageManager, own
from holdfast.contrib.transferqueue.settings import BACKEND, Settings
from holdfast.contrib.transferqueue.tokens import RUNS
from holdfast.errors import Mistake

__all__ = ["Registration", "register", "start"]


class Registration:
    """A part of the configuration; wherever it arrives, this package is imported."""

    def __repr__(self) -> str:
        return f"<{BACKEND} is registered>"


def register() -> None:
    """Make the back end known to TransferQueue in this process. Twice does no harm.

    Raises `Mistake` for a version of TransferQueue that it has not been tried with.
    """
    versions.check(transfer_queue.__version__)
    StorageClientFactory.register(CLIENT)(HoldfastStorageClient)
    StorageManagerFactory.register(BACKEND)(HoldfastStorageManager)
    StorageBootstrapProvider.register_provider(BACKEND)(start)
    guards.install(HoldfastStorageManager)


def start(conf: Any) -> dict[str, Any]:
    """Start a run: called once, by `tq.init` in the first process.

    Names the run, and proves that the store can be used before anybody relies on it.
    """
    settings = Settings.read(conf.backend.get(BACKEND))
    _one_machine(settings.url)
    run = f"{RUNS}{uuid.uuid4().hex[:12]}"
    section = conf.backend[BACKEND]
    section.run, section.registration = run, Registration()
    client = HoldfastStorageClient({**settings.model_dump(), "run": run})
    try:
        if settings.reset:
            client.sweep(RUNS)
        tokens = client.put(["0@probe"], [b"probe"])
        client.get(["0@probe"], custom_backend_meta=tokens)
        client.clear(["0@probe"], tokens)
    finally:
        client.close()
    own(run)
    return {"run": run}


def _one_machine(url: str) -> None:
    """Refuse the memory of one machine as the store of several."""
    machines = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    if url.startswith("shm:") and len(machines) > 1:
        raise Mistake(
            f"backend.{BACKEND}.url: {url} is the memory of one machine, and this Ray cluster has "
            f"{len(machines)}: use redis:// or mooncake://"
        )
