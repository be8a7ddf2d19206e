"""Backup and restore, for every back end.

A backup is a file of JSON lines: a heading, one line per entry, and a closing line with
the count and a checksum over everything before it, so that half a file is never taken for
a whole one. It is one moment of the ledger (one revision). Entries that are bound to a
lease are written down but not restored: they say that somebody is alive, and after a
restore nobody is.

Restoring needs an empty ledger. It marks the ledger first and takes the mark away with
its last transaction; a restore that was interrupted is finished by running it again.
"""

import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from holdfast.errors import Corrupt, Mistake, NoRoom, NotFound, TooNew
from holdfast.ledger.base import Ledger
from holdfast.ledger.types import MAX_TXN_BYTES, Delete, Entry, Op, Put, absent, value_is

__all__ = ["RESTORING", "backup", "read", "restore"]

FORMAT = 1
RESTORING = "/holdfast/restoring"
"""This key is there while a restore is under way."""
_OPS = 100


class _Heading(msgspec.Struct, tag="holdfast-ledger-backup", tag_field="type"):
    format: int
    revision: int
    at: float


class _Line(msgspec.Struct, tag="entry", tag_field="type"):
    key: str
    value: bytes
    lease: bool = False


class _Closing(msgspec.Struct, tag="end", tag_field="type"):
    entries: int
    sha256: str


_encoder = msgspec.json.Encoder()


async def backup(ledger: Ledger, path: Path) -> tuple[int, int]:
    """Write everything to `path`; returns the revision and the number of entries."""
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    digest = hashlib.sha256()
    count = revision = 0
    try:
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            first = True
            async for page in ledger.pages("/"):
                if first:
                    revision, first = page.revision, False
                    _write(file, digest, _Heading(FORMAT, revision, time.time()))
                for entry in page.entries:
                    _write(file, digest, _Line(entry.key, entry.value, bool(entry.lease)))
                count += len(page.entries)
            file.write(_encoder.encode(_Closing(count, digest.hexdigest())) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        new.rename(path)
    except FileNotFoundError:
        raise Mistake(f"the folder {path.parent} is not there: create it") from None
    except OSError as error:
        new.unlink(missing_ok=True)
        raise NoRoom(f"the backup {path} could not be written: {error}") from error
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    return revision, count


def _write(file: object, digest: "hashlib._Hash", line: msgspec.Struct) -> None:
    raw = _encoder.encode(line) + b"\n"
    digest.update(raw)
    file.write(raw)  # type: ignore[attr-defined]  # a binary file


def read(path: Path) -> list[Entry]:
    """The entries of a backup, after checking that it is whole. Revisions are not kept."""
    digest = hashlib.sha256()
    decoder = msgspec.json.Decoder(_Heading | _Line | _Closing)
    entries: list[Entry] = []
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                line = decoder.decode(raw)
                if isinstance(line, _Heading) is not (number == 1):
                    break
                if isinstance(line, _Heading) and line.format > FORMAT:
                    raise TooNew(f"{path} was written by a newer Holdfast: upgrade this one")
                if isinstance(line, _Closing):
                    if line.entries == len(entries) and line.sha256 == digest.hexdigest():
                        return entries
                    break
                digest.update(raw)
                if isinstance(line, _Line):
                    entries.append(Entry(line.key, line.value, 0, 0, 0, int(line.lease)))
    except (FileNotFoundError, IsADirectoryError):
        raise NotFound(f"there is no backup at {path}") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass  # said below, in the same words as for a file that ends too early
    raise Corrupt(f"{path} is not a whole backup of a ledger: it is damaged or was cut off")


async def restore(ledger: Ledger, path: Path) -> int:
    """Fill an empty ledger from a backup; returns how many entries were restored."""
    # A backup that was taken during a restore holds the mark of that one.
    entries = [entry for entry in read(path) if not entry.lease and entry.key != RESTORING]
    mark = _mark(entries)
    there = {entry.key: entry.value for entry in (await ledger.range("/")).entries}
    if there and there.get(RESTORING) != mark:
        raise Mistake(
            f"the ledger is not empty ({len(there)} keys): restore into a new one, "
            "so that nothing is lost"
        )
    if not there:
        await ledger.txn([absent(RESTORING)], [Put(RESTORING, mark)])
    ours = value_is(RESTORING, mark)  # somebody else may restore something else meanwhile
    for ops in _chunks([entry for entry in entries if there.get(entry.key) != entry.value]):
        if not (await ledger.txn([ours], ops)).succeeded:
            raise Mistake("somebody else has finished this restore: look before you go on")
    await ledger.txn([ours], [Delete(RESTORING)])
    return len(entries)


def _mark(entries: list[Entry]) -> bytes:
    """What tells one backup from another."""
    digest = hashlib.sha256()
    for entry in entries:
        digest.update(_encoder.encode((entry.key, entry.value)))
    return digest.hexdigest().encode()


def _chunks(entries: list[Entry]) -> Iterator[list[Op]]:
    """Operations in transactions within the ledger's limits."""
    ops: list[Op] = []
    size = 0
    for entry in entries:
        weight = len(entry.key) + len(entry.value)
        if ops and (len(ops) == _OPS or size + weight > MAX_TXN_BYTES // 2):
            yield ops
            ops, size = [], 0
        ops.append(Put(entry.key, entry.value))
        size += weight
    if ops:
        yield ops
