"""The record of what people did to a ledger by hand.

It is written before the deed: a deed without a record cannot happen, a record without a
deed (the process died in between) can.
"""

import getpass
import secrets
import socket
import time

from holdfast.ledger.base import Ledger
from holdfast.ledger.records import Record, put
from holdfast.ledger.types import absent

__all__ = ["AUDIT", "Override", "audited"]

AUDIT = "/holdfast/audit/"
_KEYS_MAX = 100


class Override(Record, frozen=True, kw_only=True):
    """One deed: who, where, when, what, why, and which keys it touched."""

    action: str
    target: str
    reason: str
    user: str
    host: str
    at: float
    keys: tuple[str, ...] = ()


async def audited(
    ledger: Ledger, action: str, reason: str, target: str, keys: tuple[str, ...]
) -> str:
    """Record a deed that is about to be done; returns the record's key."""
    at = time.time()
    record = Override(
        action=action,
        target=target,
        reason=reason,
        user=_user(),
        host=socket.gethostname(),
        at=at,
        keys=keys[:_KEYS_MAX],
    )
    key = f"{AUDIT}{int(at * 1000):015d}-{secrets.token_hex(4)}"
    await ledger.txn([absent(key)], [put(key, record)])
    return key


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without an entry for its user
        return "unknown"
