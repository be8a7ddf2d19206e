"""The index: which value a key means, in the picture that one process has of the store.

A value is named by a number: that of its batch, shifted, plus its position in it. So a batch
of 100,000 keys is taken in with a few bulk operations.

`tops` has the highest version of each key that was seen; `older` what else was seen of it
and not yet buried. An entry says where a value *was*: whether it still is, its dead-byte and
the life of its segment say, and `live` asks them.
"""

from collections.abc import Iterable, Sequence
from itertools import compress, repeat

import numpy as np
import numpy.typing as npt

from holdfast.transfer.shm.layout import Ints
from holdfast.transfer.shm.segment import Batch, Segment

__all__ = ["Group", "Index"]

_SHIFT = 21
_MASK = (1 << _SHIFT) - 1

Group = tuple[Batch, Ints]
"""Some values of one batch, by their positions."""


class Index:
    """Keys and where their values are."""

    def __init__(self) -> None:
        self.tops: dict[str, int] = {}
        self.older: dict[str, list[int]] = {}
        self.losers: list[int] = []
        """Values that were replaced, seen since somebody last took this list. No twins."""
        self.newest = 0
        """The highest generation that was seen."""
        self._batches: dict[int, Batch] = {}
        self._next = 1

    def add(self, batch: Batch) -> None:
        """Take in a batch."""
        batch.number = self._next
        self._next += 1
        self._batches[batch.number] = batch
        self.newest = max(self.newest, batch.newest())
        base = batch.number << _SHIFT
        dead = batch.dead().copy()  # others go on writing there
        keys: Sequence[str] = batch.keys
        names: Iterable[int] = range(base, base + batch.count)
        if dead.any():
            keys = list(compress(keys, dead == 0))
            names = (np.flatnonzero(dead == 0) + base).tolist()
        tops = self.tops
        if tops.keys().isdisjoint(keys):
            tops.update(zip(keys, names, strict=True))
            return
        # Where another value is there, one of the two was replaced. Mostly none is any more.
        _, absent = self.look_up(keys)
        gone = set(absent)
        plain = [(key, name) for at, (key, name) in pairs(keys, names) if at in gone]
        tops.update(
            plain if not self.older else [one for one in plain if one[0] not in self.older]
        )
        if len(gone) == len(keys) and not self.older:
            return
        above: dict[int, bool] = {}
        for at, (key, name) in pairs(keys, names):
            if at not in gone or (self.older and key in self.older):
                self._replace(key, name, above)

    def _replace(self, key: str, name: int, above: dict[int, bool]) -> None:
        """Take in a value of a key that has another one."""
        old = self.settle(key)
        if old is None:
            self.tops[key] = name
            return
        higher = above.get(old >> _SHIFT)
        twins = False
        if higher is None:
            higher = self.rank(name) > self.rank(old)
            twins = self.version(name) == self.version(old)
            ours, theirs = self._batches[name >> _SHIFT], self._batches[old >> _SHIFT]
            if not twins and ours.versions is None and theirs.versions is None:
                above[old >> _SHIFT] = higher  # so it is for both batches as a whole
        loser = old if higher else name
        self.tops[key] = name if higher else old
        self.older.setdefault(key, []).append(loser)
        if not twins:
            self.losers.append(loser)

    def batch(self, name: int) -> Batch | None:
        """The batch of a value, if it is still known."""
        return self._batches.get(name >> _SHIFT)

    def key(self, name: int) -> str:
        """The key of a value."""
        return self._batches[name >> _SHIFT].keys[name & _MASK]

    def place(self, name: int) -> tuple[Batch | None, int]:
        """The batch of a value and its position there."""
        return self._batches.get(name >> _SHIFT), name & _MASK

    def rank(self, name: int) -> tuple[int, int, int, int, int]:
        """A total order that every process agrees on: version first, then place."""
        batch = self._batches[name >> _SHIFT]
        place = batch.segment.slot, batch.segment.number, batch.dead_at
        return (*batch.version(name & _MASK), *place)

    def version(self, name: int) -> tuple[int, int]:
        """Generation and stamp of a value that is known."""
        return self._batches[name >> _SHIFT].version(name & _MASK)

    def live(self, name: int) -> bool:
        """Whether the value is still there."""
        batch = self._batches.get(name >> _SHIFT)
        if batch is None or batch.void():
            return False
        return not batch.segment.memory[batch.dead_at + (name & _MASK)]

    def settle(self, key: str) -> int | None:
        """The highest version of a key that is still there. Forgets what is not."""
        top = self.tops.get(key)
        if top is None or self.live(top):
            return top
        rest = sorted(filter(self.live, self.older.pop(key, ())), key=self.rank)
        if not rest:
            del self.tops[key]
            return None
        self.tops[key] = rest.pop()
        if rest:
            self.older[key] = rest
        return self.tops[key]

    def all_of(self, key: str) -> list[int]:
        """Everything that is there of a key, the highest version last."""
        top = self.settle(key)
        if top is None:
            return []
        return [*sorted(filter(self.live, self.older.get(key, ())), key=self.rank), top]

    def forget(self, names: Iterable[int]) -> None:
        """Forget values that were buried."""
        if not self.older:
            self._forget_tops(names)
            return
        for name in names:
            if name >> _SHIFT not in self._batches:
                continue
            key = self.key(name)
            rest = self.older.get(key)
            if rest is not None and name in rest:
                rest.remove(name)
                if not rest:
                    del self.older[key]
            elif self.tops.get(key) == name:
                self.settle(key)

    def _forget_tops(self, names: Iterable[int]) -> None:
        tops, batches = self.tops, self._batches
        for name in names:
            batch = batches.get(name >> _SHIFT)
            if batch is not None:
                key = batch.keys[name & _MASK]
                if tops.get(key) == name:
                    del tops[key]

    def drop(self, segment: Segment) -> None:
        """Forget everything of a segment that is being filled anew."""
        tops, older = self.tops, self.older
        for batch in segment.batches:
            base = batch.number << _SHIFT
            for name, key in enumerate(batch.keys, base):
                if older and key in older:
                    self._drop_older(key, name)
                elif tops.get(key) == name:
                    del tops[key]
            self._batches.pop(batch.number, None)

    def _drop_older(self, key: str, name: int) -> None:
        rest = [one for one in self.older.pop(key) if one != name]
        if self.tops.get(key) == name:
            rest.sort(key=self.rank)
            self.tops[key] = rest.pop() if rest else name
            if self.tops[key] == name:
                del self.tops[key]
        if rest:
            self.older[key] = rest

    def name(self, batch: Batch, positions: Ints) -> list[int]:
        """The names of some values of a batch."""
        found: list[int] = (positions + (batch.number << _SHIFT)).tolist()
        return found

    def groups(self, names: Iterable[int]) -> list[Group]:
        """Values by their batches. Those of batches that are gone are left out."""
        found: list[Group] = []
        for number, where in split(np.fromiter(names, np.int64)):
            batch = self._batches.get(number)
            if batch is not None:
                found.append((batch, where[0]))
        return found

    def look_up(self, keys: Sequence[str]) -> tuple[list[tuple[Batch, Ints, Ints]], list[int]]:
        """What is there now: (batch, positions, which of the keys), and which keys are not."""
        names = np.fromiter(map(self.tops.get, keys, repeat(0)), np.int64, count=len(keys))
        found: list[tuple[Batch, Ints, Ints]] = []
        absent: list[int] = []
        for number, (positions, which) in split(names):
            batch = self._batches.get(number)
            if batch is None or batch.void():
                absent += which.tolist()
                continue
            dead = batch.dead()[positions]
            if dead.any():
                absent += which[dead != 0].tolist()
                positions, which = positions[dead == 0], which[dead == 0]
            found.append((batch, positions, which))
        return found, absent


def pairs(keys: Sequence[str], names: Iterable[int]) -> "enumerate[tuple[str, int]]":
    """Keys and the values that belong to them, counted."""
    return enumerate(zip(keys, names, strict=True))


def split(names: Ints) -> list[tuple[int, tuple[Ints, Ints]]]:
    """By batch: the positions in it, and where in `names` they stood."""
    if not len(names):
        return []
    numbers, positions = names >> _SHIFT, names & _MASK
    if (numbers == numbers[0]).all():
        return [(int(numbers[0]), (positions, np.arange(len(names))))]
    order: npt.NDArray[np.int64] = np.argsort(numbers, kind="stable")
    cuts = np.flatnonzero(np.diff(numbers[order])) + 1
    parts = np.split(order, cuts)
    return [(int(numbers[part[0]]), (positions[part], part)) for part in parts]
