"""Transfer: tensors and bytes by key that arrive, and a queue of samples that loses nothing.

    with transfer.connect("shm://run-7") as store:
        refs = store.put({"a": tensor, "b": b"", "c": None})
        values = store.get(refs.values())

A get returns exactly what was put, or an error that names the keys. `store.py` says how,
`frame.py` what proves it; `backend.py` is what the places keep that frames are put into.
"""

from holdfast.errors import MissingPackage

try:
    import numpy as _numpy
    import xxhash as _xxhash
except ImportError as _error:
    raise MissingPackage(
        f"{_error.name} is not installed: pip install 'holdfast-rl[transfer]'"
    ) from _error

from holdfast.transfer.backend import Stat, Stored
from holdfast.transfer.frame import Ref
from holdfast.transfer.store import Status, Store, status
from holdfast.transfer.url import connect

del _numpy, _xxhash

__all__ = ["Ref", "Stat", "Status", "Store", "Stored", "connect", "status"]
