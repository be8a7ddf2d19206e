"""Consumers and sweepers that are killed or stopped, and versions that were damaged.

Invariants: a dead consumer holds nothing once its lease has ended; a sweep that was killed is
finished by the next one; damaged bytes are never given out; a consumer that slept for longer
than its lease reads the right bytes from what it has open, and is told what has ended.
"""

import asyncio
import contextlib
import signal
from pathlib import Path

import pytest

from holdfast.errors import Corrupt
from holdfast.weights import Publisher
from kids import Kid, points
from patience import auntil
from weights.children import publish, read_folder, read_pin
from weights.family import DAMAGES, House, damage, go

LEASE_S = 1.0
SWEEP = points("weights.sweep.")
PIN = points("weights.pin.")
ACKNOWLEDGE = points("weights.acknowledge.")


async def _swept(home: House, publisher: Publisher, wanted: list[int]) -> None:
    """Sweep until just these versions are left."""

    async def done() -> bool:
        await publisher.sweep()
        return await home.committed() == wanted and not home.leftovers()

    await auntil(done)
    assert home.folders() == wanted


def _consumer(
    home: House, fault: str = "", needs: str = "latest"
) -> contextlib.AbstractContextManager[Kid]:
    return home.start("consumer", fault=fault, name="victim", needs=needs, lease_s=LEASE_S)


# ---- killed ------------------------------------------------------------------------


@pytest.mark.parametrize("point", [*PIN, *ACKNOWLEDGE])
async def test_killed_consumer(shared: House, point: str) -> None:
    """kill -9 of a consumer: what it held is kept for the rest of its lease, and not longer.

    With the lease go its pins, its acknowledgement and its staging folder.
    """
    async with shared.publisher(keep_last=1) as publisher:
        await publish(publisher, 1, 0, "ranks")
        with _consumer(shared, f"{point}:kill") as victim:
            await victim.ahear("ready")
            with contextlib.suppress(BrokenPipeError):  # it may be dead before the last word
                for word in ("go", "serve"):
                    victim.tell(word)
            assert await victim.killed() == point
        alive = "victim" in await shared.consumers()
        await publish(publisher, 2, 0, "ranks")
        if alive and "victim" in await shared.consumers():
            assert await shared.committed() == [1, 2], "the lease had not ended yet"
            assert await shared.read(1) == (1, 0)
        await _swept(shared, publisher, [2])
        assert await shared.consumers() == []
        await publish(publisher, 3)
        assert list((shared.hidden / "consumers").iterdir()) == []


@pytest.mark.parametrize("point", SWEEP)
@pytest.mark.parametrize("hit", [1, pytest.param(2, marks=pytest.mark.long)])
async def test_killed_sweeper(home: House, point: str, hit: int) -> None:
    """kill -9 inside a sweep: what is left can be read, and the next sweep finishes it."""
    async with home.publisher(keep_last=4) as first:
        for number in range(4):
            await publish(first, number, 0, "ranks")
    with home.start("publisher", fault=f"{point}:kill@{hit}", keep_last=1) as victim:
        assert await victim.killed() == point
    left = await home.committed()
    assert left[-1] == 3
    assert await home.read_all() == [(number, 0) for number in left]
    async with home.publisher(keep_last=1) as second:
        assert await home.committed() == home.folders() == [3]
        assert home.leftovers() == []
        assert await second.next_version() == 4
    assert await home.read() == (3, 0)


# ---- stopped -----------------------------------------------------------------------


async def _while_asleep(home: House, sleeper: Kid, publisher: Publisher) -> None:
    """Publish until what the sleeper held is gone; wake it up."""
    await publish(publisher, 2, 0, "ranks")
    await _swept(home, publisher, [2])
    assert await home.consumers() == []
    sleeper.child.signal(signal.SIGCONT)


async def _ends(kid: Kid, word: str) -> tuple[str, str]:
    kid.tell(word)
    outcome = await kid.ahear("outcome")
    return outcome["error"], outcome["text"]


@pytest.mark.parametrize("staged", [False, True])
async def test_stopped_inside_a_pin(shared: House, staged: bool) -> None:
    """SIGSTOP for longer than the lease: the open pin still reads right; all else says why not.

    `check` and `stage` raise `LeaseLost`, though the staged paths are gone; a new pin works.
    """
    async with shared.publisher(keep_last=1) as publisher:
        await publish(publisher, 1, 0, "ranks")
        with _consumer(shared) as sleeper:
            await go(sleeper)
            await sleeper.ahear("pinned")
            folder = shared.folder / "none"
            if staged:
                sleeper.tell("stage")
                folder = Path((await sleeper.ahear("staged"))["folder"])
                assert read_folder(folder) == (1, 0)
            sleeper.child.signal(signal.SIGSTOP)
            await asyncio.to_thread(sleeper.stopped)
            await _while_asleep(shared, sleeper, publisher)
            assert not folder.exists()
            sleeper.tell("read")
            assert (await sleeper.ahear("read"))["found"] == [1, 0]
            for word in ("check", "stage", "stage"):
                error, text = await _ends(sleeper, word)
                assert error == "LeaseLost", (word, text)
                assert "pin again" in text
            sleeper.tell("again")
            assert (await sleeper.ahear("read"))["found"] == [2, 0]
            assert (await sleeper.ahear("outcome"))["error"] == ""
            sleeper.tell("")
            await sleeper.ahear("done")
        await _swept(shared, publisher, [2])


@pytest.mark.parametrize("point", PIN)
async def test_stopped_while_pinning(shared: House, point: str) -> None:
    """SIGSTOP in the middle of pinning, until all of it was swept: never a missing file.

    Whoever had everything open goes on with it; others pin the newest version instead.
    """
    async with shared.publisher(keep_last=1) as publisher:
        await publish(publisher, 1, 0, "ranks")
        with _consumer(shared, f"{point}:stop") as sleeper:
            await go(sleeper)
            sleeper.tell("stage")
            assert await asyncio.to_thread(sleeper.stopped) == point
            await _while_asleep(shared, sleeper, publisher)
            staged = await sleeper.ahear("outcome")
            sleeper.tell("read")
            found = (await sleeper.ahear("read"))["found"]
            if point in ("weights.pin.recorded", "weights.pin.opened"):
                assert found == [2, 0]
                assert staged["error"] == ""
            else:
                assert found == [1, 0]
                assert staged["error"] == "LeaseLost", staged
                assert (await _ends(sleeper, "stage"))[0] == "LeaseLost"


async def test_two_pins_of_one_version(home: House) -> None:
    """Leaving one pin takes nothing away from another pin of the same version."""
    async with (
        home.publisher(keep_last=1) as publisher,
        home.subscriber() as subscriber,
    ):
        await publish(publisher, 1, 0, "ranks")
        async with subscriber.pin(1) as one:
            folder = Path(await one.stage())
            async with subscriber.pin(1) as two:
                assert read_folder(Path(await two.stage())) == (1, 0)
            await publish(publisher, 2, 0, "ranks")
            assert read_folder(folder) == (1, 0)
            assert Path(await one.stage()) == folder
            await one.check()
            assert read_pin(one) == (1, 0)


# ---- damaged -----------------------------------------------------------------------

SHARD = "model-rank00001-00001.safetensors"
TENSOR = "layers.0.weight"


@pytest.mark.parametrize("what", DAMAGES)
async def test_a_damaged_version_is_refused(home: House, what: str) -> None:
    """`Corrupt`, at once and before anything is given out, naming the file and the tensor.

    Other versions can still be loaded, and the pin that failed holds nothing.
    """
    async with home.publisher() as publisher:
        await publish(publisher, 1, 0, "ranks")
        await publish(publisher, 2, 0, "ranks")
        damage(home.base / "step_2", SHARD, what)
        async with home.subscriber() as subscriber:
            with pytest.raises(Corrupt) as caught:
                async with subscriber.pin():
                    raise AssertionError("something was given out")
            assert SHARD in str(caught.value)
            assert TENSOR in str(caught.value)
            assert caught.value.version == 2
            async with subscriber.pin(1) as pin:
                assert read_pin(pin) == (1, 0)
        await publish(publisher, 3, 0, "ranks")
        assert await home.read() == (3, 0)


@pytest.mark.parametrize("edit", [b'"epoch": 1', b'"kind": "model"'])
async def test_an_edited_manifest_is_refused(home: House, edit: bytes) -> None:
    """A manifest that anybody has touched is not the one that was published."""
    async with home.publisher() as publisher:
        await publish(publisher, 1, 0, "ranks")
        path = home.base / "step_1" / "holdfast.json"
        before = path.read_bytes()
        assert edit in before
        path.write_bytes(before.replace(edit, edit.replace(b"1", b"2").replace(b"m", b"M")))
        async with home.subscriber() as subscriber:
            with pytest.raises(Corrupt, match=r"step_1/holdfast\.json is not what was published"):
                await subscriber.pin().__aenter__()
            path.rename(path.with_name("elsewhere"))
            path.symlink_to("elsewhere")
            for _ in ("a link", "nothing"):
                with pytest.raises(Corrupt, match=r"holdfast\.json"):
                    await subscriber.pin().__aenter__()
                path.unlink(missing_ok=True)
