"""Typed records: mixed versions understand each other, and updates are never lost."""

import asyncio

import msgspec
import pytest

from holdfast.errors import Conflict, Corrupt, Fenced
from holdfast.ledger import (
    KEEP,
    REMOVE,
    Delete,
    Entry,
    Ledger,
    LiveRuntime,
    Put,
    Record,
    absent,
    open,
    present,
    update,
)
from holdfast.ledger.records import Verdict, decode, encode, load, put


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


def test_a_newer_reader_fills_in_what_an_older_writer_left_out() -> None:
    record = decode(New, _entry(encode(Old(name="a", count=3))))
    assert (record.name, record.count, record.colour, record.schema) == ("a", 3, "blue", 1)


def test_an_older_reader_ignores_what_a_newer_writer_added() -> None:
    record = decode(Old, _entry(encode(New(name="a", colour="red"))))
    assert record.name == "a"


def test_an_older_writer_keeps_what_it_does_not_know() -> None:
    """Read, change and write by an old process must not lose the new process's field."""
    raw = encode(New(name="a", count=1, colour="red"))
    changed = encode(Old(name="a", count=2), over=raw)
    again = decode(New, _entry(changed))
    assert (again.count, again.colour, again.schema) == (2, "red", 2)


def test_an_equal_writer_replaces_everything() -> None:
    raw = encode(New(name="a", colour="red"))
    assert decode(New, _entry(encode(New(name="b"), over=raw))).colour == "blue"


@pytest.mark.parametrize("raw", [b"", b"\xff", b"[]", b'{"count": "many"}'])
def test_what_is_no_record_is_corrupt(raw: bytes) -> None:
    """The error names the key."""
    with pytest.raises(Corrupt, match="/r") as caught:
        decode(Old, _entry(raw))
    assert caught.value.key == "/r"


def test_records_are_readable_json() -> None:
    assert msgspec.json.decode(encode(Old(name="a"))) == {"schema": 1, "name": "a", "count": 0}


def _add(record: Old | None) -> Old | Verdict:
    return Old(count=(record.count if record else 0) + 1)


async def _ledger() -> Ledger:
    return await open("memory:")


async def test_update_creates_changes_keeps_and_removes() -> None:
    led = await _ledger()
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
    await led.close()


async def test_concurrent_updates_are_all_counted() -> None:
    """Ten tasks add ten each under one key: a hundred."""
    led = await _ledger()

    async def add() -> None:
        for _ in range(10):
            await update(LiveRuntime(led), "/r", Old, _add, attempts=1000)

    await asyncio.gather(*(add() for _ in range(10)))
    stored = await load(led, "/r", Old)
    assert stored is not None
    assert stored.record.count == 100
    await led.close()


async def test_update_gives_up_after_a_bounded_number_of_conflicts() -> None:
    """Somebody changes the record between every reading and writing."""
    led = await _ledger()
    calls = 0

    def decide(record: Old | None) -> Old:
        nonlocal calls
        calls += 1
        led._hub.store.txn([], [put("/r", Old(count=-calls))], [])  # type: ignore[attr-defined]
        return Old(count=1)

    with pytest.raises(Conflict) as caught:
        await update(LiveRuntime(led), "/r", Old, decide, attempts=3)
    assert calls == 3
    assert caught.value.attempt == 3
    await led.close()


async def test_a_guard_that_fails_is_fenced_at_once() -> None:
    """No second attempt: it could not help."""
    led = await _ledger()
    calls = 0

    def decide(record: Old | None) -> Old:
        nonlocal calls
        calls += 1
        return Old(count=1)

    with pytest.raises(Fenced):
        await update(LiveRuntime(led), "/r", Old, decide, guards=[present("/leader")])
    assert calls == 1
    assert await led.get("/r") is None
    await led.close()


async def test_update_keeps_the_lease_unless_told_otherwise() -> None:
    led = await _ledger()
    lease = await led.grant(60)
    await led.txn([absent("/r")], [put("/r", Old(), lease=lease.id)])
    stored = await update(LiveRuntime(led), "/r", Old, _add)
    assert stored is not None
    assert stored.entry.lease == lease.id
    stored = await update(LiveRuntime(led), "/r", Old, _add, lease=0)
    assert stored is not None
    assert stored.entry.lease == 0
    await led.txn([], [Delete("/r"), Put("/x", b"")])
    await led.close()
