"""The ledger: shared truth in one place.

    async with holdfast.ledger.open("sqlite:///run.db") as ledger:
        await ledger.txn([absent("/job")], [Put("/job", b"mine")])

`base.py` has the interface and what it promises; `types.py` the nouns and the limits.
"""

from holdfast.ledger.base import Ledger, Watch
from holdfast.ledger.election import Election, Leadership
from holdfast.ledger.follow import Step, follow
from holdfast.ledger.leases import Keeper
from holdfast.ledger.records import KEEP, REMOVE, Record, Stored, update
from holdfast.ledger.runtime import LiveRuntime, Runtime
from holdfast.ledger.sync import SyncLedger, open_sync
from holdfast.ledger.types import (
    MAX_KEY_BYTES,
    MAX_TXN_BYTES,
    MAX_TXN_OPS,
    Batch,
    Compare,
    Delete,
    Entry,
    Event,
    Get,
    Lease,
    LeaseInfo,
    Op,
    Page,
    Put,
    Range,
    Txn,
    absent,
    join,
    present,
    same_life,
    unchanged,
    value_is,
)
from holdfast.ledger.url import lasting, open, without_password

__all__ = [
    "KEEP",
    "MAX_KEY_BYTES",
    "MAX_TXN_BYTES",
    "MAX_TXN_OPS",
    "REMOVE",
    "Batch",
    "Compare",
    "Delete",
    "Election",
    "Entry",
    "Event",
    "Get",
    "Keeper",
    "Leadership",
    "Lease",
    "LeaseInfo",
    "Ledger",
    "LiveRuntime",
    "Op",
    "Page",
    "Put",
    "Range",
    "Record",
    "Runtime",
    "Step",
    "Stored",
    "SyncLedger",
    "Txn",
    "Watch",
    "absent",
    "follow",
    "join",
    "lasting",
    "open",
    "open_sync",
    "present",
    "same_life",
    "unchanged",
    "update",
    "value_is",
    "without_password",
]
