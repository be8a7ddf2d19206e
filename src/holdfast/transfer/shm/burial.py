"""Burying values: what was deleted, and what was replaced.

A value dies by one byte, written while a lock on its segment keeps that from being filled
anew. Anybody may write it; owners count these bytes when they need room, so nobody has to be
told, and a death of anyone at any point loses nothing: a byte is there or it is not.

What has a lower version than something that was there after it was put is dead for good,
whoever buries it and whenever. Two *copies* of one value are another matter: they are left by
a compaction that was killed, and one of them must stay. So the survivor is held by a lock,
and only one process at a time does this.
"""

from collections.abc import Iterable

from holdfast import faults
from holdfast.transfer.shm.catalog import Catalog
from holdfast.transfer.shm.index import Group
from holdfast.transfer.shm.locks import Locks

__all__ = ["all_losers", "bury", "bury_losers", "part_twins"]

FOUND = faults.declare("shm.delete.found", "what to delete is found, nothing is locked yet")
LOCKED = faults.declare("shm.delete.locked", "the segment is locked, nothing is deleted yet")
HALF = faults.declare("shm.delete.half", "some of the values are deleted")
DELETED = faults.declare("shm.delete.deleted", "all values are deleted, the lock is still held")
_TWINS = "twins.lock"


def bury(locks: Locks, groups: list[Group], *, wait: bool) -> list[Group]:
    """Kill these values. Returns those whose segment has been filled anew, or was busy.

    With `wait`, also those that are dead already: perhaps they were moved, and live elsewhere.
    """
    left: list[Group] = []
    for batch, positions in groups:
        faults.point(FOUND)
        with locks.held(batch.segment.name, exclusive=False, wait=wait) as locked:
            if locked:
                faults.point(LOCKED)
            if not locked or batch.void():
                left.append((batch, positions))
                continue
            dead = batch.dead()
            if wait and (before := dead[positions] != 0).any():
                left.append((batch, positions[before]))
            middle = len(positions) // 2
            dead[positions[:middle]] = 1
            faults.point(HALF)
            dead[positions[middle:]] = 1
            faults.point(DELETED)
    return left


def bury_losers(catalog: Catalog, locks: Locks, names: Iterable[int]) -> None:
    """Bury replaced values, as far as their segments are not busy: there is no hurry."""
    index = catalog.index
    groups = index.groups(names)
    busy = {id(batch) for batch, _ in bury(locks, groups, wait=False) if not batch.void()}
    for batch, positions in groups:
        if id(batch) not in busy:
            index.forget(index.name(batch, positions))


def all_losers(catalog: Catalog) -> list[int]:
    """Everything that was replaced and is not buried, except twins."""
    index = catalog.index
    return [
        name
        for key, names in index.older.items()
        for name in names
        if index.batch(name) is not None and index.version(name) < index.version(index.tops[key])
    ]


def part_twins(catalog: Catalog, locks: Locks) -> None:
    """Leave one of each value of which there are two copies."""
    index = catalog.index
    pairs = [
        (name, index.tops[key])
        for key, names in index.older.items()
        for name in names
        if index.live(name) and index.version(name) == index.version(index.tops[key])
    ]
    if not pairs:
        return
    with locks.held(_TWINS, exclusive=True, create=True, wait=False) as alone:
        if not alone:
            return
        for copy, survivor in pairs:
            if (stays := index.batch(survivor)) is None:
                continue
            with locks.held(stays.segment.name, exclusive=False, wait=False) as holding:
                if holding and index.live(survivor):
                    bury(locks, index.groups([copy]), wait=False)
    index.forget([copy for copy, _ in pairs if not index.live(copy)])
