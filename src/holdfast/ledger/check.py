"""Checking that a ledger is sound, from outside and, where there is a file, from inside."""

from holdfast.errors import Mistake
from holdfast.ledger.backup import RESTORING
from holdfast.ledger.base import Ledger
from holdfast.ledger.types import Entry, check_key

__all__ = ["check"]

_PROBLEMS_MAX = 100


async def check(ledger: Ledger) -> tuple[list[str], int]:
    """Look at everything; returns what is wrong, and the number of entries."""
    problems = list(await ledger.inspect())
    whole = await ledger.range("/")
    living = set(await ledger.leases())
    last = ""
    for entry in whole.entries:
        problems.extend(_wrong(entry, whole.revision, living))
        if entry.key <= last:
            problems.append(f"{entry.key} is out of order")
        last = entry.key
    if any(entry.key == RESTORING for entry in whole.entries):
        problems.append("a restore was interrupted: run `holdfast ledger restore` again")
    return problems[:_PROBLEMS_MAX], len(whole.entries)


def _wrong(entry: Entry, revision: int, living: set[int]) -> list[str]:
    """What is wrong with one entry."""
    found: list[str] = []
    try:
        check_key(entry.key)
    except Mistake as error:
        found.append(str(error))
    if not 0 < entry.create_revision <= entry.mod_revision <= revision:
        found.append(
            f"{entry.key}: created at {entry.create_revision}, changed at {entry.mod_revision}, "
            f"but the ledger is at {revision}"
        )
    if not 0 < entry.version <= entry.mod_revision - entry.create_revision + 1:
        found.append(f"{entry.key}: version {entry.version} does not fit its revisions")
    if entry.lease and entry.lease not in living:
        # The lease may have ended between the two readings: then the entry is gone by now.
        found.append(f"{entry.key} is bound to lease {entry.lease}, which is not there")
    return found
