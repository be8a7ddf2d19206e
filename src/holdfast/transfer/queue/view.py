"""A queue as one process sees it: the ledger's records, put together. Pure.

A view follows the ledger and may lag behind it; it is never wrong about the past, because
it is fed whole transactions in their order. Decisions are made on a view and committed by
comparing what they were made from.
"""

from collections.abc import Iterable, Iterator

from sortedcontainers import SortedDict

from holdfast.ledger import Entry
from holdfast.ledger.follow import Step
from holdfast.ledger.records import decode
from holdfast.ledger.unreadable import tell
from holdfast.transfer.frame import Ref
from holdfast.transfer.queue.records import (
    Block,
    Claim,
    Config,
    Done,
    Fields,
    Freed,
    Head,
    Keys,
    Sample,
    State,
    bits,
    digest,
    mask,
)

__all__ = ["BlockView", "TaskView", "View"]


class TaskView:
    """A block in one task."""

    def __init__(self, state: State, entry: Entry | None) -> None:
        self.state = state
        self.entry = entry
        self.acked = mask(state.acked)
        self.dropped = mask(state.dropped)
        self.claims: list[tuple[Claim, int]] = [(one, mask(one.mask)) for one in state.claims]

    def claimed(self, living: set[str]) -> int:
        """What living members have claimed."""
        found = 0
        for claim, places in self.claims:
            if claim.owner in living:
                found |= places
        return found

    @property
    def finished(self) -> int:
        """What needs nothing more in this task."""
        return self.acked | self.dropped


class BlockView:
    """One block with everything that belongs to it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.entry: Entry | None = None
        self.samples: list[Sample] = []
        self.all = 0
        self.oldest = 0
        self.later: dict[str, tuple[int, Fields]] = {}
        self.tasks: dict[str, TaskView] = {}
        self.freed = 0
        self.freed_entry: Entry | None = None
        self._put: tuple[Sample, ...] = ()
        self._ready: dict[tuple[str, ...], int] = {}
        self._nbytes = -1

    def set_block(self, entry: Entry) -> None:
        """Take in the block's own record."""
        self.entry = entry
        self._put = decode(Block, entry).samples
        self.all = (1 << len(self._put)) - 1
        self.oldest = min((one.version for one in self._put), default=0)
        self.merge()

    def merge(self) -> None:
        """Put samples and later fields together. A field that is there is not replaced."""
        self._ready, self._nbytes = {}, -1
        self.samples = list(self._put)
        for _, fields in sorted(self.later.values(), key=lambda one: one[0]):
            for place, more in fields.fields.items():
                if place < len(self.samples):
                    one = self.samples[place]
                    self.samples[place] = Sample(
                        one.key, {**more, **one.fields}, one.group, one.version, one.tags
                    )

    def task(self, name: str) -> TaskView:
        """The block in a task; fresh when nothing happened yet."""
        found = self.tasks.get(name)
        if found is None:
            found = self.tasks[name] = TaskView(State(), None)
        return found

    def ready(self, fields: tuple[str, ...]) -> int:
        """The samples that have all these fields."""
        if not fields:
            return self.all
        found = self._ready.get(fields)
        if found is None:
            found = 0
            for place, one in enumerate(self.samples):
                if all(name in one.fields for name in fields):
                    found |= 1 << place
            self._ready[fields] = found
        return found

    def nbytes(self) -> int:
        """Bytes of the payloads that are still there."""
        if self._nbytes < 0:
            self._nbytes = sum(self.samples[at].nbytes for at in bits(self.all & ~self.freed))
        return self._nbytes

    def set_freed(self, entry: Entry | None) -> None:
        """Take in whose payloads are deleted."""
        self.freed_entry = entry
        self.freed = mask(decode(Freed, entry).mask) if entry else 0
        self._nbytes = -1

    def refs(self, place: int) -> list[Ref]:
        """Every payload that was ever recorded for a sample, also what came second."""
        found = list(self._put[place].fields.values())
        for _, fields in self.later.values():
            found += fields.fields.get(place, {}).values()
        return found


class View:
    """All records of a queue at one revision."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self.revision = 0
        self._clear()

    def _clear(self) -> None:
        self.config: Config | None = None
        self.head = Head()
        self.head_entry: Entry | None = None
        self.blocks: SortedDict[int, BlockView] = SortedDict()
        self.members: set[str] = set()
        self.where: dict[str, tuple[int, int]] = {}
        """Block and place of every sample that is not done with."""
        self.done: SortedDict[int, list[bytes]] = SortedDict()
        self._digests: set[bytes] = set()
        self._changed: dict[str, int] = {}

    def apply(self, step: Step) -> None:
        """Take in everything, or one transaction."""
        if step.change is None:
            self._clear()
            for key, entry in step.entries.items():
                self._set(key, entry)
        else:
            for event in step.change.events:
                self._set(event.key, event.entry)
        self.revision = step.revision

    def unknown(self, keys: Iterable[str]) -> list[str]:
        """Those of these keys under which no sample is there, or was there not long ago."""
        where, digests = self.where, self._digests
        new = [key for key in keys if key not in where]
        return [key for key in new if digest(key) not in digests] if digests else new

    def was_done(self, key: str) -> bool:
        """Whether a sample with this key was there, and its block is finished."""
        return key not in self.where and digest(key) in self._digests

    def living(self) -> int:
        """Samples whose payloads are still there."""
        return sum((block.all & ~block.freed).bit_count() for block in self._there())

    def nbytes(self) -> int:
        """Bytes of all payloads that are still there."""
        return sum(block.nbytes() for block in self._there())

    def _there(self) -> Iterator[BlockView]:
        return (block for block in self.blocks.values() if block.entry is not None)

    def agrees(self, key: str, entry: Entry | None, revision: int) -> bool:
        """Whether this view is at least as new as a reading of one key at a revision.

        It may be newer: what was read may be changed, gone, or there again by now.
        """
        if entry is None:
            return self._changed.get(key, revision + 1) > revision
        return self.revision >= entry.mod_revision

    def _set(self, key: str, entry: Entry | None) -> None:
        if entry is None:
            self._changed.pop(key, None)
        else:
            self._changed[key] = entry.mod_revision
        kind, _, rest = key.removeprefix(self._keys.prefix).partition("/")
        if kind == "head":
            self.head = decode(Head, entry) if entry else Head()
            self.head_entry = entry
        elif kind == "config":
            self.config = decode(Config, entry) if entry else None
        elif kind == "member":
            if entry is None:
                self.members.discard(rest)
            else:
                self.members.add(rest)
        elif kind in ("done", "block", "state", "fields", "freed"):
            number, _, name = rest.partition("/")
            if not number.isdecimal():  # written by hand: it belongs to no block
                if entry is not None:
                    tell(entry, f"{key} is not a key of a queue: there is no number in it")
            elif kind == "done":
                self._set_done(int(number), entry)
            else:
                self._set_part(kind, int(number), name, entry)

    def _set_done(self, number: int, entry: Entry | None) -> None:
        if entry is None:
            self._digests.difference_update(self.done.pop(number, []))
        else:
            self.done[number] = decode(Done, entry).keys()
            self._digests.update(self.done[number])

    def _set_part(self, kind: str, number: int, name: str, entry: Entry | None) -> None:
        block = self.blocks.get(number)
        if block is None:
            if entry is None:
                return
            block = self.blocks[number] = BlockView(number)
        if kind == "block":
            for sample in block.samples:
                self.where.pop(sample.key, None)
            if entry is None:
                block.entry = None
                block.samples, block.all = [], 0
            else:
                block.set_block(entry)
                self.where.update(
                    {one.key: (number, place) for place, one in enumerate(block.samples)}
                )
        elif kind == "state":
            block.tasks[name] = TaskView(decode(State, entry) if entry else State(), entry)
        elif kind == "freed":
            block.set_freed(entry)
        elif kind == "fields":
            if entry is None:
                block.later.pop(name, None)
            else:
                block.later[name] = (entry.create_revision, decode(Fields, entry))
            block.merge()
        if block.entry is None and not self.parts(block):
            del self.blocks[number]

    def parts(self, block: BlockView) -> list[str]:
        """The keys of everything that belongs to a block, without its own."""
        found = [self._keys.fields(block.number, name) for name in block.later]
        found += [
            self._keys.state(block.number, name)
            for name, task in block.tasks.items()
            if task.entry is not None
        ]
        return found + ([self._keys.freed(block.number)] if block.freed_entry else [])

    def leftovers(self) -> list[str]:
        """Parts of blocks that are gone, which somebody was about to delete."""
        gone = [block for block in self.blocks.values() if block.entry is None]
        return [key for block in gone for key in self.parts(block)]
