"""One write transaction as SQL statements.

A job checks everything before it writes anything, so a job that raises has changed
nothing and the others in the same commit are not disturbed by it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import apsw
import msgspec

from holdfast.errors import Mistake
from holdfast.ledger.mvcc import lease_lost
from holdfast.ledger.types import (
    Compare,
    Delete,
    Entry,
    Event,
    Get,
    Op,
    Put,
    Txn,
    holds,
    written,
)

__all__ = ["ENTRY", "SHIFT", "Write", "number"]

HISTORY_REVISIONS = 100_000
HISTORY_BYTES = 64 << 20
HISTORY_REVISIONS_MIN = 100
_TRIM_EVERY = 64
SHIFT = 20
"""`change.id` is revision << SHIFT | position."""

ENTRY = "SELECT key, value, created, modified, version, lease FROM entry"
_BEGINNING = (
    "SELECT id >> 20, total, EXISTS (SELECT 1 FROM lease WHERE deadline <= ?) "
    "FROM change ORDER BY id DESC LIMIT 1"
)
_NONE4 = (None,) * 4
_NONE5 = (None,) * 5


def number(lease: int) -> int:
    """A lease's number as SQLite can hold it; what it cannot hold was never given (0)."""
    return lease if 0 < lease < 1 << 63 else 0


class Write:
    """One open write transaction: reads and changes, and the keys that were changed.

    It begins by ending the leases whose time is up.
    """

    def __init__(self, cursor: apsw.Cursor, now: float) -> None:
        execute: Any = cursor.execute
        self._run: Callable[..., Any] = execute
        self.now = now
        self.changed: list[str] = []
        self.revision: int
        self._total: int
        self.revision, self._total, due = self._run(_BEGINNING, (now,)).fetchone()
        if due:
            self._expire()

    def get(self, key: str) -> Entry | None:
        """Read one entry."""
        row = self._run(f"{ENTRY} WHERE key = ?", (key,)).fetchone()
        return None if row is None else Entry(*row)

    def txn(self, compare: Sequence[Compare], then: Sequence[Op], otherwise: Sequence[Op]) -> Txn:
        """Carry out a transaction that `check_txn` has accepted."""
        succeeded = all(holds(one, self.get(one.key)) for one in compare)
        ops = then if succeeded else otherwise
        for lease in {op.lease for op in ops if isinstance(op, Put) and op.lease}:
            if self._run("SELECT 1 FROM lease WHERE id = ?", (number(lease),)).fetchone() is None:
                raise lease_lost(lease)
        results: list[Entry | None] = []
        changes: list[Event] = []
        for op in ops:
            previous = self.get(op.key)
            match op:
                case Put():
                    results.append(None)
                    changes.append(Event(op.key, self._put(op, previous), previous))
                case Delete():
                    results.append(previous)
                    if previous is not None:
                        changes.append(Event(op.key, None, previous))
                        self._run("DELETE FROM entry WHERE key = ?", (op.key,))
                case Get():
                    results.append(previous)
        self._record(changes)
        return Txn(succeeded, self.revision, tuple(results))

    def _put(self, op: Put, previous: Entry | None) -> Entry:
        entry = written(op, previous, self.revision + 1)
        columns = msgspec.structs.astuple(entry)
        self._run("INSERT OR REPLACE INTO entry VALUES (?, ?, ?, ?, ?, ?)", columns)
        return entry

    def _record(self, changes: Sequence[Event]) -> None:
        if not changes:
            return
        self.revision += 1
        for position, event in enumerate(changes):
            new, old = event.entry, event.previous
            self._total += 2 * len(event.key) + len(new.value if new else b"")
            self._total += len(old.value if old else b"")
            after = (new.value, new.create_revision, new.version, new.lease) if new else _NONE4
            before = (
                (old.value, old.create_revision, old.mod_revision, old.version, old.lease)
                if old
                else _NONE5
            )
            self._run(
                "INSERT INTO change VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (self.revision << SHIFT | position, event.key, *after, *before, self._total),
            )
            self.changed.append(event.key)
        if self.revision % _TRIM_EVERY == 0:
            self._trim()

    # ---- leases --------------------------------------------------------------

    def _expire(self) -> None:
        """End every lease whose time is up, each in a revision of its own."""
        query = "SELECT id FROM lease WHERE deadline <= ? ORDER BY deadline, id"
        for (lease,) in self._run(query, (self.now,)).fetchall():
            self.revoke(lease)

    def revoke(self, lease: int) -> None:
        """End a lease and delete its keys."""
        lease = number(lease)
        keys = self._run(f"{ENTRY} WHERE lease = ? AND lease != 0 ORDER BY key", (lease,))
        gone = [Entry(*row) for row in keys.fetchall()]
        self._run("DELETE FROM entry WHERE lease = ? AND lease != 0", (lease,))
        self._run("DELETE FROM lease WHERE id = ?", (lease,))
        # A revision has room for a million changes; more keys than that go in several.
        for first in range(0, len(gone), 1 << SHIFT):
            part = gone[first : first + (1 << SHIFT)]
            self._record([Event(entry.key, None, entry) for entry in part])

    def end_all_leases(self, boot: str) -> None:
        """End the leases of an earlier boot, whose clock is not ours, unless somebody has.

        Looked at here, in the transaction: another opener may have ended them, and taken leases
        of its own, since we looked.
        """
        if self._run("SELECT boot FROM meta").fetchone()[0] == boot:
            return
        for (lease,) in self._run("SELECT id FROM lease ORDER BY id").fetchall():
            self.revoke(lease)
        self._run("UPDATE meta SET boot = ?", (boot,))

    def grant(self, ttl_s: float) -> int:
        """Begin a lease. Numbers are never used twice."""
        self._run("UPDATE meta SET last_lease = last_lease + 1")
        lease: int = self._run("SELECT last_lease FROM meta").fetchone()[0]
        self._run("INSERT INTO lease VALUES (?, ?, ?)", (lease, ttl_s, self.now + ttl_s))
        return lease

    def keep_alive(self, lease: int) -> float:
        """Let a living lease begin again."""
        row = self._run("SELECT ttl_s FROM lease WHERE id = ?", (number(lease),)).fetchone()
        if row is None:
            raise lease_lost(lease)
        ttl_s: float = row[0]
        self._run("UPDATE lease SET deadline = ? WHERE id = ?", (self.now + ttl_s, lease))
        return ttl_s

    # ---- history -------------------------------------------------------------

    def compact(self, revision: int) -> None:
        """Forget what happened up to `revision`."""
        if revision > self.revision:
            raise Mistake(f"revision {revision} is in the future: the newest is {self.revision}")
        self._run("UPDATE meta SET compacted = max(compacted, ?)", (revision,))
        self._run(
            "DELETE FROM change WHERE id < min(?, (SELECT max(id) FROM change))",
            ((revision + 1) << SHIFT,),
        )

    def _trim(self) -> None:
        """Forget what is beyond the bounds of the history; whole revisions only."""
        last = 0
        for row_id, total in self._run("SELECT id, total FROM change ORDER BY id"):
            revision = row_id >> SHIFT
            behind = self.revision - revision
            heavy = self._total - total > HISTORY_BYTES and behind > HISTORY_REVISIONS_MIN
            if behind <= HISTORY_REVISIONS and not heavy:
                break
            last = revision
        # The rows of `last` may only be heavy in part, so keep it.
        if last > 1:
            self.compact(last - 1)
