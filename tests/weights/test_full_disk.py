"""When there is no room: on the disk, or in the channel's budget.

Invariants: `NoRoom` says what is full and who holds it; what was published before stays as it
was; nothing half-written stays or is seen; when room comes back, publishing goes on.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import events
from holdfast.errors import NoRoom, TooLarge, UnknownOutcome
from holdfast.text import size as bytes_text
from holdfast.weights import Publisher, Subscriber
from holdfast.weights.room import Waiting
from patience import HANG_S
from trainer.disks import small
from weights.children import publish
from weights.command import run
from weights.family import House, go, house

DISK_BYTES = 2 << 20
PAGE = 4096
LEASE_S = 1.0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of two megabytes."""
    with small(tmp_path / "weights", DISK_BYTES) as folder:
        yield folder


def _fill(folder: Path, room_bytes: int) -> Path:
    """Leave so much room on the disk, to the page."""
    status = os.statvfs(folder)
    ballast = folder / "ballast"
    ballast.write_bytes(b"x" * max(0, status.f_bavail * status.f_frsize - room_bytes))
    return ballast


# ---- the disk ------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["whole", "ranks"])
async def test_publish_until_the_disk_is_full(small_disk: Path, home: House, way: str) -> None:
    """All that was published is whole, the rest is gone, and it goes on when there is room."""
    async with home.publisher(keep_last=1000) as publisher:
        assert home.root == str(small_disk)
        number = 0
        with pytest.raises(NoRoom, match="No space left on device") as caught:
            while True:
                await publish(publisher, number, 0, way)
                number += 1
        assert number > 5
        assert f"version {number} was not published" in str(caught.value)
        assert "Everything published before is intact" in str(caught.value)
        assert home.leftovers() == []
        with pytest.raises(NoRoom):
            await publish(publisher, number, 1, way)
        assert await home.committed() == list(range(number))
        assert await home.read_all() == [(one, 0) for one in range(number)]
        async with home.publisher(keep_last=2) as tidy:  # keeps less: that makes room
            await publish(tidy, number, 2, way)
            assert await home.read_all() == [(number - 1, 0), (number, 2)]
            assert home.folders() == [number - 1, number]
            assert home.leftovers() == []


async def test_the_disk_is_full_anywhere(small_disk: Path, home: House) -> None:
    """Wherever in a publish the room ends, page by page: `NoRoom`, and nothing to be seen.

    What is left of the failed try is at most a folder without a marker, which the next
    publish replaces.
    """
    failures = 0
    async with home.publisher(keep_last=1) as publisher:
        await publish(publisher, 0)
        for number in range(1, 100):
            ballast = _fill(small_disk, number * PAGE)
            problem = ""
            try:
                await publish(publisher, number, 1)
            except NoRoom as error:
                problem = str(error)
            ballast.unlink()
            if not problem:
                break
            failures += 1
            assert f"version {number} was not published" in problem
            assert await home.committed() == [number - 1]
            marked = [path.parent.name for path in home.base.glob("step_*/STABLE")]
            assert marked == [f"step_{number - 1}"]
            assert home.leftovers() == []
            await publish(publisher, number, 2)
            assert await home.read() == (number, 2)
            assert home.folders() == [number]
        assert failures > 15, "it never became full"
        assert await home.read() == (number, 1)


async def test_a_sweep_makes_room_on_a_full_disk(small_disk: Path, markers: House) -> None:
    """Without a ledger, giving up a version writes a little: room for that is kept."""
    async with markers.publisher(keep_last=99) as publisher:
        for number in range(5):
            await publish(publisher, number)
    _fill(small_disk, 0)
    # In a thread: the command has an event loop of its own.
    text = await asyncio.to_thread(run, "weights", "sweep", str(markers.base), "--keep-last", "1")
    assert "deleted version 3" in text
    async with markers.publisher() as publisher:
        await publish(publisher, 5)
    assert (markers.hidden / "reserve").exists(), "kept again for the next time"


@pytest.mark.long  # the record is tried again for half a minute
@pytest.mark.timeout(180)
async def test_the_ledgers_disk_is_full(tmp_path: Path, small_disk: Path) -> None:
    """The record has no room: that is no version, though its files are all there."""
    url = f"sqlite:///{small_disk}/ledger.db"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    async with house(elsewhere, url) as home, home.publisher(keep_last=3) as publisher:
        await publish(publisher, 0)
        ballast = _fill(small_disk, 0)
        number = 0
        with pytest.raises((NoRoom, UnknownOutcome), match="no room"):
            while number < 500:
                await publish(publisher, number + 1)
                number += 1
        assert (await home.committed())[-1] == number
        ballast.unlink()
        assert await home.read() == (number, 0)
        await publish(publisher, number + 1, 1)  # other contents: nothing was recorded
        assert await home.read() == (number + 1, 1)
        assert home.leftovers() == []


# ---- the budget ----------------------------------------------------------------------


async def _version_bytes(home: House) -> int:
    """What one version takes."""
    async with home.publisher() as publisher:
        await publish(publisher, 0)
    return sum(map(len, home.bytes_of(0).values()))


async def _load(subscriber: Subscriber) -> None:
    """Load the newest version."""
    async with subscriber.pin() as pin:
        await subscriber.acknowledge(pin.number)


async def test_a_budget_that_fails_names_who_holds_it(home: House) -> None:
    """Each consumer with its versions and bytes; nothing is written, nothing is deleted."""
    size = await _version_bytes(home)
    budget = 4 * size
    async with (
        home.publisher(keep_last=1, max_bytes=budget, when_full="fail") as publisher,
        home.subscriber("slow", needs="every") as slow,
        home.subscriber("quick") as quick,
    ):
        await _load(slow)
        await _load(quick)
        number = 0
        with pytest.raises(NoRoom) as caught:
            while True:
                number += 1
                await publish(publisher, number)
        text = str(caught.value)
        assert f"version {number} needs " in text
        assert f"the budget of {bytes_text(budget)}" in text
        each = [sum(map(len, home.bytes_of(one).values())) for one in range(number)]
        held = ", ".join(map(str, range(number - 1)))
        assert f"slow holds {held} ({bytes_text(sum(each[:-1]))})" in text
        assert f"quick holds 0 ({bytes_text(each[0])})" in text
        assert await home.committed() == list(range(number))
        assert home.leftovers() == []
        await _load(slow)
        await _load(quick)
        await publish(publisher, number)
        assert await home.committed() == [number - 1, number]


async def test_a_budget_that_nobody_holds_fails_at_once(home: House) -> None:
    """With no consumer in the way there is nothing to wait for; too small is too small."""
    size = await _version_bytes(home)
    async with home.publisher(max_bytes=size * 3 // 2, when_full="wait") as publisher:
        with pytest.raises(NoRoom, match="no consumer holds anything: raise max_bytes"):
            async with asyncio.timeout(HANG_S):
                await publish(publisher, 1)
    async with home.publisher(max_bytes=size // 2) as publisher:
        with pytest.raises(TooLarge, match="raise max_bytes"):
            await publish(publisher, 1)
    assert await home.read_all() == [(0, 0)]
    assert home.leftovers() == []


async def _waiting(publisher: Publisher, log: Path) -> tuple[asyncio.Task[object], int, list[str]]:
    """Publish until that has to wait; returns the task, its number, and whom it waits for."""
    number = 0
    while True:
        number += 1
        task: asyncio.Task[object] = asyncio.create_task(publish(publisher, number))
        while not task.done():
            found = [one for one in events.read(log) if isinstance(one, Waiting)]
            if found:
                assert found[0].version == number
                return task, number, list(found[0].consumers)
            await asyncio.sleep(0.01)
        await task
        assert number < 20


async def test_a_budget_that_waits_too_long(home: House) -> None:
    """After `wait_s` it is an error that names who held the budget."""
    size = await _version_bytes(home)
    async with (
        home.publisher(keep_last=1, max_bytes=4 * size, wait_s=0.3) as publisher,
        home.subscriber("slow", needs="every") as slow,
    ):
        await _load(slow)
        with pytest.raises(NoRoom, match="slow holds 0"):
            for number in range(1, 20):
                await publish(publisher, number)
        assert home.leftovers() == []


@pytest.mark.parametrize("needs", ["every", "latest"])
async def test_a_dead_consumer_holds_the_budget_for_its_lease(tmp_path: Path, needs: str) -> None:
    """kill -9 of a consumer that holds everything: the waiting publish goes on by itself."""
    async with house(tmp_path) as home:
        size = await _version_bytes(home)
        budget = 4 * size if needs == "every" else 2 * size + size // 2
        with (
            contextlib.closing(events.configure(tmp_path / "events", "test")) as log,
            home.start("consumer", name="victim", needs=needs, lease_s=LEASE_S) as victim,
        ):
            async with home.publisher(keep_last=1, max_bytes=budget) as publisher:
                await go(victim)
                await victim.ahear("pinned")
                waiting, number, consumers = await _waiting(publisher, log.path)
                assert consumers == ["victim"]
                await asyncio.sleep(0)
                victim.child.signal(signal.SIGKILL)
                began = time.monotonic()
                async with asyncio.timeout(HANG_S):
                    await waiting
                took_s = time.monotonic() - began
                print(f"waited {took_s:.2f} s for a lease of {LEASE_S} s")
                assert (await home.committed())[-1] == number
                assert await home.consumers() == []
