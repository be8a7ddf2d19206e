"""Typed records: what the parts of Holdfast keep in the ledger.

A record is a msgspec struct that derives from `Record`; it travels as JSON, so that
people can read a ledger. Every record carries a schema number. Mixed versions work
during an upgrade: a reader fills in what an older writer left out and ignores what a
newer one added, and an older writer that changes a newer record keeps what it does not
know (`encode(..., over=...)`).

`update` is the usual pattern: read, decide (a pure function), compare and set, again on
conflict. The deciding function may be called several times, also after its own effect is
already there because an answer was lost: it must recognise its own effect, so what it
writes carries an identity that stays the same across attempts.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar, Generic, TypeVar

import msgspec

from holdfast.errors import Conflict, Corrupt, Fenced, Unavailable, UnknownOutcome
from holdfast.ledger.base import Ledger
from holdfast.ledger.runtime import Runtime
from holdfast.ledger.types import Compare, Delete, Entry, Get, Put, Txn, absent, unchanged

__all__ = [
    "KEEP",
    "REMOVE",
    "Record",
    "Stored",
    "Verdict",
    "decode",
    "encode",
    "load",
    "put",
    "update",
]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all records. A new field has a default; a new meaning has a new number."""

    SCHEMA: ClassVar[int] = 1

    schema: int = 0

    def __post_init__(self) -> None:
        if self.schema == 0:
            msgspec.structs.force_setattr(self, "schema", self.SCHEMA)


R = TypeVar("R", bound=Record)


class Stored(Generic[R]):
    """A record together with the entry it came from."""

    __slots__ = ("entry", "record")

    def __init__(self, entry: Entry, record: R) -> None:
        self.entry = entry
        self.record = record


class Verdict:
    """What a deciding function may return instead of a record: KEEP or REMOVE."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


KEEP = Verdict("KEEP")
"""What a deciding function returns to leave the record as it is."""
REMOVE = Verdict("REMOVE")
"""What a deciding function returns to delete the record."""

_encoder = msgspec.json.Encoder()


def encode(record: Record, *, over: bytes | None = None) -> bytes:
    """The record as bytes. With `over`, fields of a newer writer survive in it."""
    raw = _encoder.encode(record)
    if over is None:
        return raw
    try:
        old = msgspec.json.decode(over)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return raw  # it was none of ours
    schema = old.get("schema", 0) if isinstance(old, dict) else 0
    if not isinstance(schema, int) or schema <= record.SCHEMA:
        return raw
    known = {field.encode_name for field in msgspec.structs.fields(record)}
    kept = {name: value for name, value in old.items() if name not in known}
    return _encoder.encode({**kept, **msgspec.json.decode(raw), "schema": schema})


def decode(kind: type[R], entry: Entry) -> R:
    """The entry's value as a record. Raises `Corrupt` when it is something else."""
    try:
        return msgspec.json.decode(entry.value, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(
            f"{entry.key} does not hold a {kind.__name__} (was it written by hand? "
            f"`holdfast ledger delete` removes it): {error}",
            key=entry.key,
        ) from error


async def load(ledger: Ledger, key: str, kind: type[R]) -> Stored[R] | None:
    """Read one record, or None."""
    entry = await ledger.get(key)
    return None if entry is None else Stored(entry, decode(kind, entry))


def put(key: str, record: Record, *, lease: int = 0, over: Entry | None = None) -> Put:
    """The operation that writes a record."""
    return Put(key, encode(record, over=over.value if over else None), lease)


async def update(
    runtime: Runtime,
    key: str,
    kind: type[R],
    decide: Callable[[R | None], R | Verdict],
    *,
    lease: int | None = None,
    guards: Sequence[Compare] = (),
    attempts: int = 16,
) -> Stored[R] | None:
    """Change one record by a pure function; returns what is there afterwards.

    `lease=None` keeps the lease that the record has. `guards` are further conditions
    (fences): when one of them does not hold, and the record itself has not changed,
    `Fenced` is raised at once, because trying again cannot help.
    """
    failure: Conflict | UnknownOutcome | Unavailable | None = None
    for attempt in range(attempts):
        if attempt:
            await runtime.sleep(min(0.5, 0.002 * 2**attempt) * (0.5 + runtime.random.random()))
        try:
            stored = await load(runtime.ledger, key, kind)
            verdict = decide(stored.record if stored else None)
            if verdict is KEEP or (verdict is REMOVE and stored is None):
                return stored
            committed, written = await _commit(runtime, key, stored, verdict, lease, guards)
        except (UnknownOutcome, Unavailable) as error:
            failure = error  # look again: the next reading shows whether it took effect
            continue
        if committed:
            return written
        failure = Conflict(f"{key} was changed by others {attempt + 1} times in a row", key=key)
    assert failure is not None
    failure.attempt = attempts
    raise failure


async def _commit(
    runtime: Runtime,
    key: str,
    stored: Stored[R] | None,
    verdict: R | Verdict,
    lease: int | None,
    guards: Sequence[Compare],
) -> tuple[bool, Stored[R] | None]:
    """Try once; tells whether it was committed, and what is there then."""
    entry = stored.entry if stored else None
    compare = unchanged(entry) if entry else absent(key)
    if not isinstance(verdict, Record):
        txn = await runtime.ledger.txn([compare, *guards], [Delete(key)], [Get(key)])
        _check_guards(txn, key, entry)
        return txn.succeeded, None
    bound = lease if lease is not None else (entry.lease if entry else 0)
    op = put(key, verdict, lease=bound, over=entry)
    txn = await runtime.ledger.txn([compare, *guards], [op], [Get(key)])
    _check_guards(txn, key, entry)
    fresh = Entry(
        key,
        op.value,
        entry.create_revision if entry else txn.revision,
        txn.revision,
        entry.version + 1 if entry else 1,
        bound,
    )
    return txn.succeeded, Stored(fresh, verdict)


def _check_guards(txn: Txn, key: str, entry: Entry | None) -> None:
    """Raise when it was a guard that failed: looking again would not help.

    The record was read by the transaction itself: a later look could find it changed back.
    """
    if not txn.succeeded and txn.results[0] == entry:
        raise Fenced(f"{key} was not changed: a guard no longer holds", key=key)
