"""Putting samples, and fields that become ready later.

The payloads go to the store first, under keys that name the member's life and the attempt,
so that no attempt ever replaces what another one has recorded; then one transaction, which
that life must outlast, records them. So a payload without a record belongs to a member that
is at work on it, or to one that is gone, and then it can be deleted.
"""

import contextlib
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from math import isfinite

import msgspec

from holdfast.errors import BatchFailed, LeaseLost, Mistake, NoRoom, NotFound
from holdfast.ledger import absent, same_life, unchanged
from holdfast.ledger.records import put
from holdfast.retry import insist
from holdfast.transfer.frame import Ref, check_key
from holdfast.transfer.queue import adding
from holdfast.transfer.queue.desk import Change, Desk
from holdfast.transfer.queue.member import Seat
from holdfast.transfer.queue.records import Config, Fields, Sample, Tag
from holdfast.transfer.queue.tidying import Tidying

__all__ = ["Item", "Putting", "behind"]


class Item(msgspec.Struct, frozen=True):
    """A sample that is to be put: its fields are values."""

    key: str
    fields: Mapping[str, object] = {}
    group: str = ""
    version: int = 0
    """The version of the weights that made it."""
    tags: Mapping[str, Tag] = {}


def behind(desk: Desk) -> dict[str, int]:
    """How many samples each task has not finished."""
    assert desk.view.config is not None
    return {
        task: sum(
            (block.all & ~block.task(task).finished).bit_count()
            for block in desk.view.blocks.values()
        )
        for task in desk.view.config.tasks
    }


class Putting:
    """The putting half of a queue."""

    def __init__(self, desk: Desk, tidying: Tidying) -> None:
        self._desk = desk
        self._tidying = tidying
        self._numbers = itertools.count(1)
        self._number = 0
        """Of the attempt whose payloads are being named: never used twice."""

    def _payload(self, seat: Seat, key: str, field: str) -> str:
        """Where a field is put. The last '/' is the one between sample and field."""
        field = field.replace("%", "%25").replace("/", "%2F")
        return f"{self._desk.keys.place}/{seat.id}/{self._number}/{key}/{field}"

    async def put(self, items: Sequence[Item], deadline: float) -> dict[str, bool]:
        """Add samples; tells which were new."""
        _check(items)
        added = dict.fromkeys((one.key for one in items), False)
        length = self._desk.block_samples
        for begin in range(0, len(items), length):
            some = {one.key: one for one in items[begin : begin + length]}
            await self._in_one_life(partial(self._put, some, added, deadline), deadline)
        return added

    async def _in_one_life(self, work: Callable[[], Awaitable[None]], deadline: float) -> None:
        """Do it; a member whose lease has ended joins again, and does all of it again."""
        await insist(self._desk.runtime, work, on=LeaseLost, until=deadline)

    async def _put(self, items: dict[str, Item], added: dict[str, bool], deadline: float) -> None:
        new = {key: items[key] for key in self._desk.view.unknown(items)}
        if not new:
            return
        await self._room(len(new), 0, deadline)
        seat = await self._desk.seat()
        self._number = next(self._numbers)
        refs = await self._send(seat, {key: one.fields for key, one in new.items() if one.fields})
        samples = [
            Sample(key, refs.get(key, {}), one.group, one.version, dict(one.tags))
            for key, one in new.items()
        ]
        unused = {ref for some in refs.values() for ref in some.values()}
        try:
            for chunk in adding.chunks(samples, self._desk.block_samples):
                for sample in await self._add(chunk, seat, deadline):
                    added[sample.key] = True
                    unused.difference_update(sample.fields.values())
        except _NeverSent as error:
            await self._drop(unused)  # no transaction speaks of them
            raise NoRoom(str(error)) from None
        except LeaseLost:
            await self._drop(unused)  # its life is over: nothing can record them any more
            raise
        await self._drop(unused)

    async def _send(
        self, seat: Seat, fields: Mapping[str, Mapping[str, object]]
    ) -> dict[str, dict[str, Ref]]:
        places = {
            key: {name: self._payload(seat, key, name) for name in some}
            for key, some in fields.items()
        }
        values: dict[str, object] = {}
        for key, some in fields.items():
            values |= {places[key][name]: value for name, value in some.items()}
        if not values:
            return {}
        try:
            refs = await self._desk.store.aput(values)
        except BatchFailed as error:
            await self._drop(ref for ref in error.values.values() if isinstance(ref, Ref))
            raise
        return {
            key: {name: refs[place] for name, place in some.items()}
            for key, some in places.items()
        }

    async def _add(self, samples: list[Sample], seat: Seat, deadline: float) -> list[Sample]:
        """Record samples; returns those that are there with just these payloads."""
        view = self._desk.view
        nbytes = sum(one.nbytes for one in samples if one.fields)
        sent = False

        def mine(sample: Sample) -> bool:
            number, place = view.where.get(sample.key, (-1, 0))
            if number < 0:
                return False
            there = view.blocks[number].samples[place].fields
            return all(there.get(name) == ref for name, ref in sample.fields.items())

        def decide() -> Change[list[Sample] | None] | list[Sample] | None:
            nonlocal sent
            unknown = set(view.unknown(one.key for one in samples))
            new = [one for one in samples if one.key in unknown]
            here = [one for one in samples if one.key not in unknown and mine(one)]
            if not new:
                return here
            if self._full(len(new), nbytes):
                return None
            compare, then = adding.add(view, self._desk.keys, new, self._desk.block_samples)
            sent = True
            return Change(compare, then, here + new)

        while True:
            try:
                await self._room(len(samples), nbytes, deadline)
            except NoRoom as error:
                raise error if sent else _NeverSent(str(error)) from None
            found = await self._desk.commit(decide, deadline, seat=seat)
            if found is not None:
                return found

    def _full(self, samples: int, nbytes: int) -> bool:
        view, config = self._desk.view, self._config
        return (
            view.living() + samples > config.max_samples
            or view.nbytes() + nbytes > config.max_bytes
        )

    @property
    def _config(self) -> Config:
        assert self._desk.view.config is not None
        return self._desk.view.config

    async def _room(self, samples: int, nbytes: int, deadline: float) -> None:
        """Wait until so much more fits in."""
        view, config = self._desk.view, self._config
        if samples > config.max_samples or nbytes > config.max_bytes:
            raise Mistake(
                f"{samples} samples of {nbytes} bytes never fit into a queue of "
                f"{config.max_samples} samples and {config.max_bytes} bytes"
            )
        while self._full(samples, nbytes):
            await self._tidying.free(list(view.blocks))
            if not await self._desk.news(deadline):
                tasks = ", ".join(f"{task}: {left}" for task, left in behind(self._desk).items())
                raise NoRoom(
                    f"the queue is full ({view.living()} samples, {view.nbytes()} bytes); not yet "
                    f"acknowledged, by task: {tasks}"
                )

    async def put_fields(
        self, fields: Mapping[str, Mapping[str, object]], deadline: float
    ) -> None:
        """Add fields to samples that are there."""
        await self._in_one_life(partial(self._put_fields, fields, deadline), deadline)

    async def _put_fields(
        self, fields: Mapping[str, Mapping[str, object]], deadline: float
    ) -> None:
        desk, view = self._desk, self._desk.view
        if any(key not in view.where for key in fields):
            await desk.refresh(deadline)
        places, new = {}, {}
        for key, some in fields.items():
            _check_fields(key, some)
            if view.was_done(key):
                continue  # every task has finished it without these fields, or with them
            if key not in view.where:
                raise NotFound(f"no sample {key!r} is in this queue, or not any more", key=key)
            number, at = places[key] = view.where[key]
            if view.blocks[number].freed & 1 << at:
                continue  # the same, and its block is not finished
            there = view.blocks[number].samples[at].fields
            if more := {name: value for name, value in some.items() if name not in there}:
                new[key] = more
        if not new:
            return
        seat = await desk.seat()
        self._number = next(self._numbers)
        records: dict[int, dict[int, dict[str, Ref]]] = {}
        for key, refs in (await self._send(seat, new)).items():
            number, at = places[key]
            records.setdefault(number, {})[at] = refs
        name = desk.nonce()
        for number, record in records.items():
            await self._record(number, name, Fields(fields=record), seat, deadline)

    async def _record(
        self, number: int, name: str, record: Fields, seat: Seat, deadline: float
    ) -> None:
        keys, view = self._desk.keys, self._desk.view
        key, freed = keys.fields(number, name), keys.freed(number)
        left: dict[int, dict[str, Ref]] = {}

        def decide() -> Change[None] | None:
            block = view.blocks.get(number)
            left.clear()
            if block is None or block.entry is None:
                return None  # finished by every task without it
            left.update(
                {at: some for at, some in record.fields.items() if not block.freed >> at & 1}
            )
            if name in block.later or not left:
                return None
            there = block.freed_entry
            compare = [absent(key), unchanged(there) if there else absent(freed)]
            compare.append(same_life(block.entry))
            return Change(compare, [put(key, Fields(fields=dict(left)))], None)

        await self._desk.commit(decide, deadline, seat=seat)
        # A sample that is freed is not looked at again: what came too late for it goes now.
        late = [some for at, some in record.fields.items() if at not in left]
        await self._drop(ref for some in late for ref in some.values())

    async def _drop(self, refs: Iterable[Ref]) -> None:
        """Delete payloads that no record speaks of. Does its best: `tidy` finds the rest."""
        if gone := list(refs):
            with contextlib.suppress(Exception):
                await self._desk.store.adelete(gone)


def _check(items: Sequence[Item]) -> None:
    keys = [check_key(one.key) for one in items]
    if len(set(keys)) != len(keys):
        (twice, _), *_ = Counter(keys).most_common(1)
        raise Mistake(f"{twice!r} is given twice", key=twice)
    for one in items:
        if type(one.version) is not int or not 0 <= one.version < 1 << 63:
            raise Mistake(
                f"the version of {one.key!r} is {one.version!r}, not 0 or more", key=one.key
            )
        if type(one.group) is not str or not one.group.isprintable():
            raise Mistake(
                f"the group of {one.key!r} is {one.group!r}, not plain text", key=one.key
            )
        for tag, value in one.tags.items():
            if type(tag) is not str or not _plain(value):
                raise Mistake(
                    f"the tag {tag!r} of {one.key!r} is {value!r}: a tag is text, a finite "
                    "number, a truth value or None",
                    key=one.key,
                )
        _check_fields(one.key, one.fields)


def _check_fields(key: str, fields: Mapping[str, object]) -> None:
    for name in fields:
        if type(name) is not str or not name or not name.isprintable():
            raise Mistake(f"{name!r} is not a name for a field of {key!r}", key=key)


def _plain(value: object) -> bool:
    """Whether a tag can be written to the ledger and read from it as it is."""
    if type(value) is int:
        return -(1 << 63) <= value < 1 << 63
    if type(value) is str:
        return value.isprintable() or _encodes(value)
    return value is None or type(value) is bool or (type(value) is float and isfinite(value))


def _encodes(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


class _NeverSent(NoRoom):
    """No room, and no transaction that might still record the payloads is under way."""
