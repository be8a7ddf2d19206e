"""Typed records: what the parts of Holdfast keep in the ledger.

A record is a msgspec struct that derives from `Record`; it travels as JSON, so that
people can read a ledger. Every record carries a schema number. Mixed versions work
during an upgrade: a reader fills in what an older writer left out and ignores what a
newer one added, and an older writer that changes a newer record keeps what it does not
know (`encode(..., over=...)`).

`update` is the usual pattern: read, decide (a pure function), compare and set, again on
conflict. An answer may be lost after the change was made, so the deciding function could
meet its own effect. `update` never lets that happen unless the caller says that it does no
harm (`repeatable=True`): as soon as the record may have been changed by the lost attempt,
`UnknownOutcome` is raised. A repeatable decision recognises its own effect: what it writes
carries an identity that stays the same across attempts.
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import msgspec

from holdfast.errors import Conflict, Corrupt, Fenced, Retriable, Unavailable, UnknownOutcome
from holdfast.ledger.base import Ledger
from holdfast.ledger.runtime import Runtime
from holdfast.ledger.types import Compare, Delete, Entry, Get, Put, Txn, absent, unchanged, written
from holdfast.retry import Policy

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


@dataclass(slots=True, eq=False)
class Stored(Generic[R]):
    """A record together with the entry it came from."""

    entry: Entry
    record: R


class Verdict(enum.Enum):
    """What a deciding function may return instead of a record."""

    KEEP = "leave the record as it is"
    REMOVE = "delete the record"


KEEP, REMOVE = Verdict.KEEP, Verdict.REMOVE

_ATTEMPTS_MAX = 10_000
"""Time ends an update, not the number of its attempts: the waits between them add up."""

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
    repeatable: bool = False,
) -> Stored[R] | None:
    """Change one record by a pure function; returns what is there afterwards.

    `lease=None` keeps the lease that the record has. `guards` are further conditions
    (fences): when one of them does not hold, and the record itself has not changed,
    `Fenced` is raised at once, because trying again cannot help.

    A conflict, a ledger that is away and a lost answer are tried again for as long as the
    ledger's `update_deadline_s` allows. `repeatable` says that `decide` does no harm where its
    own effect is already there: it recognises the effect, or writes the same once more. Without
    it, `UnknownOutcome` is raised when an answer was lost and the record may have changed since:
    the change may have been ours. The same error is raised when time runs out before anybody
    knows what became of a lost attempt.
    """
    change = _Change(runtime, key, kind, decide, lease, guards, repeatable)
    policy = Policy(
        attempts=_ATTEMPTS_MAX,
        base_s=0.006,
        max_s=0.75,
        jitter=2 / 3,
        deadline_s=runtime.ledger.timeouts.update_deadline_s,
    )
    try:
        return await policy.acall(change.attempt, on=change.goes_on, clock=runtime)
    except Retriable as error:
        if change.lost is None:
            raise
        raise change.unknown("later attempts failed") from error


@dataclass(slots=True)
class _Change(Generic[R]):
    """One update under way, and what its attempts have left behind."""

    runtime: Runtime
    key: str
    kind: type[R]
    decide: Callable[[R | None], R | Verdict]
    lease: int | None
    guards: Sequence[Compare]
    repeatable: bool
    lost: UnknownOutcome | None = None
    """The last attempt whose answer was lost, and `over`: the entry that it would replace."""
    over: Entry | None = None
    given_up: UnknownOutcome | None = None

    def goes_on(self, error: Exception) -> bool:
        """Whether another attempt may follow this error."""
        return (
            isinstance(error, Conflict | Unavailable | UnknownOutcome)
            and error is not self.given_up
        )

    async def attempt(self) -> Stored[R] | None:
        """Read, decide, compare and set, once."""
        stored = await load(self.runtime.ledger, self.key, self.kind)
        entry = stored.entry if stored else None
        # A record that is absent again may have been ours, and deleted: that proves nothing.
        if self.lost is not None and (entry is None or entry != self.over):
            self._may_be_ours()
        verdict = self.decide(stored.record if stored else None)
        if verdict is KEEP or (verdict is REMOVE and stored is None):
            return stored
        try:
            txn, there = await self._commit(entry, verdict)
        except UnknownOutcome as error:
            self.lost, self.over = error, entry
            raise
        if txn.succeeded:
            return there
        if txn.results[0] == entry:
            # The record was read by the transaction itself: a later look could find it changed
            # back. It is as it was, so it was a guard that failed, and looking again cannot help.
            raise Fenced(f"{self.key} was not changed: a guard no longer holds", key=self.key)
        if self.lost is not None:
            self._may_be_ours()
        raise Conflict(f"{self.key} was changed by others again and again", key=self.key)

    async def _commit(
        self, entry: Entry | None, verdict: R | Verdict
    ) -> tuple[Txn, Stored[R] | None]:
        """Try once; returns the answer, and what is there if it was committed."""
        compare = [unchanged(entry) if entry else absent(self.key), *self.guards]
        if not isinstance(verdict, Record):
            txn = await self.runtime.ledger.txn(compare, [Delete(self.key)], [Get(self.key)])
            return txn, None
        bound = self.lease if self.lease is not None else (entry.lease if entry else 0)
        op = put(self.key, verdict, lease=bound, over=entry)
        txn = await self.runtime.ledger.txn(compare, [op], [Get(self.key)])
        return txn, Stored(written(op, entry, txn.revision), verdict)

    def _may_be_ours(self) -> None:
        if not self.repeatable:
            self.given_up = self.unknown("the record may have been changed by it")
            raise self.given_up from self.lost

    def unknown(self, why: str) -> UnknownOutcome:
        """The error for an update of which nobody knows whether it was made."""
        return UnknownOutcome(
            f"{self.key} may or may not have been changed: the answer to an attempt was lost, and "
            f"{why}; look before trying again",
            key=self.key,
        )
