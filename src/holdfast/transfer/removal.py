"""Removing what nobody needs any more: a store, or one queue's payloads and records.

A store in shared memory knows which processes have it open, and a queue its members: while there
are any, nothing is removed unless it is forced. Other stores do not know their users, so there
it is always forced. A removal that was interrupted is finished by the next one.
"""

import asyncio
import contextlib

import msgspec

from holdfast.errors import Conflict, HoldfastError, Mistake
from holdfast.ledger import Delete
from holdfast.ledger import open as open_ledger
from holdfast.text import plural
from holdfast.transfer import shm
from holdfast.transfer.batches import portions
from holdfast.transfer.queue.overview import overview
from holdfast.transfer.queue.records import Keys
from holdfast.transfer.url import connect, without_password

__all__ = ["Removed", "remove_queue", "remove_store"]

_MOST_OPS = 90
_MOST_KEYS = 10_000


class Removed(msgspec.Struct, frozen=True):
    """What went."""

    values: int = 0
    nbytes: int = 0
    """Of memory, for a store in shared memory; otherwise of the values."""
    records: int = 0


def remove_store(url: str, *, force: bool = False) -> Removed:
    """Remove everything that a store has. Raises `NotFound` when there is no such store."""
    shown = without_password(url)
    if url.startswith("shm:"):
        return _remove_shared(url, force)
    if url.startswith("memory:"):
        raise Mistake(f"{shown} is in the memory of one process, and goes when that ends")
    if not force:
        raise Conflict(
            f"{shown} does not know which processes use it. Use --force to delete everything in "
            "it, when none does"
        )
    return _delete(url, "")


def _remove_shared(url: str, force: bool) -> Removed:
    name = shm.store_name(url)
    before = next((one for one in shm.stores() if one.name == name), None)
    values = 0
    if before is not None and not before.used:
        with contextlib.suppress(HoldfastError), connect(f"shm://{name}") as store:
            values = store.stat().keys  # a damaged store can be removed, too
    if not shm.remove(name, force=force):
        users = next((one.pids for one in shm.stores() if one.name == name), ())
        who = f" by process {', '.join(map(str, users))}" if users else ""
        raise Conflict(
            f"shm://{name} is in use{who}. End it first; --force removes the store all the same, "
            "and its users then fail"
        )
    return Removed(values, before.taken if before is not None else 0)


def _delete(url: str, prefix: str) -> Removed:
    values = nbytes = 0
    with connect(url) as store:
        for some in portions(list(store.scan(prefix)), _MOST_KEYS):
            gone = store.delete([one.key for one in some])
            values += sum(gone.values())
            nbytes += sum(one.nbytes for one in some if gone[one.key])
    return Removed(values, nbytes)


def remove_queue(url: str, ledger: str, run: str, name: str, *, force: bool = False) -> Removed:
    """Remove a queue's payloads from a store, and its records from the ledger."""
    found = asyncio.run(overview(ledger, run, name))
    if found is not None and found.members and not force:
        who = ", ".join(f"{one.id} (process {one.pid} on {one.host})" for one in found.members[:5])
        raise Conflict(
            f"the queue {name} has {plural(len(found.members), 'member')}: {who}. End them first; "
            "--force removes the queue all the same, and they then fail"
        )
    # Records first: payloads without a record are deleted by the next removal, or the next queue.
    keys = Keys(run, name)
    records = asyncio.run(_delete_records(ledger, keys.prefix))
    return msgspec.structs.replace(_delete(url, f"{keys.place}/"), records=records)


async def _delete_records(url: str, prefix: str) -> int:
    async with open_ledger(url) as ledger:
        keys = [entry.key for entry in (await ledger.range(prefix)).entries]
        for some in portions(keys, _MOST_OPS):
            await ledger.txn([], [Delete(key) for key in some], [])
    return len(keys)
