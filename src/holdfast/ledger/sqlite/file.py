"""The ledger's file: making it, recognising it, and naming what is wrong with it.

A file is ours when its header carries our application id. Anything else is refused
before a byte of it is changed. The schema number is the header's user version: an older
file would be brought up to date here, a newer one is refused.
"""

import contextlib
import os
import random
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import apsw

from holdfast.errors import (
    Corrupt,
    Denied,
    HoldfastError,
    Mistake,
    NoRoom,
    NotALedger,
    TooNew,
    Unavailable,
    UnknownOutcome,
)
from holdfast.files import owned_by_us
from holdfast.machine import file_system_of, is_network_file_system

__all__ = ["SCHEMA", "connect", "end", "translate", "translated", "wait_for_lock"]

T = TypeVar("T")

# Which process opened which file, and how often. A forked child inherits this together with
# SQLite's own table of open files: there SQLite believes to hold locks that only the parent
# holds, and what the child commits is lost when the parent closes the file.
_open: Counter[tuple[int, str]] = Counter()

# What a full disk makes fail: writing, and making the file that its users share.
_ROOM = (apsw.SQLITE_IOERR_WRITE, apsw.SQLITE_IOERR_SHMSIZE, apsw.SQLITE_IOERR_SHMOPEN)

APPLICATION_ID = 0x48464C44  # "HFLD"
SCHEMA = 1

# `change.id` is revision << 20 | position: ordered by revision, then as written. The last
# change is never deleted: its id says which revision the ledger is at.
# `change.total` is the running sum of the sizes of all changes ever, so that the history
# can be cut at a number of bytes without adding anything up.
_TABLES = """
CREATE TABLE meta (
  id INTEGER PRIMARY KEY CHECK (id = 1),
  compacted INTEGER NOT NULL, last_lease INTEGER NOT NULL, boot TEXT NOT NULL
);
INSERT INTO meta VALUES (1, 0, 0, '');
CREATE TABLE entry (
  key TEXT PRIMARY KEY, value BLOB NOT NULL, created INTEGER NOT NULL,
  modified INTEGER NOT NULL, version INTEGER NOT NULL, lease INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX entry_lease ON entry (lease) WHERE lease != 0;
CREATE TABLE change (
  id INTEGER PRIMARY KEY, key TEXT NOT NULL,
  value BLOB, created INTEGER, version INTEGER, lease INTEGER,
  was_value BLOB, was_created INTEGER, was_modified INTEGER,
  was_version INTEGER, was_lease INTEGER, total INTEGER NOT NULL
);
INSERT INTO change (id, key, total) VALUES (1 << 20, '', 0);
CREATE TABLE lease (
  id INTEGER PRIMARY KEY, ttl_s REAL NOT NULL, deadline REAL NOT NULL
);
CREATE INDEX lease_deadline ON lease (deadline);
"""


def connect(path: Path, *, full_sync: bool, busy_s: float, create: bool = True) -> apsw.Connection:
    """Open the file, make it a ledger if it is new, refuse it if it is something else."""
    _check_place(path, create=create)
    _check_fork(path)
    if create:
        _make_private(path)
    with translated(path):
        flags = apsw.SQLITE_OPEN_READWRITE | (apsw.SQLITE_OPEN_CREATE if create else 0)
        connection = apsw.Connection(str(path), flags=flags)
        try:
            wait_for_lock(lambda: _prepare(connection, path, full_sync=full_sync), path, busy_s)
            if create:
                _tighten(path.resolve())
        except BaseException:
            connection.close()
            raise
    _open[os.getpid(), str(path.resolve())] += 1
    return connection


def disconnect(connection: apsw.Connection, path: Path) -> None:
    """Close what `connect` has opened."""
    connection.close()
    _open[os.getpid(), str(path.resolve())] -= 1


def _check_fork(path: Path) -> None:
    for (pid, name), count in _open.items():
        if count and pid != os.getpid() and name == str(path.resolve()):
            raise Mistake(
                f"this process was forked from one that had {path} open, and SQLite's locks do "
                "not survive that: open the ledger after forking, or start processes with 'spawn'"
            )


def _check_place(path: Path, *, create: bool) -> None:
    folder = path.absolute().parent
    if path.is_dir():
        raise Mistake(f"{path} is a folder: name a file in it, as in sqlite:///{path}/ledger.db")
    if not folder.is_dir():
        raise Mistake(f"the folder {folder} is not there: create it first")
    if not create and not path.exists():
        raise Mistake(f"there is no ledger at {path}: check the path")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise Denied(
            f"no right to write in {folder}: a ledger keeps its log beside its file; "
            "choose another folder or change its permissions"
        )
    if path.exists() and not os.access(path, os.R_OK | os.W_OK):
        raise Denied(f"no right to read and write {path}: change its owner or permissions")
    kind, _ = file_system_of(folder)
    if is_network_file_system(kind):
        raise Mistake(
            f"{folder} is on a network file system ({kind}), where SQLite's locks do not hold: "
            "use a local disk, or etcd:// for several machines"
        )


def _make_private(path: Path) -> None:
    """Make the file its owner's alone; SQLite gives its log the same mode, and would make 0644."""
    link = path.lstat() if path.is_symlink() else None
    if link is not None and not owned_by_us(link):
        raise Denied(f"{path} is a link of user {link.st_uid}: name the ledger's file itself")
    with contextlib.suppress(OSError):  # it is there, or SQLite says better what is wrong
        # Without a descriptor: closing one would end the locks that this process has on the file.
        os.mknod(path.resolve(), stat.S_IFREG | 0o600)


def _tighten(path: Path) -> None:
    """Take from a ledger of an older version the rights that SQLite gave to everybody.

    A group that may write was let in on purpose: it stays.
    """
    about = path.stat()
    if about.st_uid != os.geteuid():
        if about.st_mode & stat.S_IWOTH and not owned_by_us(about):
            raise Denied(f"{path} belongs to user {about.st_uid}, and every user may write it")
        return
    for name in (path, *(path.with_name(path.name + end) for end in ("-wal", "-shm"))):
        with contextlib.suppress(FileNotFoundError):
            mode = stat.S_IMODE(name.stat().st_mode)
            allowed = 0o770 if mode & stat.S_IWGRP else 0o700
            if mode & ~allowed:
                name.chmod(mode & allowed)


def _prepare(connection: apsw.Connection, path: Path, *, full_sync: bool) -> None:
    def pragma(text: str) -> object:
        return connection.execute(f"PRAGMA {text}").get

    if not _is_ours(connection, path):
        pragma("journal_mode = WAL")
        with _transaction(connection):
            if not _is_ours(connection, path):  # somebody else may have been quicker
                connection.execute(_TABLES)
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {SCHEMA}")
    pragma("journal_mode = WAL")
    pragma(f"synchronous = {'FULL' if full_sync else 'NORMAL'}")
    pragma("wal_autocheckpoint = 0")  # the engine's thread does it, beside the writers
    pragma("journal_size_limit = 16777216")


def _is_ours(connection: apsw.Connection, path: Path) -> bool:
    """True for a ledger, False for a new file; raises for anything else."""
    if connection.in_transaction:
        return _look(connection, path)
    connection.execute("BEGIN")  # one moment: somebody may be making it a ledger just now
    try:
        return _look(connection, path)
    finally:
        end(connection, "COMMIT")


def _look(connection: apsw.Connection, path: Path) -> bool:
    application = connection.pragma("application_id")
    if application == APPLICATION_ID:
        schema = connection.pragma("user_version")
        if schema > SCHEMA:
            raise TooNew(
                f"{path} was written by a newer Holdfast (schema {schema}, this one knows "
                f"{SCHEMA}): upgrade Holdfast on this machine"
            )
        return True
    tables = connection.execute("SELECT count(*) FROM sqlite_schema").get
    if application or tables or connection.pragma("page_count") > 1:
        raise NotALedger(f"{path} is an SQLite file of another program, not a Holdfast ledger")
    return False


@contextlib.contextmanager
def _transaction(connection: apsw.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        end(connection, "ROLLBACK")
        raise
    connection.execute("COMMIT")


def end(connection: apsw.Connection, how: str) -> None:
    """End a transaction, unless an error has made SQLite roll it back already.

    Ending it again would hide that error behind "no transaction is active".
    """
    if connection.in_transaction:
        connection.execute(how)


def wait_for_lock(act: Callable[[], T], path: Path, busy_s: float) -> T:
    """Call `act` until nobody else holds the file's lock, `busy_s` at most.

    Transactions here take well under a millisecond, so the waits are short; SQLite's own
    busy handler would sleep up to 100 ms.
    """
    deadline = time.monotonic() + busy_s
    wait_s = 0.00005
    while True:
        try:
            return act()
        except apsw.BusyError:
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"another process has held the lock of {path} for {busy_s:g} s: "
                    "is one stopped in the middle of a transaction?"
                ) from None
            time.sleep(wait_s * (0.5 + random.random()))
            wait_s = min(wait_s * 1.5, 0.002)


@contextlib.contextmanager
def translated(path: Path, *, committing: bool = False) -> Iterator[None]:
    """Turn SQLite's errors into ours."""
    try:
        yield
    except apsw.BusyError:
        raise  # whoever called knows how to wait
    except apsw.Error as error:
        raise translate(error, path, committing=committing) from error


def translate(error: apsw.Error, path: Path, *, committing: bool = False) -> HoldfastError:
    """Our error for one of SQLite's."""
    match error:
        case apsw.FullError():
            return NoRoom(f"no room left on the disk of {path}: nothing was changed; free some")
        case apsw.NotADBError():
            return NotALedger(f"{path} is not a Holdfast ledger, nor any SQLite file")
        case apsw.CorruptError():
            return Corrupt(
                f"{path} is damaged ({error}): stop its users, keep a copy, and restore a "
                "backup (holdfast ledger restore)"
            )
        case apsw.ReadOnlyError() | apsw.CantOpenError() | apsw.PermissionsError():
            return Denied(f"cannot open {path} for writing ({error}): check its permissions")
        case apsw.BusyError():
            return Unavailable(f"another process keeps {path} locked")
        case apsw.IOError() if committing:
            return UnknownOutcome(f"writing to {path} failed while committing ({error})")
        case apsw.IOError():
            if getattr(error, "extendedresult", 0) in _ROOM and _is_full(path):
                return NoRoom(
                    f"no room left on the disk of {path}: nothing was changed; free some"
                )
            return Unavailable(f"the disk of {path} reports an error ({error})")
        case _:
            return HoldfastError(f"unexpected error of SQLite on {path}: {error}")


def _is_full(path: Path) -> bool:
    state = os.statvfs(path.parent)
    return state.f_bavail * state.f_frsize < 65_536
