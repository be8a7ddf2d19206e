"""The weights protocol with a ledger and without: one set of promises, then what differs."""

import asyncio
import contextlib
import errno
import os
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import safetensors.numpy
import torch  # noqa: F401 - its first import takes seconds, in which leases would end

from holdfast import faults, ledger
from holdfast.errors import (
    Conflict,
    Corrupt,
    Fenced,
    Gone,
    LeaseLost,
    Mistake,
    NotFound,
    Unavailable,
)
from holdfast.ledger import LiveRuntime
from holdfast.timeouts import DEFAULTS
from holdfast.weights import Publisher, Retention, Swept, Version
from holdfast.weights.local import LocalDisk, LocalFolder
from holdfast.weights.marker_book import MarkerBook
from holdfast.weights.marker_seat import MarkerSeat
from holdfast.weights.markers import Markers
from holdfast.weights.records import Consumer
from patience import HANG_S, auntil
from weights.family import House, fill, foreign, refused, weights

LEASE_S = 1.0
LAST_ONE = Retention(keep_last=1)


class Hanging(LiveRuntime):
    """A process whose tasks do not come back from their next sleep once it hangs."""

    hangs = False

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds)
        if self.hangs:
            await asyncio.Event().wait()


def hanging(home: House) -> Hanging:
    return Hanging(home.ledger)  # type: ignore[arg-type]  # markers have no ledger


# ---- the same promises on every book -----------------------------------------


async def test_what_is_published_is_loaded_acknowledged_and_swept(world: House) -> None:
    """A version is loaded bit for bit; what the policy does not keep and nobody needs goes."""
    async with world.publisher(keep_last=2) as publisher, world.subscriber() as reader:
        await refused(reader.pin(), NotFound, "there is nothing to load")
        for step in range(5):
            published = await publisher.publish(step, weights(step), files={"config.json": b"{}"})
            async with reader.pin() as pin:
                assert pin.number == step
                assert pin.verified
                assert isinstance(published, Version)
                assert pin.version.content == published.content
                assert pin.version.manifest == published.manifest
                assert (pin.numpy("w") == step).all()
                assert pin.carried("config.json") == b"{}"
                await reader.acknowledge(step)
            assert world.folders() == [n for n in (step - 1, step) if n >= 0]
        await refused(reader.pin(1), Gone)
        await refused(reader.pin(9), NotFound)


async def test_what_a_consumer_needs_survives_sweeps(world: House) -> None:
    """However many versions come: what is pinned stays, then what is served until another is
    acknowledged; and for whoever needs every version all from the newest at its joining on."""
    async with world.publisher(keep_last=1) as publisher, world.subscriber() as reader:
        await publisher.publish(0, weights(0))
        async with reader.pin(0) as pin:
            await fill(publisher, 1, 2, 3)
            assert (await publisher.sweep()).deleted == ()
            assert world.folders() == [0, 3]
            await pin.check()
            staged = await pin.stage()
            assert safetensors.numpy.load_file(f"{staged}/model.safetensors")["w"][0] == 0
            await reader.acknowledge(0)
        await publisher.publish(4, weights(4))
        assert world.folders() == [0, 4]
        async with reader.pin() as pin:
            await reader.acknowledge(pin.number)
        await publisher.sweep()
        assert world.folders() == [4]
        async with world.subscriber("r1", needs="every") as every:
            await fill(publisher, 5, 6, 7)
            assert world.folders() == [4, 5, 6, 7]
            async with every.pin(6) as pin:
                await every.acknowledge(pin.number)
            await publisher.sweep()
            assert world.folders() == [4, 6, 7]
        await publisher.sweep()
        assert world.folders() == [4, 7]


async def test_a_number_means_one_content_for_ever(world: House) -> None:
    """Publishing again is nothing or a mistake, also after the files are gone; a new publisher
    goes on behind all that ever was, even if every folder is gone."""
    async with world.publisher(keep_last=1) as publisher:
        first = await publisher.publish(0, weights(0))
        again = await publisher.publish(0, weights(0))
        assert isinstance(again, Version)
        assert again.content == first.content
        with pytest.raises(Mistake, match="other contents"):
            await publisher.publish(0, weights(1))
        await fill(publisher, 1, 2, 3)
        assert isinstance(await publisher.publish(0, weights(0)), Swept)
    shutil.rmtree(world.base / "step_3")
    async with world.publisher(keep_last=1) as publisher:
        assert publisher.epoch == 2
        assert await publisher.next_version() == 4
        for number in (0, 2):
            with pytest.raises(Mistake, match="other contents"):
                await publisher.publish(number, weights(9))
        await publisher.publish(6, weights(6))
        with pytest.raises(Mistake, match="numbers only grow"):
            await publisher.publish(5, weights(5))
        assert world.folders() == [6]


async def test_a_newer_version_wakes_whoever_waits(world: House) -> None:
    """Waiting ends with the version that was waited for."""
    async with world.publisher(keep_last=1) as publisher, world.subscriber() as reader:
        newer = asyncio.create_task(reader.wait_newer(None, HANG_S))
        exactly = asyncio.create_task(reader.wait_for(1, HANG_S))
        await publisher.publish(0, weights(0))
        assert (await newer).version == 0
        await publisher.publish(1, weights(1))
        assert (await exactly).version == 1
        with pytest.raises(Gone, match="was deleted"):
            await reader.wait_for(0, HANG_S)


async def test_a_replaced_publisher_is_told_and_stays_fenced(world: House) -> None:
    """Whoever opens a channel fences off whoever had it, for ever, whatever it does.

    Also when it publishes a number that its successor has used otherwise. What is kept is the
    policy of whoever publishes now.
    """
    async with world.publisher("old", keep_last=1) as old:
        await old.publish(0, weights(0))
        async with world.publisher("new", keep_last=3) as new:
            for step in (1, 1, 2):
                with pytest.raises(Fenced, match="new, epoch 2"):
                    await old.publish(step, weights(step))
            for step in (1, 2):
                await new.publish(step, weights(step + 5))
                for act in (old.publish(step, weights(step)), old.begin(9), old.sweep()):
                    with pytest.raises(Fenced):
                        await act
            assert world.folders() == [0, 1, 2]


async def test_two_lives_of_one_name_do_not_disturb_each_other(world: House) -> None:
    """A consumer that was started twice has two lives; one may leave, the other goes on."""
    async with world.publisher(keep_last=1) as publisher, world.subscriber() as first:
        await publisher.publish(0, weights(0))
        async with first.pin() as pin:
            async with world.subscriber() as second, second.pin():
                pass
            await publisher.publish(1, weights(1))
            await pin.check()
            assert world.folders() == [0, 1]


# ---- marker files: trainers and consumers that are not ours ---------------------


async def test_versions_of_a_foreign_trainer_are_loaded(markers: House) -> None:
    """Folders with STABLE and no manifest are versions; they are checked, but not verified."""
    foreign(markers.base, 3)
    foreign(markers.base, 4)
    async with markers.subscriber() as reader:
        async with reader.pin() as pin:
            assert (pin.number, pin.verified) == (4, False)
            assert pin.version.content == pin.version.manifest == ""
            assert pin.names == ("layers.0.weight", "layers.1.weight")
            assert (pin.numpy("layers.1.weight") == 4).all()
            assert pin.carried("config.json") == b"{}"
            staged = Path(await pin.stage())
            assert (staged / "model.safetensors.index.json").exists()
            await reader.acknowledge(4)
        async with reader.pin(3) as pin:
            assert (pin.numpy("layers.0.weight") == 3).all()
        loaded = list(markers.hidden.glob("consumers/r0-*/LOADED_STEP"))
        assert [path.read_text() for path in loaded] == ["4\n"]
    assert list(markers.hidden.glob("consumers/*")) == []


ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
LACKING = f'{{"weight_map": {{"layers.0.weight": "{ONE}"}}}}'
AGAIN = {"layers.0.weight": np.zeros(1)}


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda at: os.truncate(at / TWO, 90), "damaged"),
        (lambda at: (at / TWO).unlink(), "is not in"),
        (lambda at: (at / INDEX).write_text("{"), "not an index"),
        (lambda at: (at / INDEX).write_text(LACKING), "is not in it"),
        (lambda at: [(at / one).unlink() for one in (INDEX, ONE)], f"{ONE} is missing"),
        (lambda at: safetensors.numpy.save_file(AGAIN, at / "x.safetensors"), "both hold layers"),
        (lambda at: [path.unlink() for path in at.glob("model*")], "no safetensors file"),
        (lambda at: (at / "x.safetensors").symlink_to("/dev/zero"), "not an ordinary file"),
    ],
)
async def test_a_foreign_version_that_is_not_whole_is_not_loaded(
    markers: House, harm: Callable[[Path], object], message: str
) -> None:
    """What can be seen without a manifest is seen, and names the file."""
    folder = foreign(markers.base, 1)
    harm(folder)
    (folder / "STABLE").touch()
    async with markers.subscriber() as reader:
        with pytest.raises(Corrupt, match=message):
            async with reader.pin():
                pass


async def test_a_folder_without_its_marker_is_not_a_version(markers: House) -> None:
    """A foreign folder is seen from the moment of its STABLE, and not before."""
    foreign(markers.base, 1)
    half = foreign(markers.base, 2, stable=False)
    (markers.base / "step_7.tmp").mkdir()
    (markers.base / "step_08").mkdir()
    async with markers.subscriber() as reader:
        newest = await reader.latest()
        assert newest is not None
        assert newest.version == 1
        await refused(reader.pin(2), NotFound)
        newer = asyncio.create_task(reader.wait_newer(1, HANG_S))
        done, _ = await asyncio.wait([newer], timeout=0.7)
        assert not done
        (half / "STABLE").touch()
        assert (await newer).version == 2
        async with reader.pin() as pin:
            assert pin.number == 2


async def test_a_foreign_version_that_its_trainer_deletes_is_gone_and_the_newest_is_taken(
    markers: House,
) -> None:
    """Deleted by its own trainer between pin and open: `Gone`; without a number, the next one."""
    foreign(markers.base, 1)

    class Deleting(LocalDisk):
        """Deletes a version when it is opened for the third time: that is for its files."""

        opened = 0
        victim = "/none"

        async def folder(self, path: str) -> LocalFolder:
            folder = await super().folder(path)
            if path.endswith(self.victim):
                self.opened += 1
                if self.opened == 3:
                    shutil.rmtree(path)
            return folder

    disk = Deleting()
    async with markers.subscriber(at=markers.channel(disk=disk)) as reader:
        disk.victim, disk.opened = "/step_1", 0
        await refused(reader.pin(1), Gone, "deleted while it was opened")
        foreign(markers.base, 2)
        foreign(markers.base, 3)
        disk.victim, disk.opened = "/step_3", -1  # and once to find out that it is the newest
        async with reader.pin() as pin:
            assert pin.number == 2


async def test_files_that_are_written_over_under_a_pin_are_told(markers: House) -> None:
    """A trainer that writes over a shard in place: `check` and `load_into` say so."""
    folder = foreign(markers.base, 1)
    async with markers.subscriber() as reader, reader.pin(1) as pin:
        target = {name: tensor.clone() for name, tensor in pin.state_dict().items()}
        pin.load_into(target)
        await pin.check()
        time.sleep(0.02)  # the clock of some file systems has ticks of 10 ms
        with (folder / "model-00002-of-00002.safetensors").open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\1")
        with pytest.raises(Conflict, match="written again"):
            pin.load_into(target)
        with pytest.raises(Conflict, match="written again"):
            await pin.check()


@pytest.mark.parametrize("place", [".holdfast/consumers/orchestrator/LOADED_STEP", "LOADED_STEP"])
async def test_a_foreign_consumer_is_respected(world: House, place: str) -> None:
    """Whoever only writes LOADED_STEP keeps that version and all newer ones, while it is fresh."""
    path = world.base / place
    async with world.publisher(keep_last=1) as publisher:
        await publisher.publish(0, weights(0))
        path.parent.mkdir(exist_ok=True)
        path.write_text("0\n")
        await fill(publisher, 1, 2)
        assert world.folders() == [0, 1, 2]
        path.write_text("1")
        await publisher.sweep()
        assert world.folders() == [1, 2]
        path.write_text("not a number")
        await publisher.publish(3, weights(3))
        assert world.folders() == [1, 2, 3], "what is not understood holds everything"
        path.write_text("1")
        long_ago = time.time() - DEFAULTS.foreign_lease_s - 5
        os.utime(path, (long_ago, long_ago))
        await publisher.sweep()
        assert world.folders() == [3]
        assert path.exists(), "what others wrote is theirs"


async def test_a_version_that_lost_its_manifest_is_not_taken_for_a_foreign_one(
    markers: House,
) -> None:
    """What was published verified is never loaded unverified."""
    async with markers.publisher(keep_last=1) as publisher, markers.subscriber() as reader:
        await publisher.publish(0, weights(0))
        manifest = markers.base / "step_0" / "holdfast.json"
        text = manifest.read_bytes()
        for harm in (b"", text[:-20], text.replace(b'"step": 0', b'"step": 1')):
            manifest.unlink(missing_ok=True)
            if harm:
                manifest.write_bytes(harm)
            await refused(reader.pin(0), Corrupt)
            assert await reader.latest() is None
            with pytest.raises(Mistake, match="other contents"):
                await publisher.publish(0, weights(3))


# ---- marker files: races, played step by step ------------------------------------


@contextlib.asynccontextmanager
async def seated(
    home: House,
    kind: type[Markers] = Markers,
    *,
    needs: Literal["every", "latest"] = "latest",
    runtime: LiveRuntime | None = None,
    lease_s: float = 10.0,
) -> AsyncIterator[MarkerSeat]:
    """A consumer's seat, which reads the markers in its own way."""
    channel = home.channel()
    record = Consumer(name="r0", needs=needs, floor=0)
    looking = kind(channel.disk, channel.layout)
    seat = MarkerSeat(runtime or channel.runtime, looking, record, lease_s)
    await seat.join()
    try:
        yield seat
    finally:
        await seat.leave()


class Played(MarkerBook):
    """A sweep that lets something happen between its steps."""

    def __init__(self, world: House, act: Callable[[str], Awaitable[None]]) -> None:
        channel = world.channel()
        super().__init__(channel.runtime, channel.disk, channel.layout, "sweeper")
        self._act = act
        self._looks = 0

    async def _needed(self, number: int, head: int) -> bool:
        self._looks += 1
        await self._act(f"before look {self._looks}")
        found = await super()._needed(number, head)
        await self._act(f"after look {self._looks}")
        return found


async def test_a_pin_before_a_version_is_given_up_wins(markers: House) -> None:
    """Pinned after the sweep has looked once, before it has written `swept`: it stays.

    Nobody else can pin it then, and it goes with the pin.
    """
    async with markers.publisher(keep_last=2) as publisher:
        await fill(publisher, 0, 1)
        async with markers.subscriber() as reader, markers.subscriber("r1") as other:
            stack = contextlib.AsyncExitStack()
            pins = []

            async def pin(now: str) -> None:
                if now == "after look 1":
                    assert not (markers.hidden / "swept" / "0").exists()
                    pins.append(await stack.enter_async_context(reader.pin(0)))

            book = Played(markers, pin)
            assert not await book.forget(await book.view(), 0)
            await pins[0].check()
            await refused(other.pin(0), Gone)
            await publisher.publish(2, weights(2))
            assert markers.folders() == [0, 1, 2]
            await stack.aclose()
            await publisher.sweep()
            assert markers.folders() == [1, 2]


@pytest.mark.parametrize("moment", ["before look 2", "after look 2"])
async def test_a_pin_after_a_version_was_given_up_loses(markers: House, moment: str) -> None:
    """Pinned once `swept` is written, wherever the sweep is then: `Gone`, and it is deleted."""
    async with markers.publisher(keep_last=2) as publisher:
        await fill(publisher, 0, 1)
        async with markers.subscriber() as reader:
            played = []

            async def pin(now: str) -> None:
                if now == moment:
                    await refused(reader.pin(0), Gone)
                    played.append(now)

            book = Played(markers, pin)
            assert await book.forget(await book.view(), 0)
            assert played == [moment]


async def test_a_version_given_up_while_it_is_being_pinned_is_gone(markers: House) -> None:
    """Given up between the consumer's look and its pin: it looks again, and leaves no pin."""
    async with markers.publisher(keep_last=2) as publisher:
        await fill(publisher, 0, 1)
        sweeper = markers.book()

        class Slow(Markers):
            looks = 0

            async def mark(self, one: int) -> str:
                self.looks += 1
                if self.looks == 1:  # the consumer has seen that all is well
                    assert await sweeper.forget(await sweeper.view(), one)
                return await super().mark(one)

        async with seated(markers, Slow) as seat:
            with pytest.raises(Gone):
                await seat.pin(0)
            (member,) = (await sweeper.view()).members
            assert member.record.pins == ()
            assert (await seat.pin(1)).version == 1


async def test_a_heartbeat_keeps_a_pin_beyond_its_lease(markers: House) -> None:
    """Whoever lives holds its pin for as long as it wants."""
    async with (
        markers.publisher(keep_last=1) as publisher,
        markers.subscriber(lease_s=LEASE_S) as reader,
    ):
        await publisher.publish(0, weights(0))
        async with reader.pin() as pin:
            await publisher.publish(1, weights(1))
            book = markers.book()
            (member,) = (await book.view()).members

            async def lease_is_over() -> bool:
                return (await book.view()).now_s > member.until_s

            await auntil(lease_is_over)
            await publisher.sweep()
            assert markers.folders() == [0, 1]
            await pin.check()


async def test_whoever_joins_while_versions_come_has_a_floor_that_holds(markers: House) -> None:
    """The floor is never below what a sweep may have given up while it was being written."""
    async with markers.publisher(keep_last=1) as publisher:
        await publisher.publish(0, weights(0))

        class Slow(Markers):
            looks = 0

            async def head(self) -> int | None:
                seen = await super().head()
                self.looks += 1
                if self.looks == 1:  # between looking and writing the floor
                    await fill(publisher, 1, 2)
                return seen

        async with seated(markers, Slow, needs="every"):
            (member,) = (await markers.book().view()).members
            assert member.record.floor == 2
            await publisher.publish(3, weights(3))
            assert markers.folders() == [2, 3]


async def test_a_heartbeat_that_comes_too_late_does_not_revive(markers: House) -> None:
    """Whoever was taken for dead learns of it at its next touch, also if it touches first."""
    await markers.channel().make()
    runtime = hanging(markers)
    foreign(markers.base, 0)
    async with seated(markers, runtime=runtime, lease_s=0.5) as seat:
        await seat.pin(0)
        assert await seat.holds(0)
        runtime.hangs = True
        book = markers.book()

        async def dead() -> bool:
            view = await book.view()
            return all(member.until_s <= view.now_s for member in view.members)

        await auntil(dead)
        with pytest.raises(LeaseLost):
            await seat._beat()  # what its heartbeat task does when it wakes up
        assert seat.lost.is_set()
        assert not await seat.holds(0)


async def test_a_consumer_whose_folder_is_removed_takes_another_seat(markers: House) -> None:
    """Removing a life's folder ends that life, and only that one."""
    async with (
        markers.publisher(keep_last=1) as publisher,
        markers.subscriber(lease_s=LEASE_S) as reader,
    ):
        await publisher.publish(0, weights(0))
        (folder,) = markers.hidden.glob("consumers/*")
        async with reader.pin() as pin:
            shutil.rmtree(folder)
            with pytest.raises(LeaseLost):
                await pin.check()
        async with reader.pin() as pin:
            await pin.check()
        (other,) = markers.hidden.glob("consumers/*")
        assert other != folder


async def test_a_pin_is_given_up_when_the_disk_has_room_again(markers: House) -> None:
    """On a full disk a pin cannot be taken back at once; it is as soon as that is possible."""

    class Full(LocalFolder):
        async def put(self, name: str, data: bytes) -> None:
            if full:
                raise OSError(errno.ENOSPC, "No space left on device", name)
            await super().put(name, data)

    class Filling(LocalDisk):
        async def folder(self, path: str) -> LocalFolder:
            folder = await super().folder(path)
            return Full(folder._descriptor)

    full = False
    reader = markers.subscriber(lease_s=LEASE_S, at=markers.channel(disk=Filling()))
    async with markers.publisher(keep_last=1) as publisher, reader:
        await publisher.publish(0, weights(0))
        async with reader.pin() as pin:
            full = True
        await publisher.publish(1, weights(1))
        assert markers.folders() == [0, 1]
        assert not pin.lost
        full = False
        async with asyncio.timeout(HANG_S):
            while markers.folders() != [1]:
                await publisher.sweep()
        assert not pin.lost, "it was given up, not lost"


# ---- marker files: publishers ------------------------------------------------------


async def test_a_publisher_that_dies_behind_its_marker_has_published(markers: House) -> None:
    """The marker is the commit: the next publisher goes on behind it, with the same content."""
    async with markers.publisher(keep_last=1) as publisher:
        await publisher.publish(0, weights(0))
        faults.arm("weights.publish.marked:raise=Unavailable")
        try:
            with pytest.raises(Unavailable):
                await publisher.publish(1, weights(1))
        finally:
            faults.disarm()
    async with markers.publisher(keep_last=1) as publisher:
        assert await publisher.next_version() == 2
        assert isinstance(await publisher.publish(1, weights(1)), Version)
        assert b'"version":1' in (markers.hidden / "HEAD").read_bytes()
        assert markers.folders() == [1]


async def test_epochs_are_unique(markers: House) -> None:
    """However many take over at once, each has an epoch of its own and one of them the last."""
    await markers.channel().make()
    books = [markers.book() for _ in range(8)]
    await asyncio.gather(*(book.open_writer() for book in books))
    epochs = sorted(book.epoch for book in books)
    assert len(set(epochs)) == len(books)
    for book in books:
        if book.epoch == epochs[-1]:
            await book.check_writer()
        else:
            with pytest.raises(Fenced):
                await book.check_writer()


async def test_guards_need_a_ledger(tmp_path: Path) -> None:
    """A fence that cannot be kept is refused, not ignored."""
    with pytest.raises(Mistake, match="ledger"):
        Publisher(tmp_path, None, guards=[ledger.absent("/job")])
