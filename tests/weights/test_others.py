"""Consumers and trainers that are not ours, beside a ledger and without one.

The consumer is prime-rl's: it looks for the newest STABLE, loads that folder by its path, and
writes the number into LOADED_STEP. The trainer is one that writes a step again.
"""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from holdfast.errors import Conflict, Gone, NotFound, TimedOut
from holdfast.weights import Subscriber, open_publisher
from holdfast.weights.channel import Channel
from holdfast.weights.local import LocalDisk, LocalFile, LocalFolder
from holdfast.weights.overview import collect
from kids import Kid
from weights.children import model, watch, write_marker
from weights.family import House, go, house, start

LIMIT_S = 20.0
BESIDE = "LOADED_STEP"
NAMED = ".holdfast/consumers/orchestrator/LOADED_STEP"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture(params=["sqlite", pytest.param("markers", marks=pytest.mark.long)])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[House]:
    async with house(tmp_path, request.param) as home:
        yield home


# ---- a consumer that is not ours ---------------------------------------------------


async def test_what_a_watcher_of_prime_rl_loads_is_never_deleted(place: House) -> None:
    """Loads that take 0.5 and 5 steps, and a stall of 10 steps: no file is ever missing."""
    steps, step_s = 10, 0.02
    async with place.publisher(keep_last=1) as publisher:
        watching = [
            asyncio.create_task(
                asyncio.to_thread(watch, place.base, place.base / marker, load_s, steps, stall_s)
            )
            for marker, load_s, stall_s in (
                (BESIDE, 5 * step_s, 10 * step_s),
                (NAMED, 0.5 * step_s, 0.0),
            )
        ]
        for step in range(1, steps + 1):
            await publisher.publish(step, model(step))
            await asyncio.sleep(step_s)
        for one in watching:
            report = await one
            assert report["error"] == "", report
            assert len(report["loaded"]) >= 3
        await publisher.sweep()
        assert [path.name for path in place.base.glob("step_*")] == [f"step_{steps}"]


async def test_room_is_made_when_a_watcher_moves_on(place: House) -> None:
    """A publisher whose budget a foreign consumer holds goes on when it writes its marker."""
    async with place.publisher(keep_last=1) as publisher:
        await publisher.publish(1, model(1))
        one = sum(path.stat().st_size for path in (place.base / "step_1").iterdir())
    write_marker(place.base / BESIDE, 0)
    async with place.publisher(keep_last=1, max_bytes=2 * one + one // 2) as publisher:
        await publisher.publish(2, model(2))
        third = asyncio.create_task(publisher.publish(3, model(3)))
        done, _ = await asyncio.wait([third], timeout=0.3)
        assert not done, "the budget is held"
        write_marker(place.base / BESIDE, 2)
        await asyncio.wait_for(third, LIMIT_S)
    found = await collect(place.channel(), place.book(), None)
    (row,) = found.consumers
    assert (row.consumer, row.acknowledged, row.holds) == (BESIDE, 2, (2,))
    assert row.lease_left_s is not None
    assert 500 < row.lease_left_s < 601


async def test_the_recipe_of_the_docs_writes_the_marker(tmp_path: Path) -> None:
    """The observer in WEIGHTS.md writes before the first load and after each, and only then."""
    text = (Path(__file__).parents[2] / "docs" / "WEIGHTS.md").read_text()
    code = next(part for part in text.split("```") if "class LoadedStep" in part)
    names: dict[str, Any] = {}
    exec(code.removeprefix("python"), names)
    observer = names["LoadedStep"](tmp_path)
    marker = tmp_path / "broadcasts" / "LOADED_STEP"
    assert marker.read_text() == "0\n"
    marker.unlink()
    await observer.on_version_pending(3)
    assert marker.read_text() == "0\n", "still at the version before, and alive"
    await observer.on_new_version(3)
    assert marker.read_text() == "3\n"


EVERY_SPEED = {
    BESIDE: 5 * 0.25,
    **{f".holdfast/consumers/of-{one}/LOADED_STEP": one * 0.25 for one in (0.5, 1.0, 2.0)},
}


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("book", ["sqlite", "markers"])
@pytest.mark.parametrize(
    ("loads", "steps", "step_s", "stall_s"),
    [(EVERY_SPEED, 40, 0.25, 0.0), ({BESIDE: 1.0}, 110, 1.0, 90.0)],
    ids=["every speed", "a stall of 90 s"],
)
async def test_watchers_miss_nothing(
    tmp_path: Path,
    book: str,
    loads: dict[str, float],
    steps: int,
    step_s: float,
    stall_s: float,
) -> None:
    """Watcher processes that load in 0.5, 1, 2 and 5 steps of the trainer; and one that stalls
    between seeing a version and loading it, while the trainer goes on."""
    async with house(tmp_path, book) as home:
        with contextlib.ExitStack() as stack:
            how = {"steps": steps, "step_s": step_s, "retention": {"keep_last": 1}}
            trainer = stack.enter_context(home.start("trainer", **how))
            kids: dict[str, Kid] = {}
            for marker, load_s in loads.items():
                where = {"base": str(home.base), "marker": str(home.base / marker)}
                times: dict[str, Any] = {"load_s": load_s, "last": steps, "stall_s": stall_s}
                watcher = start("watcher", folder=tmp_path, **where, **times)
                kids[marker] = stack.enter_context(watcher)
            await go(*kids.values(), trainer)
            for marker, kid in kids.items():
                report = await kid.ahear("report", stall_s + 10 * steps * step_s + 60)
                assert report["error"] == "", (marker, report)
                assert len(report["loaded"]) > 2, (marker, report)


# ---- a trainer that is not ours ----------------------------------------------------


def _write(base: Path, flavour: int, *, pause_s: float = 0.0) -> None:
    """Write step 1 as prime-rl does, each shard whole at once, and touch STABLE last."""
    folder = base / "step_1"
    folder.mkdir(parents=True, exist_ok=True)
    for shard in SHARDS:
        _replace(folder, shard, flavour)
        time.sleep(pause_s)
    (folder / "STABLE").touch()


def _replace(folder: Path, shard: str, flavour: int) -> None:
    values = np.full(1000, flavour, np.int64)
    safetensors.numpy.save_file({shard.partition("-of")[0]: values}, folder / f".{shard}")
    (folder / f".{shard}").replace(folder / shard)


async def _flavours(reader: Subscriber) -> set[int]:
    """What the tensors of one pin hold; one value if they are of one writing."""
    async with reader.pin(1) as pin:
        return {int(value) for name in pin.names for value in pin.numpy(name)}


async def test_a_step_that_is_written_again_is_never_a_mix(tmp_path: Path) -> None:
    """A trainer writes a step again and again under its STABLE: a pin is of one writing."""
    over = threading.Event()

    def train() -> None:
        flavour = 0
        while not over.wait(0.005 * 2 ** (flavour % 6)):  # with pauses for slow machines
            flavour += 1
            _write(tmp_path / "policy", flavour, pause_s=0.001)

    _write(tmp_path / "policy", 0)
    training = threading.Thread(target=train)
    training.start()
    pins = 0
    try:
        async with Subscriber(tmp_path, None, "policy", needs="latest") as reader:
            limit = time.monotonic() + LIMIT_S
            while pins < 15 and time.monotonic() < limit:
                with contextlib.suppress(NotFound, Gone, Conflict):
                    found = await _flavours(reader)
                    assert len(found) == 1, found
                    pins += 1
    finally:
        over.set()
        training.join()
    assert pins


async def test_a_shard_replaced_between_two_opens_is_noticed(tmp_path: Path) -> None:
    """The trainer replaces both shards after we opened one: we get the new ones, not a mix."""
    _write(tmp_path / "policy", 1)
    shards = []

    class Replacing(LocalFolder):
        async def open(self, name: str) -> LocalFile:
            if name in SHARDS:
                shards.append(name)
                if len(shards) == 2:
                    _write(tmp_path / "policy", 2)
            return await super().open(name)

    class ReplacingDisk(LocalDisk):
        async def folder(self, path: str) -> LocalFolder:
            folder = await super().folder(path)
            folder.__class__ = Replacing
            return folder

    at = Channel(tmp_path, None, "policy", disk=ReplacingDisk())
    async with Subscriber("", None, at=at, needs="latest") as reader:
        assert await _flavours(reader) == {2}
    assert len(shards) == 4, "it was pinned twice"


async def test_a_step_that_is_being_written_again_does_not_count(tmp_path: Path) -> None:
    """One shard is new, STABLE is old: not a version, until STABLE is new or all is at rest."""
    base = tmp_path / "policy"
    _write(base, 1)
    (base / "step_1").rename(base / "step_0")
    _write(base, 1)
    async with Subscriber(tmp_path, None, "policy", needs="latest") as reader:
        newest = await reader.latest()
        assert newest is not None
        assert newest.version == 1
        time.sleep(0.02)  # the clock of some file systems has ticks of 10 ms
        _replace(base / "step_1", SHARDS[0], 2)
        newest = await reader.latest()
        assert newest is not None
        assert newest.version == 0, "step 1 is half of one writing and half of another"
        with pytest.raises(TimedOut, match="the newest is 0"):
            await reader.wait_newer(0, timeout_s=0.1)
        _replace(base / "step_1", SHARDS[1], 2)
        (base / "step_1" / "STABLE").touch()
        assert (await reader.wait_newer(0, timeout_s=LIMIT_S)).version == 1
        assert await _flavours(reader) == {2}
        long_ago_s = time.time() - 3600
        os.utime(base / "step_1" / "STABLE", (long_ago_s - 1, long_ago_s - 1))
        for shard in SHARDS:
            os.utime(base / "step_1" / shard, (long_ago_s, long_ago_s))
        assert await _flavours(reader) == {2}, "a copy, whose times are those of the copying"


# ---- a process that was stopped -----------------------------------------------------


async def test_a_version_published_while_we_were_stopped_is_found(place: House) -> None:
    """A waiter that stood still until its time was over looks once more before it gives up."""
    async with place.publisher() as publisher:
        await publisher.publish(1, model(1))

    def publish() -> None:
        with open_publisher(place.root, place.url or None, "policy") as other:
            other.publish(2, model(2))

    async with place.subscriber() as reader:
        waiting = asyncio.gather(reader.wait_newer(1, 0.15), reader.wait_for(2, 0.15))
        await asyncio.sleep(0.05)
        thread = threading.Thread(target=publish)
        began = time.monotonic()
        thread.start()
        thread.join()  # the event loop stands still, like a process that was stopped
        time.sleep(max(0.0, 0.2 - (time.monotonic() - began)))
        assert [found.version for found in await waiting] == [2, 2]
