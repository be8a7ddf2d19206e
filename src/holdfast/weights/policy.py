"""Which versions may be deleted: a pure function of what exists, who needs it, and a policy.

A version is **needed**, and never deleted, while it is the newest, while a live consumer
pins it or serves it (its acknowledged version), or when a live consumer that works through
*every* version has not come to it yet. It is **wanted** when the policy keeps it: the last
k, every n-th, as long as they fit into the byte budget (the oldest give way first). What is
neither is deleted. A consumer whose time is over holds nothing.

Bytes are counted per inode: a file that several versions share is counted once, and is
freed only with the last of them.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field

__all__ = [
    "Acknowledgement",
    "Files",
    "Hold",
    "Needs",
    "OnDisk",
    "Pin",
    "Retention",
    "deletable",
    "holds",
    "needed",
    "used_bytes",
]

Needs = Literal["every", "latest"]
"""What a consumer means to load: every version in turn, or whichever is newest."""

Files = Mapping[int, int]
"""Bytes by inode."""


class Retention(BaseModel):
    """What to keep. The defaults keep the two newest versions and whatever somebody needs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    keep_last: int = Field(default=2, ge=1, description="How many of the newest to keep.")
    keep_every: int = Field(default=0, ge=0, description="Keep multiples of this; 0: none.")
    max_bytes: int = Field(default=0, ge=0, description="Budget for the channel; 0: no limit.")
    when_full: Literal["wait", "fail"] = Field(
        default="wait", description="What `publish` does when consumers hold the whole budget."
    )
    wait_s: float = Field(default=600.0, gt=0, description="How long `publish` waits for room.")


class OnDisk(msgspec.Struct, frozen=True):
    """A version and the files it consists of."""

    version: int
    files: Files


class Pin(msgspec.Struct, frozen=True):
    """`consumer` is reading `version`, if it still lives at `until_s`."""

    consumer: str
    version: int
    until_s: float = float("inf")


class Acknowledgement(msgspec.Struct, frozen=True):
    """`consumer` serves `version` (None: nothing yet) and needs what its `needs` says."""

    consumer: str
    version: int | None
    needs: Needs = "every"
    floor: int = 0
    until_s: float = float("inf")


class Hold(msgspec.Struct, frozen=True):
    """What one consumer keeps from being deleted."""

    consumer: str
    versions: tuple[int, ...]
    bytes: int


def needed(
    numbers: Iterable[int],
    pins: Iterable[Pin],
    acknowledgements: Iterable[Acknowledgement],
    now_s: float,
) -> set[int]:
    """The versions that must not be deleted, whatever the policy says."""
    everything = sorted(numbers)
    if not everything:
        return set()
    kept, floor = _kept(pins, acknowledgements, now_s)
    return {number for number in everything if number in kept or number >= floor} | {
        everything[-1]
    }


def _kept(
    pins: Iterable[Pin], acknowledgements: Iterable[Acknowledgement], now_s: float
) -> tuple[set[int], float]:
    """What the living keep: these versions, and all from the number that follows."""
    kept = {pin.version for pin in pins if pin.until_s > now_s}
    floor = float("inf")
    for one in acknowledgements:
        if one.until_s <= now_s:
            continue
        if one.version is not None:
            kept.add(one.version)
        if one.needs == "every":
            floor = min(floor, one.floor)
    return kept, floor


def deletable(
    versions: Sequence[OnDisk],
    pins: Iterable[Pin],
    acknowledgements: Iterable[Acknowledgement],
    policy: Retention,
    now_s: float,
    *,
    reserve_bytes: int = 0,
    other: Files | None = None,
) -> tuple[int, ...]:
    """The versions to delete now, oldest first.

    `reserve_bytes` is room that is wanted on top; `other` are files that count and are not
    part of a version (staged for readers, or being written).
    """
    ordered = sorted(versions, key=lambda one: one.version)
    must = needed((one.version for one in ordered), pins, acknowledgements, now_s)
    newest = {one.version for one in ordered[-policy.keep_last :]}
    keep: list[OnDisk] = []
    drop: list[int] = []
    for one in ordered:
        every = policy.keep_every and one.version % policy.keep_every == 0
        if one.version in must or one.version in newest or every:
            keep.append(one)
        else:
            drop.append(one.version)
    if policy.max_bytes:
        room = policy.max_bytes - reserve_bytes
        drop += _squeeze(keep, must, other or {}, room)
        drop.sort()
    return tuple(drop)


def _squeeze(keep: Sequence[OnDisk], must: set[int], other: Files, room: int) -> list[int]:
    """Versions to give up so that the rest fits into `room`, oldest first."""
    # What is needed stays, so only the others compete for their files.
    loose = [one for one in keep if one.version not in must]
    fixed = {inode for one in keep if one.version in must for inode in one.files} | other.keys()
    names = Counter(chain.from_iterable(one.files for one in loose))
    total = used_bytes(keep, other)
    drop: list[int] = []
    for one in loose:
        if total <= room:
            break
        for inode, size in one.files.items():
            names[inode] -= 1
            if not names[inode] and inode not in fixed:
                total -= size
        drop.append(one.version)
    return drop


def used_bytes(versions: Iterable[OnDisk], other: Files | None = None) -> int:
    """What these versions and other files take on the disk, each inode once."""
    sizes = dict(other or {})
    for one in versions:
        sizes.update(one.files)
    return sum(sizes.values())


def holds(
    versions: Sequence[OnDisk],
    pins: Iterable[Pin],
    acknowledgements: Iterable[Acknowledgement],
    now_s: float,
) -> list[Hold]:
    """What each consumer keeps on the disk, the largest first.

    The newest version is held by nobody: it stays anyway. What a policy wants counts as held
    too, because it would give way to a budget.
    """
    loose = deletable(versions, (), (), Retention(keep_last=1), now_s)
    loose_set = set(loose)
    files = {one.version: one for one in versions}
    mine: dict[str, tuple[list[Pin], list[Acknowledgement]]] = {}
    for pin in pins:
        mine.setdefault(pin.consumer, ([], []))[0].append(pin)
    for one in acknowledgements:
        mine.setdefault(one.consumer, ([], []))[1].append(one)
    found: list[Hold] = []
    sizes: dict[tuple[int, ...], int] = {}  # many consumers hold the same
    for name, wishes in mine.items():
        kept, floor = _kept(*wishes, now_s)
        below = sorted(one for one in kept & loose_set if one < floor)
        held = (*below, *loose[bisect_left(loose, floor) :])
        if held and held not in sizes:
            sizes[held] = used_bytes(files[number] for number in held)
        if held:
            found.append(Hold(name, held, sizes[held]))
    return sorted(found, key=lambda hold: (-hold.bytes, hold.consumer))
