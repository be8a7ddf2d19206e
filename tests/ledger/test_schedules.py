"""Schedules that once broke a promise above the back ends; each must stay mended."""

import asyncio
import threading
from pathlib import Path

import pytest

from holdfast.errors import Conflict, Corrupt, Mistake
from holdfast.ledger import (
    Delete,
    Entry,
    Keeper,
    LiveRuntime,
    Put,
    Record,
    backup,
    open,
    open_sync,
    present,
    update,
)
from holdfast.ledger.memory import MemoryLedger
from holdfast.ledger.records import put
from patience import HANG_S

from .conformance import take, within


class Note(Record, frozen=True, kw_only=True):
    text: str = ""


async def test_a_record_that_came_and_went_is_no_broken_guard() -> None:
    """Created and deleted by others between our reading and our writing: no `Fenced`."""
    async with MemoryLedger() as led:
        await led.txn([], [Put("/leader", b"")])
        original = led._get
        flips = 0

        async def flipping(key: str) -> Entry | None:
            nonlocal flips
            entry = await original(key)
            flips += 1
            if key == "/note" and flips == 1:
                led._hub.store.txn([], [put("/note", Note(text="theirs"))], [])
            elif key == "/note" and flips == 2:
                led._hub.store.txn([], [Delete("/note")], [])
                entry = await original(key)
            return entry

        led._get = flipping  # type: ignore[method-assign]
        stored = await update(
            LiveRuntime(led),
            "/note",
            Note,
            lambda _: Note(text="ours"),
            guards=[present("/leader")],
        )
        assert stored is not None
        assert stored.record.text == "ours"


async def test_a_keeper_that_fails_says_that_its_lease_is_lost() -> None:
    """Whatever ends the renewing, whoever waits for `lost` hears of it."""
    async with MemoryLedger() as led, Keeper(LiveRuntime(led), 0.3) as keeper:

        async def broken(lease: int) -> float:
            raise Corrupt("damaged")

        led.keep_alive = broken  # type: ignore[method-assign]
        await within(keeper.lost.wait())
        assert keeper._task is not None
        assert isinstance(keeper._task.exception(), Corrupt)


async def test_a_keeper_does_not_wait_for_an_answer_beyond_its_lease() -> None:
    """A call that hangs does not keep the belief alive."""
    async with MemoryLedger() as led, Keeper(LiveRuntime(led), 0.3) as keeper:

        async def hanging(lease: int) -> float:
            await asyncio.sleep(60)
            return 60.0

        led.keep_alive = hanging  # type: ignore[method-assign]
        await within(keeper.lost.wait(), 30)  # the call hangs for twice as long


async def test_memory_watches_hear_of_leases_whose_granter_is_closed() -> None:
    async with open("memory:granter") as watcher, watcher.watch("/", start=1) as watch:
        async with open("memory:granter") as granter:
            lease = await granter.grant(0.2)
            await granter.txn([], [Put("/mine", b"", lease.id)])
        made, gone = await take(watch, 2)
    assert made.events[0].entry is not None
    assert gone.events[0].entry is None


async def test_memory_watches_end_when_their_ledger_is_closed() -> None:
    led = await open("memory:")
    waiting = asyncio.ensure_future(anext(led.watch("/", start=1)))
    await asyncio.sleep(0)
    await led.close()
    with pytest.raises(Mistake):
        await within(waiting)


async def test_a_watch_of_something_rare_keeps_up_with_history() -> None:
    """Others make far more revisions than are kept; nothing of ours was lost."""
    async with MemoryLedger() as led, led.watch("/rare", start=1) as watch:
        waiting = asyncio.ensure_future(anext(watch))
        for number in range(25_000):
            await led.txn([], [Put("/often", str(number).encode())])
            if number % 500 == 0:
                await asyncio.sleep(0)
        await led.txn([], [Put("/rare", b"")])
        assert (await within(waiting)).events[0].key == "/rare"


def test_a_sync_watch_is_closed_under_an_iterating_thread(tmp_path: Path) -> None:
    """The iteration ends; nothing hangs, nothing is raised."""
    with open_sync(f"sqlite:///{tmp_path}/x.db") as led:
        watch = led.watch("/", start=1)
        seen: list[object] = []
        thread = threading.Thread(target=lambda: seen.append(list(watch)))
        thread.start()
        led.txn([], [Put("/a", b"")])
        watch.close()
        thread.join(HANG_S)
        assert not thread.is_alive()
        assert len(seen) == 1


def test_sync_calls_after_close_and_from_the_inside_are_mistakes(tmp_path: Path) -> None:
    led = open_sync(f"sqlite:///{tmp_path}/x.db")

    async def inside() -> None:
        led.get("/a")

    with pytest.raises(Mistake, match="event loop that does the work"):
        led.run(inside())
    led.close()
    with pytest.raises(Mistake, match="closed"):
        led.get("/a")


async def test_two_backups_are_never_mixed(tmp_path: Path) -> None:
    """An interrupted restore is finished only with the very backup it began with."""
    for day in ("monday", "tuesday"):
        async with MemoryLedger() as led:
            for number in range(250):
                await led.txn([], [Put(f"/k/{number:03}", day.encode())])
            (tmp_path / day).mkdir()
            await backup.backup(led, tmp_path / day / "x.backup")
    async with MemoryLedger() as led:
        original, count = led._txn, 0

        async def dying(*args: object) -> object:
            nonlocal count
            count += 1
            if count == 3:
                raise Conflict("the process dies here")
            return await original(*args)  # type: ignore[arg-type]

        led._txn = dying  # type: ignore[assignment, method-assign]
        with pytest.raises(Conflict):
            await backup.restore(led, tmp_path / "monday" / "x.backup")
        with pytest.raises(Mistake, match="not empty"):
            await backup.restore(led, tmp_path / "tuesday" / "x.backup")
        await backup.restore(led, tmp_path / "monday" / "x.backup")
        values = {entry.value for entry in (await led.range("/k/")).entries}
        assert values == {b"monday"}


async def test_bad_places_for_backups_are_mistakes(tmp_path: Path) -> None:
    async with MemoryLedger() as led:
        with pytest.raises(Mistake, match="create it"):
            await backup.backup(led, tmp_path / "no" / "x.backup")
        with pytest.raises(Mistake, match="there is no backup"):
            await backup.restore(led, tmp_path)
