"""The conformance suite's own idea of a ledger, and the machine that compares.

`Model` keeps a full copy of the map for every revision: slow, and too simple to be
wrong. `Conformance` runs random calls against a real back end and against the model.
Time does not pass here: leases are long, and those that end are revoked.
"""

import asyncio
import operator
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast import ledger as ledgers
from holdfast.errors import Compacted, LeaseLost
from holdfast.ledger import Batch, Compare, Delete, Entry, Event, Get, Ledger, Op, Put, Txn, Watch
from holdfast.ledger.types import Relation, Target
from patience import HANG_S

T = TypeVar("T")

LIMIT_S = HANG_S
RELATIONS: dict[Relation, Callable[[Any, Any], bool]]
RELATIONS = {"==": operator.eq, "!=": operator.ne, "<": operator.lt, ">": operator.gt}
FIELDS: dict[Target, str]
FIELDS = {"create": "create_revision", "mod": "mod_revision", "version": "version"}
FIELDS |= {"lease": "lease", "value": "value"}
NAMES = ["a", "a/b", "ab", "b", "é", "€", "😀"]


async def within(call: Awaitable[T], limit_s: float = LIMIT_S) -> T:
    """Wait for something that must come."""
    return await asyncio.wait_for(call, limit_s)


async def take(watch: Watch, count: int = 1) -> list[Batch]:
    """The next batches of a watch."""
    return [await within(anext(watch)) for _ in range(count)]


def ordered(batch: Batch) -> Batch:
    """A batch with its events in the order of their keys: the interface promises none."""
    return Batch(batch.revision, tuple(sorted(batch.events, key=lambda event: event.key)))


class Model:
    """Every revision's map. `revision` 0 of the model is `base` of the back end."""

    def __init__(self, base: int) -> None:
        self.base = base
        self.past: list[dict[str, Entry]] = [{}]
        self.alive: list[int] = []
        self.ended: list[int] = []
        self.compacted = base

    @property
    def now(self) -> dict[str, Entry]:
        return self.past[-1]

    @property
    def revision(self) -> int:
        return self.base + len(self.past) - 1

    def at(self, revision: int) -> dict[str, Entry]:
        return self.past[revision - self.base]

    def below(self, prefix: str, revision: int) -> list[Entry]:
        found = [one for key, one in self.at(revision).items() if key.startswith(prefix)]
        return sorted(found, key=lambda entry: entry.key.encode())

    def holds(self, one: Compare) -> bool:
        entry = self.now.get(one.key)
        if entry is None and one.target == "value":
            return False
        value = 0 if entry is None else getattr(entry, FIELDS[one.target])
        return bool(RELATIONS[one.relation](value, one.operand))

    def txn(self, compare: Sequence[Compare], then: Sequence[Op], otherwise: Sequence[Op]) -> Txn:
        succeeded = all(self.holds(one) for one in compare)
        ops = then if succeeded else otherwise
        if any(isinstance(op, Put) and op.lease in self.ended for op in ops):
            raise LeaseLost("by the model")
        new, results, changed = dict(self.now), list[Entry | None](), False
        for op in ops:
            old = new.get(op.key)
            results.append(None if isinstance(op, Put) else old)
            if isinstance(op, Put):
                created, version = (old.create_revision, old.version) if old else (0, 0)
                created, mod = created or self.revision + 1, self.revision + 1
                new[op.key] = Entry(op.key, op.value, created, mod, version + 1, op.lease)
                changed = True
            elif isinstance(op, Delete) and old is not None:
                del new[op.key]
                changed = True
        if changed:
            self.past.append(new)
        return Txn(succeeded, self.revision, tuple(results))

    def revoke(self, lease: int) -> None:
        self.alive.remove(lease)
        self.ended.append(lease)
        kept = {key: one for key, one in self.now.items() if one.lease != lease}
        if kept != self.now:
            self.past.append(kept)

    def batches(self, prefix: str, start: int) -> list[Batch]:
        """What a watch has to say, found by comparing neighbours."""
        found = []
        for revision in range(max(start, self.base + 1), self.revision + 1):
            old, new = self.at(revision - 1), self.at(revision)
            keys = sorted(key for key in {*old, *new} if key.startswith(prefix))
            events = [Event(k, new.get(k), old.get(k)) for k in keys if old.get(k) != new.get(k)]
            if events:
                found.append(Batch(revision, tuple(events)))
        return found


class Conformance(RuleBasedStateMachine):
    """Random calls, one at a time; every answer must be the model's."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.root = f"/t/{uuid.uuid4().hex}/"
        self.ledger: Ledger = ledgers.open(url)

    def run(self, call: Awaitable[T]) -> T:
        async def bounded() -> T:
            return await within(call)

        return self.runner.run(bounded())

    @initialize()
    def begin(self) -> None:
        self.run(self.ledger.start())
        self.model = Model(self.run(self.ledger.range(self.root)).revision)

    def teardown(self) -> None:
        for lease in list(self.model.alive) if hasattr(self, "model") else []:
            self.run(self.ledger.revoke(lease))
        self.run(self.ledger.close())
        self.runner.close()

    # ---- reading -----------------------------------------------------------------

    @rule(name=st.sampled_from(NAMES))
    def get(self, name: str) -> None:
        key = self.root + name
        assert self.run(self.ledger.get(key)) == self.model.now.get(key)

    @rule(prefix=st.sampled_from(["", *NAMES]), back=st.integers(0, 12), newest=st.booleans())
    def range(self, prefix: str, back: int, newest: bool) -> None:
        revision = max(self.model.base, self.model.revision - back)
        call = self.ledger.range(self.root + prefix, revision=0 if newest else revision)
        if not newest and revision < self.model.compacted:
            with pytest.raises(Compacted):
                self.run(call)
            return
        at = self.model.revision if newest else revision
        found = self.run(call)
        assert found.revision == at
        assert list(found.entries) == self.model.below(self.root + prefix, at)

    @rule(limit=st.integers(1, 4), back=st.integers(0, 6))
    def pages(self, limit: int, back: int) -> None:
        revision = max(self.model.compacted, self.model.revision - back)

        async def read() -> list[Any]:
            pages = self.ledger.pages(self.root, revision=revision, limit=limit)
            return [page async for page in pages]

        pages = self.run(read())
        expected = self.model.below(self.root, revision)
        assert [entry for page in pages for entry in page.entries] == expected
        assert {page.revision for page in pages} == {revision}
        assert [page.more for page in pages] == [True] * (len(pages) - 1) + [False]
        assert all(len(page.entries) == limit for page in pages[:-1])
        assert pages[-1].entries or not expected

    # ---- writing -----------------------------------------------------------------

    @rule(data=st.data())
    def txn(self, data: st.DataObject) -> None:
        self._txn(data, conditions_min=0)

    @rule(data=st.data())
    def conditional_txn(self, data: st.DataObject) -> None:
        self._txn(data, conditions_min=1)

    @precondition(lambda self: self.model.alive)
    @rule(data=st.data())
    def bind_or_unbind(self, data: st.DataObject) -> None:
        bound = [one.key for one in self.model.now.values() if one.lease]
        key = data.draw(st.sampled_from([*bound, self.root + "a", self.root + "b"]))
        lease = data.draw(st.sampled_from([0, *self.model.alive]))
        expected = self.model.txn([], [Put(key, b"bound", lease)], [])
        assert self.run(self.ledger.txn(then=[Put(key, b"bound", lease)])) == expected

    def _txn(self, data: st.DataObject, conditions_min: int) -> None:
        conditions = st.lists(self._compares(), min_size=conditions_min, max_size=2)
        compare = data.draw(conditions, "compare")
        ops = st.lists(self._ops(), max_size=4, unique_by=_write_identity)
        then, otherwise = data.draw(ops, "then"), data.draw(ops, "otherwise")
        try:
            expected = self.model.txn(compare, then, otherwise)
        except LeaseLost:
            with pytest.raises(LeaseLost):
                self.run(self.ledger.txn(compare, then, otherwise))
        else:
            assert self.run(self.ledger.txn(compare, then, otherwise)) == expected

    def _compares(self) -> st.SearchStrategy[Compare]:
        def build(
            name: str, target: Target, relation: Relation, delta: int, value: bytes
        ) -> Compare:
            key = self.root + name
            entry = self.model.now.get(key)
            if target == "value":
                return Compare(key, target, relation, value)
            actual: int = getattr(entry, FIELDS[target]) if entry else 0
            return Compare(key, target, relation, max(0, actual + delta))

        return st.builds(
            build,
            st.sampled_from(NAMES),
            st.sampled_from(sorted(FIELDS)),
            st.sampled_from(sorted(RELATIONS)),
            st.sampled_from([0, 0, -1, 1]),
            st.sampled_from([b"", b"x", b"\xff\x00"]),
        )

    def _ops(self) -> st.SearchStrategy[Op]:
        keys = st.sampled_from([self.root + name for name in NAMES])
        leases = st.sampled_from(
            [0, 0, *self.model.alive, *self.model.alive, *self.model.ended[-1:]]
        )
        puts = st.builds(Put, keys, st.sampled_from([b"", b"x", b"\xff\x00"]), leases)
        return st.one_of(puts, puts, st.builds(Delete, keys), st.builds(Get, keys))

    # ---- leases ------------------------------------------------------------------

    @precondition(lambda self: len(self.model.alive) < 3)
    @rule()
    def grant(self) -> None:
        lease = self.run(self.ledger.grant(600.0)).id
        assert lease not in self.model.alive + self.model.ended
        self.model.alive.append(lease)

    @precondition(lambda self: self.model.alive)
    @rule(data=st.data())
    def revoke(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.model.alive))
        self.run(self.ledger.revoke(lease))
        self.model.revoke(lease)

    @precondition(lambda self: self.model.alive or self.model.ended)
    @rule(data=st.data())
    def lease_info(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.model.alive + self.model.ended))
        if lease in self.model.ended:
            with pytest.raises(LeaseLost):
                self.run(self.ledger.lease_info(lease))
            return
        bound = [one.key for one in self.model.now.values() if one.lease == lease]
        assert self.run(self.ledger.lease_info(lease)).keys == tuple(sorted(bound))

    # ---- following ---------------------------------------------------------------

    @rule(prefix=st.sampled_from(["", "a", "b"]), back=st.integers(0, 12))
    def watch(self, prefix: str, back: int) -> None:
        start = max(1, self.model.base, self.model.revision - back)
        expected = self.model.batches(self.root + prefix, start)

        async def replay() -> list[Batch]:
            async with self.ledger.watch(self.root + prefix, start=start) as watch:
                return [ordered(batch) for batch in await take(watch, max(1, len(expected)))]

        if start < self.model.compacted:
            with pytest.raises(Compacted):
                self.run(replay())
        elif expected and start > self.model.compacted:
            found = self.run(replay())
            assert _without_previous(found) == _without_previous(expected)
            for have, want in zip(found, expected, strict=True):
                for event, wanted in zip(have.events, want.events, strict=True):
                    forgotten = self.model.compacted >= have.revision - 1
                    assert event.previous == wanted.previous or (
                        event.previous is None and forgotten
                    )

    @rule(back=st.integers(0, 8))
    def compact(self, back: int) -> None:
        revision = max(self.model.base, self.model.revision - back)
        self.run(self.ledger.compact(revision))
        self.model.compacted = max(self.model.compacted, revision)

    @invariant()
    def nothing_else_changed(self) -> None:
        if hasattr(self, "model"):
            found = self.run(self.ledger.range(self.root))
            assert found.revision == self.model.revision
            assert list(found.entries) == self.model.below(self.root, self.model.revision)


def _write_identity(op: Op) -> object:
    return id(op) if isinstance(op, Get) else op.key


def _without_previous(batches: list[Batch]) -> list[tuple[int, list[tuple[str, Entry | None]]]]:
    return [(batch.revision, [(one.key, one.entry) for one in batch.events]) for batch in batches]
