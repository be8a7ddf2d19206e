"""Records that cannot be read concern nobody but themselves.

A part that reads many records at once asks `readable` for each of them: one that was damaged, or
written by hand, comes back as `Unreadable`, with its key and the reason, and the others go on.
Each such entry is told once per process, as an event. A part that reads one record, and cannot do
without it, uses `decode` and gets `Corrupt`.
"""

from collections import OrderedDict
from typing import TypeVar

import msgspec

from holdfast import events
from holdfast.errors import Corrupt
from holdfast.ledger.records import Record, decode
from holdfast.ledger.types import Entry

__all__ = ["Unreadable", "UnreadableRecord", "readable", "tell"]

R = TypeVar("R", bound=Record)

_TOLD_MAX = 1024
_told: OrderedDict[tuple[str, int], None] = OrderedDict()


class UnreadableRecord(events.Event, frozen=True, tag="ledger.unreadable"):
    """An entry does not hold the record that its key promises. Everything else goes on."""

    key: str
    reason: str


class Unreadable(msgspec.Struct, frozen=True):
    """What stands for such an entry."""

    key: str
    reason: str


def readable(kind: type[R], entry: Entry) -> R | Unreadable:
    """The entry's record, or what is wrong with it."""
    try:
        return decode(kind, entry)
    except Corrupt as error:
        return tell(entry, str(error))


def tell(entry: Entry, reason: str) -> Unreadable:
    """Say once that an entry is unreadable."""
    which = (entry.key, entry.mod_revision)
    if which not in _told:
        _told[which] = None
        if len(_told) > _TOLD_MAX:
            _told.popitem(last=False)
        events.emit(UnreadableRecord(key=entry.key, reason=reason))
    return Unreadable(entry.key, reason)
