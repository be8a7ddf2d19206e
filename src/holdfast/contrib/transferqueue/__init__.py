"""Holdfast's store as a storage back end of TransferQueue (0.1.8 to 0.1.11; `versions.py`).

    import holdfast.contrib.transferqueue          # in the process that calls tq.init first

    tq.init({"backend": {"storage_backend": "Holdfast", "Holdfast": {"url": "shm://run-7"}}})

Importing it registers a client, a manager and a provider under the name "Holdfast". Other
processes need not import it: the configuration that they get from TransferQueue's controller
does it for them. docs/TRANSFERQUEUE.md says what a user of verl has to write, what fails
loudly now, and where this ends.

**What is promised.** `get_data` returns exactly what the metadata speaks of, or raises an
error that names the keys: what is missing, damaged, cut, replaced or cleared is never left
out, never None and never somebody else's. A put has been published when it returns, and has
not when it raises (`UnknownOutcome` says that nobody knows).

**How.** Every put writes under names of its own, so that nothing is ever overwritten. What
TransferQueue's controller keeps per sample and field is a token (`tokens.py`): the reference
to exactly that value. `client.py` puts and gets; `manager.py` publishes and clears;
`guards.py` watches what TransferQueue does before its storage is asked; `checkpoint.py` saves
and restores; `bootstrap.py` starts it all.

TransferQueue's own messages between clients and controller are as they always were: they
carry no values when this back end is used, and they are not checked here.
"""

from holdfast.contrib.transferqueue.versions import SUPPORTED, check
from holdfast.errors import MissingPackage

try:
    import transfer_queue as _transfer_queue  # type: ignore[import-not-found]
except ImportError as _error:
    raise MissingPackage(
        f"{_error.name} is not installed: pip install TransferQueue=={SUPPORTED[-1]} "
        "'holdfast-rl[transfer]'"
    ) from _error
else:  # before anything else of it is imported: another version may not have it
    check(_transfer_queue.__version__)

from holdfast.contrib.transferqueue.bootstrap import register
from holdfast.contrib.transferqueue.client import HoldfastStorageClient
from holdfast.contrib.transferqueue.manager import HoldfastStorageManager, NotPublished
from holdfast.contrib.transferqueue.settings import BACKEND, Settings

del _transfer_queue, check

__all__ = [
    "BACKEND",
    "SUPPORTED",
    "HoldfastStorageClient",
    "HoldfastStorageManager",
    "NotPublished",
    "Settings",
    "register",
]

register()
