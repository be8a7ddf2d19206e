"""Typed records: mixed versions understand each other, and updates are never lost."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import Conflict, Corrupt, Fenced, Retriable, Unavailable, UnknownOutcome
from holdfast.ledger import (
    KEEP,
    REMOVE,
    Delete,
    Entry,
    Ledger,
    LiveRuntime,
    Record,
    absent,
    present,
    update,
)
from holdfast.ledger.memory import MemoryLedger
from holdfast.ledger.records import Verdict, decode, encode, load, put
from holdfast.ledger.types import Compare, Op, Txn
from holdfast.timeouts import Timeouts


class Old(Record, frozen=True, kw_only=True):
    name: str = ""
    count: int = 0


class New(Record, frozen=True, kw_only=True):
    SCHEMA = 2

    name: str = ""
    count: int = 0
    colour: str = "blue"


def _entry(raw: bytes) -> Entry:
    return Entry("/r", raw, 2, 2, 1)


def test_mixed_versions_understand_each_other() -> None:
    """A newer reader fills in what an older writer left out, an older one ignores what a newer
    one added; an older writer keeps what it does not know, an equal one replaces everything."""
    old, new = Old(name="a", count=3), New(name="a", count=1, colour="red")
    read = decode(New, _entry(encode(old)))
    assert (read.name, read.count, read.colour, read.schema) == ("a", 3, "blue", 1)
    assert decode(Old, _entry(encode(new))).name == "a"
    changed = decode(New, _entry(encode(old, over=encode(new))))
    assert (changed.count, changed.colour, changed.schema) == (3, "red", 2)
    assert decode(New, _entry(encode(New(name="b"), over=encode(new)))).colour == "blue"


@pytest.mark.parametrize("raw", [b"", b"\xff", b"[]", b'{"count": "many"}'])
def test_what_is_no_record_is_corrupt(raw: bytes) -> None:
    """The error names the key."""
    with pytest.raises(Corrupt, match="/r") as caught:
        decode(Old, _entry(raw))
    assert caught.value.key == "/r"


def _add(record: Old | None) -> Old:
    return Old(count=(record.count if record else 0) + 1)


@pytest.fixture
async def led() -> AsyncIterator[MemoryLedger]:
    async with MemoryLedger() as led:
        yield led


def _soon(update_deadline_s: float) -> Timeouts:
    return Timeouts(update_deadline_s=update_deadline_s)


class Virtual(LiveRuntime):
    """A runtime whose waits take no time."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger, seed=1)
        self._now = 0.0

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        self._now += seconds


async def test_update_creates_changes_keeps_and_removes(led: MemoryLedger) -> None:
    runtime = LiveRuntime(led)
    first = await update(runtime, "/r", Old, _add)
    assert first is not None
    assert first.entry == await led.get("/r")
    second = await update(runtime, "/r", Old, _add)
    assert second is not None
    assert second.entry == await led.get("/r")
    assert second.record.count == 2
    kept = await update(runtime, "/r", Old, lambda _: KEEP)
    assert kept is not None
    assert kept.entry == second.entry
    assert await update(runtime, "/r", Old, lambda _: REMOVE) is None
    assert await led.get("/r") is None
    assert await update(runtime, "/r", Old, lambda _: REMOVE) is None


async def test_concurrent_updates_are_all_counted(led: MemoryLedger) -> None:
    """Ten tasks add ten each under one key: a hundred."""

    async def add() -> None:
        for _ in range(10):
            await update(LiveRuntime(led), "/r", Old, _add)

    await asyncio.gather(*(add() for _ in range(10)))
    stored = await load(led, "/r", Old)
    assert stored is not None
    assert stored.record.count == 100


async def test_update_gives_up_when_its_time_is_over(led: MemoryLedger) -> None:
    """Somebody changes the record between every reading and writing."""
    led.timeouts = _soon(60.0)
    runtime = Virtual(led)
    calls = 0

    def decide(record: Old | None) -> Old:
        nonlocal calls
        calls += 1
        led._hub.store.txn([], [put("/r", Old(count=-calls))], [])
        return Old(count=1)

    with pytest.raises(Conflict) as caught:
        await update(runtime, "/r", Old, decide)
    assert 50 < runtime.now() <= 60
    assert caught.value.attempt == calls


async def test_a_guard_that_fails_is_fenced_at_once(led: MemoryLedger) -> None:
    """No second attempt: it could not help."""
    calls = 0

    def decide(record: Old | None) -> Old:
        nonlocal calls
        calls += 1
        return Old(count=1)

    with pytest.raises(Fenced):
        await update(LiveRuntime(led), "/r", Old, decide, guards=[present("/leader")])
    assert calls == 1
    assert await led.get("/r") is None


async def test_update_keeps_the_lease_unless_told_otherwise(led: MemoryLedger) -> None:
    lease = await led.grant(60)
    await led.txn([absent("/r")], [put("/r", Old(), lease=lease.id)])
    stored = await update(LiveRuntime(led), "/r", Old, _add)
    assert stored is not None
    assert stored.entry.lease == lease.id
    stored = await update(LiveRuntime(led), "/r", Old, _add, lease=0)
    assert stored is not None
    assert stored.entry.lease == 0


# ---- lost answers -----------------------------------------------------------------

Fate = Literal["answered", "away", "lost before", "lost after", "late"]
"""What becomes of one transaction. "late": it is applied just before the next one."""
Rival = Literal["quiet", "adds", "removes"]


class Losing(MemoryLedger):
    """A ledger on which answers get lost while somebody else changes the record, too."""

    def __init__(self, fates: Sequence[tuple[Fate, Rival]]) -> None:
        super().__init__()
        self._fates = list(fates)
        self._late: tuple[Sequence[Compare], Sequence[Op], Sequence[Op]] | None = None
        self.applied = 0
        """How often a change of ours was made."""

    async def _txn(
        self, compare: Sequence[Compare], then: Sequence[Op], otherwise: Sequence[Op]
    ) -> Txn:
        await self.settle()
        fate, rival = self._fates.pop(0) if self._fates else ("answered", "quiet")
        if fate == "away":
            raise Unavailable("not reached")
        if fate == "late":
            self._late = compare, then, otherwise
        elif fate != "lost before":
            txn = await self._make(compare, then, otherwise)
        self._interfere(rival)
        if fate == "answered":
            return txn
        raise UnknownOutcome("the answer was lost")

    async def _make(
        self, compare: Sequence[Compare], then: Sequence[Op], otherwise: Sequence[Op]
    ) -> Txn:
        txn = await super()._txn(compare, then, otherwise)
        self.applied += txn.succeeded
        return txn

    def _interfere(self, rival: Rival) -> None:
        entry = self._hub.store.get("/r")
        if rival == "adds":
            self._hub.store.txn([], [put("/r", _add(decode(Old, entry) if entry else None))], [])
        elif rival == "removes" and entry is not None:
            self._hub.store.txn([], [Delete("/r")], [])

    async def settle(self) -> None:
        """Let a late transaction arrive."""
        late, self._late = self._late, None
        if late is not None:
            await self._make(*late)


fates = st.lists(
    st.tuples(
        st.sampled_from(["answered", "away", "lost before", "lost after", "late"]),
        st.sampled_from(["quiet", "adds", "removes"]),
    ),
    max_size=6,
)


@given(fates=fates, there=st.booleans(), verb=st.sampled_from(["add", "remove"]))
def test_no_update_is_made_twice(
    fates: list[tuple[Fate, Rival]], there: bool, verb: Literal["add", "remove"]
) -> None:
    """Whatever answers are lost: a change that was reported was made once, one whose outcome is
    unknown at most once, and one that failed not at all."""

    async def scenario() -> None:
        led = Losing(fates)
        if there:
            led._hub.store.txn([], [put("/r", Old(count=10))], [])
        outcome: Exception | None = None
        try:
            await update(Virtual(led), "/r", Old, _add if verb == "add" else _remove)
        except (Retriable, UnknownOutcome) as error:
            outcome = error
        await led.settle()
        if isinstance(outcome, UnknownOutcome):
            assert led.applied <= 1
        elif outcome is None and verb == "add":
            assert led.applied == 1
        else:
            assert led.applied <= (outcome is None), "nothing, or the removal"

    asyncio.run(scenario())


def _remove(_: Old | None) -> Verdict:
    return REMOVE


@pytest.mark.parametrize(
    ("there", "fates"),
    [
        (True, [("lost after", "quiet")]),
        (True, [("lost after", "adds")]),
        (True, [("lost before", "adds")]),
        (True, [("late", "quiet")]),
        (True, [("lost before", "quiet"), ("away", "quiet"), ("lost after", "quiet")]),
        (False, [("lost after", "removes")]),
        (False, [("lost before", "quiet")]),
    ],
)
async def test_a_change_that_may_be_ours_is_an_unknown_outcome(
    there: bool, fates: list[tuple[Fate, Rival]]
) -> None:
    """The record is not provably the one that the lost attempt would have replaced; the error
    has the lost answer as its cause."""
    led = Losing(fates)
    if there:
        led._hub.store.txn([], [put("/r", Old(count=10))], [])
    with pytest.raises(UnknownOutcome, match="/r may or may not have been changed") as caught:
        await update(Virtual(led), "/r", Old, _add)
    assert isinstance(caught.value.__cause__, UnknownOutcome)


async def test_an_update_goes_on_while_the_record_is_provably_the_same() -> None:
    led = Losing([("lost before", "quiet"), ("away", "quiet"), ("lost before", "quiet")])
    led._hub.store.txn([], [put("/r", Old(count=10))], [])
    stored = await update(Virtual(led), "/r", Old, _add)
    assert stored is not None
    assert stored.record.count == 11


@pytest.mark.parametrize("fate", ["lost before", "lost after", "late"])
async def test_a_repeatable_update_recognises_its_own_effect(fate: Fate) -> None:
    """Whether or not the lost attempt was applied, and although a rival writes as well."""
    led = Losing([(fate, "adds")])

    def decide(record: Old | None) -> Old | Verdict:
        if record is not None and record.name == "ours":
            return KEEP
        return Old(name="ours", count=(record.count if record else 0) + 1)

    stored = await update(Virtual(led), "/r", Old, decide, repeatable=True)
    assert stored is not None
    assert led.applied == 1 + (fate == "lost after")  # the rival wrote over the first one


async def test_time_that_runs_out_after_a_lost_answer_is_an_unknown_outcome() -> None:
    """ "Not reached" would say that nothing was changed."""
    away: list[tuple[Fate, Rival]] = [("away", "quiet")] * 10_000
    led = Losing([("lost after", "quiet"), *away])
    led.timeouts = _soon(12.0)

    def decide(_: Old | None) -> Old:
        return Old(name="ours")

    with pytest.raises(UnknownOutcome, match="later attempts failed"):
        await update(Virtual(led), "/r", Old, decide, repeatable=True)
