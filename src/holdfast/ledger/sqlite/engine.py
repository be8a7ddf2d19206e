"""The ledger's file in use: transactions, reading, and what happens around a commit.

Invariants: every write first ends the leases whose time is up, in the same SQLite
transaction, so that nobody ever sees a lease that outlived its time; bells are rung after
the commit, never before.

Time is CLOCK_BOOTTIME, which goes on while the machine sleeps and which all processes of
one machine share. After a reboot it begins anew: then every lease of the time before is
ended when the file is opened.
"""

import contextlib
import functools
import os
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import apsw

from holdfast import faults
from holdfast.errors import Denied, HoldfastError, Mistake, NoRoom
from holdfast.files import owned_by_us
from holdfast.ledger.mvcc import compacted_error, lease_lost
from holdfast.ledger.sqlite.bells import Ringer, bell_folder
from holdfast.ledger.sqlite.file import (
    connect,
    disconnect,
    end,
    translate,
    translated,
    wait_for_lock,
)
from holdfast.ledger.sqlite.write import ENTRY, SHIFT, Write, number
from holdfast.ledger.types import Batch, Entry, Event, LeaseInfo, Page, prefix_end
from holdfast.machine import boot_id
from holdfast.timeouts import Timeouts

__all__ = ["Engine"]

P = ParamSpec("P")
T = TypeVar("T")

_BOUNDS = "SELECT (SELECT max(id) >> 20 FROM change), compacted FROM meta"
_WATCH_ROWS = 1000

BEFORE_COMMIT = faults.declare("ledger.sqlite.before_commit", "changes made, not committed")
AFTER_COMMIT = faults.declare("ledger.sqlite.after_commit", "committed, nobody woken, no answer")


def _reading(method: Callable[P, T]) -> Callable[P, T]:
    """Turn SQLite's errors into ours, also those that come up while rows are fetched."""

    @functools.wraps(method)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except apsw.Error as error:
            engine: Engine = args[0]  # type: ignore[assignment]  # only methods of Engine
            raise translate(error, engine.path) from error

    return wrapper


class Engine:
    """The file with three connections: one writes, one reads, one folds the log meanwhile."""

    def __init__(self, path: Path, *, full_sync: bool, timeouts: Timeouts) -> None:
        self.path = path
        self._busy_s = busy_s = timeouts.sqlite_busy_s
        self._writer = connect(path, full_sync=full_sync, busy_s=busy_s)
        self._cursor = self._writer.cursor()
        self.log_pages = 0
        self._writer.set_wal_hook(self._on_log)
        # Readers only ever wait while another process repairs the log after a crash.
        self._reader = self._second(full_sync, busy_s)
        self._folder = self._second(full_sync, timeouts.sqlite_fold_s)
        self._make_bell_folder()
        self._ringer = Ringer(bell_folder(path))
        self._end_old_leases()

    def _make_bell_folder(self) -> None:
        """Those that may write the file may ring, and no others."""
        folder, file = bell_folder(self.path), self.path.stat()
        mode = 0o770 if file.st_mode & stat.S_IWGRP else 0o700
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=mode)
        there = folder.lstat()
        if not stat.S_ISDIR(there.st_mode):
            raise Mistake(f"{folder} is in the way: it must be a folder, or not be there")
        if there.st_uid != file.st_uid and not owned_by_us(there):
            raise Denied(f"{folder} is user {there.st_uid}'s, the ledger is not: remove it")
        if there.st_uid == os.geteuid() and stat.S_IMODE(there.st_mode) != mode:
            folder.chmod(mode)

    def _second(self, full_sync: bool, wait_s: float) -> apsw.Connection:
        connection = connect(self.path, full_sync=full_sync, busy_s=self._busy_s, create=False)
        connection.set_busy_timeout(int(wait_s * 1000))
        return connection

    def close(self) -> None:
        """Close the file. SQLite folds its log into it when the last user leaves."""
        for connection in (self._folder, self._reader, self._writer):
            disconnect(connection, self.path)

    def now(self) -> float:
        """Seconds since this machine started, sleep included."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def _end_old_leases(self) -> None:
        boot = boot_id()
        if self._read("SELECT boot FROM meta").fetchone()[0] != boot:
            self.write([lambda write: write.end_all_leases(boot)], wait=True)

    # ---- writing -------------------------------------------------------------

    def write(self, jobs: Sequence[Callable[[Write], T]], *, wait: bool) -> list[T | Exception]:
        """Run jobs in one commit; a job that raises has its error in its place.

        Without `wait` raises apsw.BusyError at once when another process is writing.
        """
        try:
            return self._commit(jobs, wait=wait)
        except NoRoom:
            self.checkpoint()  # the log may hold room that can be used again
            return self._commit(jobs, wait=wait)

    def _commit(self, jobs: Sequence[Callable[[Write], T]], *, wait: bool) -> list[T | Exception]:
        with translated(self.path):
            if wait:
                wait_for_lock(self._begin, self.path, self._busy_s)
            else:
                self._begin()
            results: list[T | Exception] = []
            try:
                write = Write(self._cursor, self.now())
                results.extend(_outcome(job, write) for job in jobs)
                faults.point(BEFORE_COMMIT)
            except BaseException:
                self._rollback()
                raise
        with translated(self.path, committing=True):
            try:
                self._cursor.execute("COMMIT")
            except BaseException:
                self._rollback()
                raise
        faults.point(AFTER_COMMIT)
        if write.changed:
            self._ringer.ring(write.changed)
        return results

    def _on_log(self, _: apsw.Connection, __: str, pages: int) -> int:
        """Called after every commit: how long the log is, whoever has written it."""
        self.log_pages = pages
        return apsw.SQLITE_OK

    def _begin(self) -> None:
        self._cursor.execute("BEGIN IMMEDIATE")

    def _rollback(self) -> None:
        if self._writer.in_transaction:
            self._cursor.execute("ROLLBACK")

    def checkpoint(self) -> None:
        """Fold the write-ahead log into the file, and begin the log anew.

        Most of it is done beside the writers; only the rest holds them up. A reader that
        is stopped in the middle of reading delays it to another time.
        """
        with translated(self.path):
            try:
                self._folder.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
                self._folder.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_RESTART)
            except apsw.BusyError:
                return  # another process is at it, or a reader is in the way

    # ---- reading -------------------------------------------------------------

    def _read(self, sql: str, bindings: tuple[Any, ...] = ()) -> Any:
        return self._reader.execute(sql, bindings)

    @_reading
    def lease_due(self) -> bool:
        """Whether some lease has ended that nobody has swept up yet."""
        row = self._read("SELECT 1 FROM lease WHERE deadline <= ? LIMIT 1", (self.now(),))
        return row.fetchone() is not None

    @_reading
    def next_deadline_s(self) -> float | None:
        """How long until the next lease ends, if there is one."""
        deadline = self._read("SELECT min(deadline) FROM lease").fetchone()[0]
        return None if deadline is None else deadline - self.now()

    @_reading
    def get(self, key: str) -> Entry | None:
        """Read one entry."""
        row = self._read(f"{ENTRY} WHERE key = ?", (key,)).fetchone()
        return None if row is None else Entry(*row)

    def _at_one_moment(self, act: Callable[[], T]) -> T:
        self._read("BEGIN")
        try:
            return act()
        finally:
            end(self._reader, "COMMIT")

    @_reading
    def page(self, prefix: str, after: str, limit: int, revision: int) -> Page:
        """Read up to `limit` entries behind `after`, as they were at `revision`."""
        return self._at_one_moment(lambda: self._page(prefix, after, limit, revision))

    def _page(self, prefix: str, after: str, limit: int, revision: int) -> Page:
        newest, compacted = self._read(_BOUNDS).fetchone()
        if revision > newest:
            raise Mistake(f"revision {revision} is in the future: the newest is {newest}")
        if revision and revision < compacted:
            raise compacted_error(revision, compacted)
        at = revision or newest
        then = self._undo(prefix, at) if at < newest else {}
        where = f"{ENTRY} WHERE key > ? AND key >= ? AND key < ? ORDER BY key LIMIT ?"
        end = prefix_end(prefix)
        # Entries that are newer than `at` fall out again, so more have to be fetched.
        rows = self._read(where, (after, prefix, end, limit + 1 + len(then)))
        found = {row[0]: Entry(*row) for row in rows if row[0] not in then}
        found.update({key: entry for key, entry in then.items() if entry and key > after})
        keys = sorted(found)
        return Page(tuple(found[key] for key in keys[:limit]), at, more=len(keys) > limit)

    def _undo(self, prefix: str, revision: int) -> dict[str, Entry | None]:
        """What the keys that changed after `revision` were at `revision`."""
        rows = self._read(
            "SELECT key, was_value, was_created, was_modified, was_version, was_lease "
            "FROM change WHERE id >= ? AND key >= ? AND key < ? ORDER BY id DESC",
            ((revision + 1) << SHIFT, prefix, prefix_end(prefix)),
        )
        return {row[0]: None if row[2] is None else Entry(*row) for row in rows}

    @_reading
    def changes(self, prefix: str, start: int) -> tuple[list[Batch], int]:
        """What changed below `prefix` from `start` on, and the revision to go on from.

        Bounded: a long history comes in several parts, each ending with a whole revision.
        """
        return self._at_one_moment(lambda: self._changes(prefix, start))

    def _changes(self, prefix: str, start: int) -> tuple[list[Batch], int]:
        newest, compacted = self._read(_BOUNDS).fetchone()
        if start <= compacted:
            raise compacted_error(start, compacted)
        if start > newest:
            return [], start
        rows = self._read(
            "SELECT id, key, value, created, version, lease, was_value, was_created, "
            "was_modified, was_version, was_lease "
            "FROM change WHERE id >= ? AND key >= ? AND key < ? ORDER BY id",
            (start << SHIFT, prefix, prefix_end(prefix)),
        )
        return _batches(rows, newest)

    @_reading
    def lease_info(self, lease: int) -> LeaseInfo:
        """Describe a living lease."""
        return self._at_one_moment(lambda: self._lease_info(lease))

    def _lease_info(self, lease: int) -> LeaseInfo:
        row = self._read(
            "SELECT ttl_s, deadline FROM lease WHERE id = ?", (number(lease),)
        ).fetchone()
        if row is None:
            raise lease_lost(lease)
        keys = self._read("SELECT key FROM entry WHERE lease = ? ORDER BY key", (lease,))
        return LeaseInfo(lease, row[0], row[1] - self.now(), tuple(key for (key,) in keys))

    @_reading
    def leases(self) -> tuple[int, ...]:
        """All living leases."""
        return tuple(lease for (lease,) in self._read("SELECT id FROM lease ORDER BY id"))

    @_reading
    def inspect(self) -> list[str]:
        """Compare the tables with each other, after SQLite's own check of the file."""
        return self._at_one_moment(self._inspect)

    def _inspect(self) -> list[str]:
        found = [text for (text,) in self._read("PRAGMA integrity_check(20)") if text != "ok"]
        for words, sql in _INSPECTIONS.items():
            count = self._read(sql).fetchone()[0]
            if count:
                found.append(f"{count} {words}")
        return found


_INSPECTIONS = {
    "entries are newer than the ledger itself": (
        "SELECT count(*) FROM entry WHERE modified > (SELECT max(id) >> 20 FROM change)"
    ),
    "entries are bound to a lease that is not there": (
        "SELECT count(*) FROM entry WHERE lease != 0 AND lease NOT IN (SELECT id FROM lease)"
    ),
    "leases have numbers that were never given": (
        "SELECT count(*) FROM lease, meta WHERE lease.id > meta.last_lease"
    ),
    "entries differ from the last change that is recorded for them": (
        "WITH last AS (SELECT key, max(id) AS id FROM change GROUP BY key) "
        "SELECT count(*) FROM entry JOIN last USING (key) JOIN change ON change.id = last.id "
        "WHERE change.value IS NOT entry.value OR (change.id >> 20) != entry.modified"
    ),
    "entries were changed without a record in the history": (
        "SELECT count(*) FROM entry WHERE modified > (SELECT compacted FROM meta) "
        "AND key NOT IN (SELECT key FROM change)"
    ),
}


def _outcome(job: Callable[[Write], T], write: Write) -> T | Exception:
    """Run a job; an error that says "nothing was changed" is its outcome."""
    try:
        return job(write)
    except HoldfastError as error:
        return error


def _batches(rows: Iterable[Any], newest: int) -> tuple[list[Batch], int]:
    batches: list[Batch] = []
    events: list[Event] = []
    current = 0
    for count, row in enumerate(rows):
        revision = row[0] >> SHIFT
        if revision != current:
            if events:
                batches.append(Batch(current, tuple(events)))
            if count >= _WATCH_ROWS:
                return batches, revision
            events, current = [], revision
        events.append(_event(revision, row))
    if events:
        batches.append(Batch(current, tuple(events)))
    return batches, newest + 1


def _event(revision: int, row: Any) -> Event:
    _, key, value, created, version, lease, *was = row
    entry = None if created is None else Entry(key, value, created, revision, version, lease)
    previous = None if was[1] is None else Entry(key, *was)
    return Event(key, entry, previous)
