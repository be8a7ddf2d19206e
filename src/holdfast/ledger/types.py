"""The nouns of the ledger, and the limits that every back end enforces.

A ledger is an ordered map from keys (text) to values (bytes) with one clock, the
*revision*: it grows by one with every transaction that changes something, and every
entry remembers the revisions at which it was created and last changed. The model is
etcd's, so that etcd is a back end and not a translation.

This module is pure: no I/O, no clock.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from holdfast.errors import Mistake, TooLarge

MAX_KEY_BYTES = 1024
MAX_TXN_OPS = 128
MAX_TXN_BYTES = 1 << 20
MIN_LEASE_S = 0.1
MAX_LEASE_S = 86_400.0

Target = Literal["create", "mod", "version", "lease", "value"]
Relation = Literal["==", "!=", "<", ">"]

FIELDS: Mapping[Target, str] = {
    "create": "create_revision",
    "mod": "mod_revision",
    "version": "version",
    "lease": "lease",
    "value": "value",
}
"""Which field of an entry a condition speaks of."""
_RELATIONS: Mapping[Relation, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}


class Entry(msgspec.Struct, frozen=True):
    """One key as it stands at some revision.

    `version` counts the changes since the key was created, beginning with 1.
    `lease` is 0 when the key is not bound to one.
    """

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease: int = 0


class Range(msgspec.Struct, frozen=True):
    """All entries below a prefix, in the order of their keys, at one revision."""

    entries: tuple[Entry, ...]
    revision: int


class Page(msgspec.Struct, frozen=True):
    """A part of a range. `more` says that keys follow after the last one."""

    entries: tuple[Entry, ...]
    revision: int
    more: bool


class Event(msgspec.Struct, frozen=True):
    """One key changed. `entry` is None when it was deleted, `previous` when it is new.

    `previous` may also be None when the back end no longer knows it.
    """

    key: str
    entry: Entry | None
    previous: Entry | None


class Batch(msgspec.Struct, frozen=True):
    """Everything that one transaction changed below the watched prefix."""

    revision: int
    events: tuple[Event, ...]


class Compare(msgspec.Struct, frozen=True):
    """A condition of a transaction. A missing key has 0 for every number.

    Comparing the *value* of a missing key is always false.
    """

    key: str
    target: Target
    relation: Relation
    operand: int | bytes


class Put(msgspec.Struct, frozen=True):
    """Write a key. `lease=0` unbinds it from whatever lease it had."""

    key: str
    value: bytes
    lease: int = 0


class Delete(msgspec.Struct, frozen=True):
    """Remove a key; nothing happens if it is not there. Its result is what it was."""

    key: str


class Get(msgspec.Struct, frozen=True):
    """Read a key inside a transaction, as it is after the operations before it."""

    key: str


Op = Put | Delete | Get


class Txn(msgspec.Struct, frozen=True):
    """The answer to a transaction.

    `results` has one item per operation of the branch that ran: the entry for a Get,
    the entry that was removed for a Delete, None for a Put. `revision` is the one that
    this transaction made or, if it changed nothing, the one it read.
    """

    succeeded: bool
    revision: int
    results: tuple[Entry | None, ...]


class Lease(msgspec.Struct, frozen=True):
    """A lease as it was granted. `ttl_s` may be longer than what was asked for."""

    id: int
    ttl_s: float


class LeaseInfo(msgspec.Struct, frozen=True):
    """A living lease: how long it still lasts and which keys vanish with it."""

    id: int
    ttl_s: float
    remaining_s: float
    keys: tuple[str, ...]


def absent(key: str) -> Compare:
    """True when the key is not there."""
    return Compare(key, "create", "==", 0)


def present(key: str) -> Compare:
    """True when the key is there, whatever it says."""
    return Compare(key, "create", "!=", 0)


def unchanged(entry: Entry) -> Compare:
    """True when nobody has touched the key since `entry` was read."""
    return Compare(entry.key, "mod", "==", entry.mod_revision)


def same_life(entry: Entry) -> Compare:
    """True when the key may have changed, but has not been deleted since `entry` was read."""
    return Compare(entry.key, "create", "==", entry.create_revision)


def value_is(key: str, value: bytes) -> Compare:
    """True when the key is there and holds exactly these bytes."""
    return Compare(key, "value", "==", value)


def holds(compare: Compare, entry: Entry | None) -> bool:
    """Decide one condition against the entry it speaks of."""
    relate = _RELATIONS[compare.relation]
    if entry is None:
        return compare.target != "value" and relate(0, compare.operand)
    return relate(getattr(entry, FIELDS[compare.target]), compare.operand)


def written(op: Put, previous: Entry | None, revision: int) -> Entry:
    """What a Put at `revision` makes of what was there."""
    if previous is None:
        return Entry(op.key, op.value, revision, revision, 1, op.lease)
    created, version = previous.create_revision, previous.version + 1
    return Entry(op.key, op.value, created, revision, version, op.lease)


def prefix_end(prefix: str) -> str:
    """The first text behind every key that begins with `prefix`.

    Code points sort like their UTF-8 bytes. A prefix begins with '/', so there is always a
    character that can grow.
    """
    head, last = prefix[:-1], ord(prefix[-1])
    if last == 0x10FFFF:
        return prefix_end(head)
    return head + chr(0xE000 if last == 0xD7FF else last + 1)  # surrogates are no characters


def join(*parts: str) -> str:
    """Build a key from parts, none of which may smuggle in another level.

    Names from outside go through here: `join("runs", run, "weights", channel)`.
    """
    for part in parts:
        if not part or "/" in part:
            raise Mistake(
                f"{part!r} cannot be part of a key: use a name that is not empty and has no '/'"
            )
    key = "/" + "/".join(parts)
    check_key(key)
    return key


def check_key(key: str) -> None:
    """Refuse what is not a key."""
    if type(key) is not str or not key.startswith("/"):
        raise Mistake(f"a key is text that begins with '/', not {_short(key)}")
    if not key.isprintable():
        raise Mistake(f"the key {_short(key)} has characters that cannot be printed", key=key)
    try:
        size = len(key) if key.isascii() else len(key.encode())
    except UnicodeEncodeError:
        raise Mistake(f"the key {_short(key)} is not valid Unicode") from None
    if size > MAX_KEY_BYTES:
        raise TooLarge(
            f"the key {_short(key)} has {size} bytes; the limit is {MAX_KEY_BYTES}", key=key
        )


def check_txn(compare: Sequence[Compare], then: Sequence[Op], otherwise: Sequence[Op]) -> None:
    """Refuse a transaction that some back end could not carry out."""
    size = 0
    for one in compare:
        check_key(one.key)
        if isinstance(one.operand, bytes) != (one.target == "value"):
            raise Mistake(f"{one.target} of {one.key} cannot be compared with {one.operand!r}")
        size += len(one.key) + (len(one.operand) if isinstance(one.operand, bytes) else 0)
    for name, ops in (("then", then), ("otherwise", otherwise)):
        written: set[str] = set()
        for op in ops:
            check_key(op.key)
            size += len(op.key)
            if isinstance(op, Get):
                continue
            if op.key in written:
                raise Mistake(
                    f"'{name}' writes {_short(op.key)} twice; a transaction writes a key once",
                    key=op.key,
                )
            written.add(op.key)
            if isinstance(op, Put):
                if not isinstance(op.value, bytes):
                    raise Mistake(
                        f"the value of {_short(op.key)} must be bytes, not {type(op.value)}",
                        key=op.key,
                    )
                if type(op.lease) is not int:
                    raise Mistake(f"a lease is a number, not {op.lease!r}", key=op.key)
                size += len(op.value)
    longest = max(len(compare), len(then), len(otherwise))
    if longest > MAX_TXN_OPS:
        raise TooLarge(
            f"a transaction has at most {MAX_TXN_OPS} conditions and as many operations, "
            f"not {longest}: split it"
        )
    if size > MAX_TXN_BYTES:
        raise TooLarge(
            f"the transaction has {size} bytes; the limit is {MAX_TXN_BYTES}: "
            "keep large values elsewhere and put a reference here"
        )


def check_ttl(ttl_s: float) -> None:
    """Refuse a time to live that no back end would keep."""
    if not MIN_LEASE_S <= ttl_s <= MAX_LEASE_S:
        raise Mistake(f"a lease lives {MIN_LEASE_S} to {MAX_LEASE_S:.0f} s, not {ttl_s}")


def writes(ops: Iterable[Op]) -> bool:
    """Whether any of these operations can change something."""
    return any(not isinstance(op, Get) for op in ops)


def _short(key: object) -> str:
    text = repr(key)
    return text if len(text) <= 80 else text[:77] + "..."
