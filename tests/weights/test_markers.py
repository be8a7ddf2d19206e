"""The weights protocol with a ledger and without: one set of promises, then what differs."""

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import safetensors.numpy
import torch

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
from holdfast.ledger import Ledger, LiveRuntime
from holdfast.proc import Child, spawn
from holdfast.timeouts import DEFAULTS
from holdfast.weights import Publisher, Retention, Subscriber, Swept, Version
from holdfast.weights.channel import Channel
from holdfast.weights.local import LocalDisk, LocalFolder
from holdfast.weights.marker_book import MarkerBook
from holdfast.weights.marker_seat import MarkerSeat
from holdfast.weights.markers import Markers
from holdfast.weights.records import Consumer
from holdfast.weights.sweep import Sweeper
from patience import HANG_S

LIMIT_S = HANG_S
LEASE_S = 1.0
LAST_ONE = Retention(keep_last=1)


class Hanging(LiveRuntime):
    """A process whose tasks do not come back from their next sleep once it hangs."""

    hangs = False

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds)
        if self.hangs:
            await asyncio.Event().wait()


class World:
    """One channel's folder, and the book that counts for it."""

    def __init__(self, root: Path, used: Ledger | None, url: str) -> None:
        self.root = root
        self.ledger = used
        self.url = url
        self.base = root / "policy"
        self.hidden = self.base / ".holdfast"

    def publisher(self, retention: Retention = LAST_ONE, name: str = "trainer") -> Publisher:
        return Publisher(self.root, self.ledger, retention=retention, name=name)

    def subscriber(
        self,
        name: str = "r0",
        *,
        needs: Literal["every", "latest"] = "latest",
        lease_s: float = 10.0,
        runtime: LiveRuntime | None = None,
    ) -> Subscriber:
        at = None
        if runtime is not None:
            markers = self.ledger is None
            at = Channel(self.root, None, "policy", runtime=runtime, markers=markers)
        return Subscriber(
            self.root, self.ledger, consumer=name, needs=needs, lease_s=lease_s, at=at
        )

    def hanging(self) -> Hanging:
        return Hanging(self.ledger)  # type: ignore[arg-type]  # markers have no ledger

    def channel(self) -> Channel:
        return Channel(self.root, self.ledger, "policy")

    def book(self, *, sweep_foreign: bool = False) -> MarkerBook:
        channel = self.channel()
        return MarkerBook(
            channel.runtime,
            channel.disk,
            channel.layout,
            "other",
            sweep_foreign=sweep_foreign,
        )

    def folders(self) -> list[int]:
        return sorted(int(path.name.removeprefix("step_")) for path in self.base.glob("step_*"))


@pytest.fixture(params=["sqlite", "memory", "markers"])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    if request.param == "markers":
        yield World(tmp_path, None, "")
        return
    url = f"sqlite:///{tmp_path}/ledger.db" if request.param == "sqlite" else "memory:"
    async with ledger.open(url) as used:
        yield World(tmp_path, used, url)


@pytest.fixture
def markers(tmp_path: Path) -> World:
    return World(tmp_path, None, "")


def weights(value: float) -> dict[str, object]:
    return {"a": torch.full((3, 4), value), "b": np.arange(5, dtype=np.int64)}


async def until(true: Callable[[], Awaitable[bool]]) -> None:
    """Wait for something that others bring about."""
    async with asyncio.timeout(LIMIT_S):
        while not await true():
            await asyncio.sleep(0.02)


async def swept(publisher: Publisher, world: World, *gone: int) -> None:
    """Sweep until these versions are deleted."""

    async def are_gone() -> bool:
        await publisher.sweep()
        return not set(gone) & set(world.folders())

    await until(are_gone)


# ---- the same promises on every book -----------------------------------------


async def test_what_is_published_is_loaded_acknowledged_and_swept(world: World) -> None:
    """A version is loaded bit for bit; what the policy does not keep and nobody needs goes."""
    async with world.publisher(Retention(keep_last=2)) as publisher, world.subscriber() as reader:
        with pytest.raises(NotFound):
            async with reader.pin():
                pass
        for step in range(5):
            published = await publisher.publish(step, weights(step), files={"config.json": b"{}"})
            async with reader.pin() as pin:
                assert pin.number == step
                assert pin.verified
                assert isinstance(published, Version)
                assert pin.version.content == published.content
                assert pin.version.manifest == published.manifest
                assert torch.equal(pin.torch("a"), torch.full((3, 4), float(step)))
                assert pin.carried("config.json") == b"{}"
                await reader.acknowledge(step)
            assert world.folders() == [n for n in (step - 1, step) if n >= 0]
        with pytest.raises(Gone):
            async with reader.pin(1):
                pass
        with pytest.raises(NotFound):
            async with reader.pin(9):
                pass


@pytest.mark.parametrize("keep", [1, 3])
async def test_the_policy_keeps_the_last(world: World, keep: int) -> None:
    """Exactly the last k versions stay when nobody needs more."""
    async with world.publisher(Retention(keep_last=keep)) as publisher:
        for step in range(6):
            await publisher.publish(step, weights(step))
        assert world.folders() == list(range(6 - keep, 6))


async def test_a_pinned_version_survives_sweeps(world: World) -> None:
    """However many versions come and sweeps run, what is pinned stays; then it goes."""
    async with world.publisher() as publisher, world.subscriber() as reader:
        await publisher.publish(0, weights(0))
        async with reader.pin(0) as pin:
            for step in range(1, 4):
                await publisher.publish(step, weights(step))
            report = await publisher.sweep()
            assert report.deleted == ()
            assert world.folders() == [0, 3]
            await pin.check()
            staged = await pin.stage()
            assert safetensors.numpy.load_file(f"{staged}/model.safetensors")["a"][0, 0] == 0
        await publisher.sweep()
        assert world.folders() == [3]


async def test_what_is_served_survives_sweeps(world: World) -> None:
    """The acknowledged version of a live consumer stays until it acknowledges another."""
    async with world.publisher() as publisher, world.subscriber() as reader:
        await publisher.publish(0, weights(0))
        async with reader.pin() as pin:
            await reader.acknowledge(pin.number)
        for step in (1, 2):
            await publisher.publish(step, weights(step))
        assert world.folders() == [0, 2]
        async with reader.pin() as pin:
            await reader.acknowledge(pin.number)
        await publisher.sweep()
        assert world.folders() == [2]


async def test_a_dead_consumer_holds_nothing_after_its_lease(world: World) -> None:
    """A consumer that hangs keeps its pin for its lease, and not for longer."""
    runtime = world.hanging()
    hung = world.subscriber(lease_s=LEASE_S, runtime=runtime, needs="every")
    async with world.publisher() as publisher, hung as reader:
        await publisher.publish(0, weights(0))
        async with reader.pin() as pin:
            await publisher.publish(1, weights(1))
            assert world.folders() == [0, 1]
            runtime.hangs = True
            await swept(publisher, world, 0)
            assert not await pin._seat.holds(0)
            with pytest.raises(LeaseLost):
                await pin.check()
            # What is open stays right.
            assert torch.equal(pin.torch("a"), torch.zeros(3, 4))
            runtime.hangs = False


async def test_publishing_again_is_nothing_or_a_mistake(world: World) -> None:
    """A number stands for one content for ever, also after its files are gone."""
    async with world.publisher() as publisher:
        first = await publisher.publish(0, weights(0))
        again = await publisher.publish(0, weights(0))
        assert isinstance(again, Version)
        assert again.content == first.content
        with pytest.raises(Mistake, match="other contents"):
            await publisher.publish(0, weights(1))
        await publisher.publish(1, weights(1))
        assert world.folders() == [1]
        late = await publisher.publish(0, weights(0))
        assert isinstance(late, Swept)
        with pytest.raises(Mistake, match="other contents"):
            await publisher.publish(0, weights(7))
        assert world.folders() == [1]


async def test_numbers_are_never_used_again(world: World) -> None:
    """A new publisher goes on behind all that ever was, even if every folder is gone."""
    async with world.publisher() as publisher:
        for step in range(4):
            await publisher.publish(step, weights(step))
    async with world.publisher() as publisher:
        assert publisher.epoch == 2
        assert await publisher.next_version() == 4
        with pytest.raises(Mistake, match="other contents"):
            await publisher.publish(2, weights(9))
    shutil.rmtree(world.base / "step_3")
    async with world.publisher() as publisher:
        assert await publisher.next_version() == 4
        await publisher.publish(6, weights(6))
        with pytest.raises(Mistake, match="numbers only grow"):
            await publisher.publish(5, weights(5))


async def test_whoever_needs_every_version_holds_all_from_its_floor(world: World) -> None:
    """From the newest version at its joining on, nothing goes before it has acknowledged it."""
    async with world.publisher() as publisher:
        for step in range(3):
            await publisher.publish(step, weights(step))
        async with world.subscriber(needs="every") as reader:
            for step in range(3, 7):
                await publisher.publish(step, weights(step))
            assert world.folders() == [2, 3, 4, 5, 6]
            async with reader.pin(4) as pin:
                await reader.acknowledge(pin.number)
            await publisher.sweep()
            assert world.folders() == [4, 5, 6]
        await publisher.sweep()
        assert world.folders() == [6]


async def test_a_newer_version_wakes_whoever_waits(world: World) -> None:
    """Waiting ends with the version that was waited for."""
    async with world.publisher() as publisher, world.subscriber() as reader:
        newer = asyncio.create_task(reader.wait_newer(None, LIMIT_S))
        exactly = asyncio.create_task(reader.wait_for(1, LIMIT_S))
        await publisher.publish(0, weights(0))
        assert (await newer).version == 0
        await publisher.publish(1, weights(1))
        assert (await exactly).version == 1
        with pytest.raises(Gone, match="was deleted"):
            await reader.wait_for(0, LIMIT_S)


async def test_a_marked_version_is_not_loaded(world: World) -> None:
    """What was found damaged is neither the newest nor to be had by its number."""
    async with world.publisher(Retention(keep_last=5)) as publisher, world.subscriber() as reader:
        for step in range(2):
            await publisher.publish(step, weights(step))
        await world.channel().book("someone").mark(1, "a shard is rotten")
        async with reader.pin() as pin:
            assert pin.number == 0
        with pytest.raises(Corrupt, match="rotten"):
            async with reader.pin(1):
                pass


async def test_a_replaced_publisher_is_told(world: World) -> None:
    """Whoever opens a channel fences off whoever had it."""
    async with world.publisher(name="old") as old:
        await old.publish(0, weights(0))
        async with world.publisher(name="new") as new:
            with pytest.raises(Fenced, match="new, epoch 2"):
                await old.publish(1, weights(1))
            await new.publish(2, weights(2))


async def test_two_lives_of_one_name_do_not_disturb_each_other(world: World) -> None:
    """A consumer that was started twice has two lives; one may leave, the other goes on."""
    async with world.publisher() as publisher, world.subscriber() as first:
        await publisher.publish(0, weights(0))
        async with first.pin() as pin:
            async with world.subscriber() as second, second.pin():
                pass
            await publisher.publish(1, weights(1))
            await pin.check()
            assert world.folders() == [0, 1]


async def test_room_is_made_when_a_consumer_lets_go(world: World) -> None:
    """A publisher that waits for room is woken when a pin is given up."""
    policy = Retention(keep_last=1, max_bytes=32_000, wait_s=LIMIT_S)
    async with world.publisher(policy) as publisher, world.subscriber() as reader:
        await publisher.publish(0, {"a": torch.zeros(3000)})
        async with reader.pin():
            await publisher.publish(1, {"a": torch.ones(3000)})
            third = publisher.publish(2, {"a": torch.full((3000,), 2.0)})
            waiting = asyncio.create_task(third)
            done, _ = await asyncio.wait([waiting], timeout=0.3)
            assert not done
        async with asyncio.timeout(LIMIT_S):
            await waiting
        assert world.folders() == [2]


# ---- real processes ----------------------------------------------------------

CONSUMER = """
import asyncio, contextlib, sys
from holdfast import ledger
from holdfast.errors import LeaseLost
from holdfast.weights import Subscriber

async def main(root, url, lease_s):
    async with contextlib.AsyncExitStack() as stack:
        used = await stack.enter_async_context(ledger.open(url)) if url else None
        reader = Subscriber(root, used, consumer="child", needs="latest", lease_s=float(lease_s))
        await stack.enter_async_context(reader)
        async with reader.pin() as pin:
            await reader.acknowledge(pin.number)
            print("pinned", pin.number, flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            try:
                await pin.check()
                print("still held", flush=True)
            except LeaseLost:
                print("lost", float(pin.numpy("a")[0, 0]), flush=True)
        async with reader.pin() as pin:
            print("pinned", pin.number, float(pin.numpy("a")[0, 0]), flush=True)
            await asyncio.to_thread(sys.stdin.readline)

asyncio.run(main(*sys.argv[1:]))
"""


@contextlib.contextmanager
def consumer(world: World) -> Iterator[Child]:
    argv = [sys.executable, "-c", CONSUMER, str(world.root), world.url, str(LEASE_S)]
    with spawn(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        yield child


async def line(child: Child) -> str:
    """The child's next line."""
    assert child.process.stdout is not None
    async with asyncio.timeout(LIMIT_S):
        return (await asyncio.to_thread(child.process.stdout.readline)).decode().strip()


def tell(child: Child) -> None:
    assert child.process.stdin is not None
    child.process.stdin.write(b"\n")
    child.process.stdin.flush()


@pytest.fixture(params=["sqlite", "markers"])
async def shared(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    """Books that several processes can use."""
    if request.param == "markers":
        yield World(tmp_path, None, "")
        return
    url = f"sqlite:///{tmp_path}/ledger.db"
    async with ledger.open(url) as used:
        yield World(tmp_path, used, url)


async def test_a_killed_consumer_holds_nothing_after_its_lease(shared: World) -> None:
    """SIGKILL while it pins: the version is kept for the lease, then goes, and so do its marks."""
    async with shared.publisher() as publisher:
        await publisher.publish(0, weights(0))
        with consumer(shared) as child:
            assert await line(child) == "pinned 0"
            await publisher.publish(1, weights(1))
            assert shared.folders() == [0, 1]
            child.kill_group()
            await swept(publisher, shared, 0)
        await publisher.publish(2, weights(2))
        if not shared.url:
            assert list((shared.hidden / "consumers").iterdir()) == []


async def test_a_stopped_consumer_that_wakes_up_has_lost_its_pin_and_pins_again(
    shared: World,
) -> None:
    """SIGSTOP for longer than the lease: open tensors stay right, the pin is lost; it goes on."""
    async with shared.publisher() as publisher:
        await publisher.publish(0, weights(0))
        with consumer(shared) as child:
            assert await line(child) == "pinned 0"
            child.signal(signal.SIGSTOP)
            await publisher.publish(1, weights(1))
            await swept(publisher, shared, 0)
            tell(child)
            child.signal(signal.SIGCONT)
            assert await line(child) == "lost 0.0"
            assert await line(child) == "pinned 1 1.0"
            await publisher.publish(2, weights(2))
            assert shared.folders() == [1, 2]
            tell(child)
            assert child.wait(LIMIT_S) == 0
        await publisher.sweep()
        assert shared.folders() == [2]


# ---- marker files: trainers and consumers that are not ours ---------------------


def foreign(world: World, step: int, *, stable: bool = True, index: bool = True) -> Path:
    """A version as prime-rl writes it: shards by the real library, index, STABLE."""
    folder = world.base / f"step_{step}"
    folder.mkdir(parents=True)
    names = [f"model-{one:05d}-of-00002.safetensors" for one in (1, 2)]
    for at, name in enumerate(names):
        tensors = {f"layers.{at}.weight": np.full((4, 2), step, dtype=np.float32)}
        safetensors.numpy.save_file(tensors, folder / name, metadata={"format": "pt"})
    if index:
        listed = ", ".join(f'"layers.{at}.weight": "{name}"' for at, name in enumerate(names))
        text = f'{{"metadata": {{"total_size": 64}}, "weight_map": {{{listed}}}}}'
        (folder / "model.safetensors.index.json").write_text(text)
    (folder / "config.json").write_text("{}")
    if stable:
        (folder / "STABLE").touch()
    return folder


async def test_versions_of_a_foreign_trainer_are_loaded(markers: World) -> None:
    """Folders with STABLE and no manifest are versions; they are checked, but not verified."""
    foreign(markers, 3)
    foreign(markers, 4)
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


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda folder: os.truncate(folder / "model-00002-of-00002.safetensors", 90), "damaged"),
        (lambda folder: (folder / "model-00002-of-00002.safetensors").unlink(), "is not in"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{"), "not an index"),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text(
                '{"weight_map": {"layers.0.weight": "model-00001-of-00002.safetensors"}}'
            ),
            "is not in it",
        ),
        (
            lambda folder: [
                (folder / "model.safetensors.index.json").unlink(),
                (folder / "model-00001-of-00002.safetensors").unlink(),
            ],
            "model-00001-of-00002.safetensors is missing",
        ),
        (
            lambda folder: safetensors.numpy.save_file(
                {"layers.0.weight": np.zeros(1)}, folder / "extra.safetensors"
            ),
            "both hold layers.0.weight",
        ),
        (lambda folder: [path.unlink() for path in folder.glob("model*")], "no safetensors file"),
        (
            lambda folder: (folder / "linked.safetensors").symlink_to("/dev/zero"),
            "not an ordinary file",
        ),
    ],
)
async def test_a_foreign_version_that_is_not_whole_is_not_loaded(
    markers: World, harm: Callable[[Path], object], message: str
) -> None:
    """What can be seen without a manifest is seen, and names the file."""
    folder = foreign(markers, 1)
    harm(folder)
    (folder / "STABLE").touch()
    async with markers.subscriber() as reader:
        with pytest.raises(Corrupt, match=message):
            async with reader.pin():
                pass


async def test_a_folder_without_its_marker_is_not_a_version(markers: World) -> None:
    """A foreign folder is seen from the moment of its STABLE, and not before."""
    foreign(markers, 1)
    half = foreign(markers, 2, stable=False)
    (markers.base / "step_7.tmp").mkdir()
    (markers.base / "step_08").mkdir()
    async with markers.subscriber() as reader:
        newest = await reader.latest()
        assert newest is not None
        assert newest.version == 1
        with pytest.raises(NotFound):
            async with reader.pin(2):
                pass
        newer = asyncio.create_task(reader.wait_newer(1, LIMIT_S))
        done, _ = await asyncio.wait([newer], timeout=0.7)
        assert not done
        (half / "STABLE").touch()
        assert (await newer).version == 2
        async with reader.pin() as pin:
            assert pin.number == 2


async def test_a_foreign_version_that_its_trainer_deletes_is_gone_and_the_newest_is_taken(
    markers: World,
) -> None:
    """Deleted by its own trainer between pin and open: `Gone`; without a number, the next one."""
    foreign(markers, 1)

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
    at = Channel(markers.root, None, "policy", disk=disk)
    async with Subscriber("", None, consumer="r0", needs="latest", at=at) as reader:
        disk.victim, disk.opened = "/step_1", 0
        with pytest.raises(Gone, match="deleted while it was opened"):
            async with reader.pin(1):
                pass
        foreign(markers, 2)
        foreign(markers, 3)
        disk.victim, disk.opened = "/step_3", -1  # and once to find out that it is the newest
        async with reader.pin() as pin:
            assert pin.number == 2


async def test_files_that_are_written_over_under_a_pin_are_told(markers: World) -> None:
    """A trainer that writes over a shard in place: `check` and `load_into` say so."""
    folder = foreign(markers, 1)
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


async def test_versions_of_others_are_swept_only_if_asked_for(markers: World) -> None:
    """Holdfast deletes what it did not write only for whoever says so, and never under a pin."""
    for step in range(4):
        foreign(markers, step)
    async with markers.publisher():
        assert markers.folders() == [0, 1, 2, 3]
    sweeper = Sweeper(markers.channel(), markers.book(sweep_foreign=True), LAST_ONE)
    async with markers.subscriber() as reader, reader.pin(1):
        assert (await sweeper.sweep()).deleted == (0, 2)
        assert markers.folders() == [1, 3]


@pytest.mark.parametrize("place", [".holdfast/consumers/orchestrator/LOADED_STEP", "LOADED_STEP"])
async def test_a_foreign_consumer_is_respected(world: World, place: str) -> None:
    """Whoever only writes LOADED_STEP keeps that version and all newer ones, while it is fresh."""
    path = world.base / place
    async with world.publisher() as publisher:
        await publisher.publish(0, weights(0))
        path.parent.mkdir(exist_ok=True)
        path.write_text("0\n")
        for step in (1, 2):
            await publisher.publish(step, weights(step))
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
    markers: World,
) -> None:
    """What was published verified is never loaded unverified."""
    async with markers.publisher() as publisher, markers.subscriber() as reader:
        await publisher.publish(0, weights(0))
        manifest = markers.base / "step_0" / "holdfast.json"
        text = manifest.read_bytes()
        for harm in (b"", text[:-20], text.replace(b'"step": 0', b'"step": 1')):
            manifest.unlink(missing_ok=True)
            if harm:
                manifest.write_bytes(harm)
            with pytest.raises(Corrupt):
                async with reader.pin(0):
                    pass
            assert await reader.latest() is None
            with pytest.raises(Mistake, match="other contents"):
                await publisher.publish(0, weights(3))


# ---- marker files: races, played step by step ------------------------------------


class Played(MarkerBook):
    """A sweep that lets something happen between its steps."""

    def __init__(self, world: World, act: Callable[[str], Awaitable[None]]) -> None:
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


async def test_a_pin_before_a_version_is_given_up_wins(markers: World) -> None:
    """Pinned after the sweep has looked once, before it has written `swept`: it stays.

    Nobody else can pin it then, and it goes with the pin.
    """
    async with markers.publisher(Retention(keep_last=2)) as publisher:
        await publisher.publish(0, weights(0))
        await publisher.publish(1, weights(1))
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
            with pytest.raises(Gone):
                async with other.pin(0):
                    pass
            await publisher.publish(2, weights(2))
            assert markers.folders() == [0, 1, 2]
            await stack.aclose()
            await publisher.sweep()
            assert markers.folders() == [1, 2]


@pytest.mark.parametrize("moment", ["before look 2", "after look 2"])
async def test_a_pin_after_a_version_was_given_up_loses(markers: World, moment: str) -> None:
    """Pinned once `swept` is written, wherever the sweep is then: `Gone`, and it is deleted."""
    async with markers.publisher(Retention(keep_last=2)) as publisher:
        await publisher.publish(0, weights(0))
        await publisher.publish(1, weights(1))
        async with markers.subscriber() as reader:
            played = []

            async def pin(now: str) -> None:
                if now == moment:
                    with pytest.raises(Gone):
                        async with reader.pin(0):
                            pass
                    played.append(now)

            book = Played(markers, pin)
            assert await book.forget(await book.view(), 0)
            assert played == [moment]


async def test_a_version_given_up_while_it_is_being_pinned_is_gone(markers: World) -> None:
    """Given up between the consumer's look and its pin: it looks again, and leaves no pin."""
    async with markers.publisher(Retention(keep_last=2)) as publisher:
        await publisher.publish(0, weights(0))
        await publisher.publish(1, weights(1))
        sweeper = markers.book()

        class Slow(Markers):
            looks = 0

            async def mark(self, one: int) -> str:
                self.looks += 1
                if self.looks == 1:  # the consumer has seen that all is well
                    assert await sweeper.forget(await sweeper.view(), one)
                return await super().mark(one)

        channel = markers.channel()
        record = Consumer(name="r0", needs="latest", floor=0)
        slow = Slow(channel.disk, channel.layout)
        seat = MarkerSeat(channel.runtime, slow, record, 10.0)
        await seat.join()
        try:
            with pytest.raises(Gone):
                await seat.pin(0)
            assert slow.looks == 1
            (member,) = (await sweeper.view()).members
            assert member.record.pins == ()
            assert (await seat.pin(1)).version == 1
        finally:
            await seat.leave()


async def test_a_heartbeat_keeps_a_pin_beyond_its_lease(markers: World) -> None:
    """Whoever lives holds its pin for as long as it wants."""
    async with markers.publisher() as publisher, markers.subscriber(lease_s=LEASE_S) as reader:
        await publisher.publish(0, weights(0))
        async with reader.pin() as pin:
            await publisher.publish(1, weights(1))
            book = markers.book()
            (member,) = (await book.view()).members

            async def lease_is_over() -> bool:
                return (await book.view()).now_s > member.until_s

            await until(lease_is_over)
            await publisher.sweep()
            assert markers.folders() == [0, 1]
            await pin.check()


async def test_whoever_joins_while_versions_come_has_a_floor_that_holds(markers: World) -> None:
    """The floor is never below what a sweep may have given up while it was being written."""
    async with markers.publisher() as publisher:
        await publisher.publish(0, weights(0))

        class Slow(Markers):
            looks = 0

            async def head(self) -> int | None:
                seen = await super().head()
                self.looks += 1
                if self.looks == 1:  # between looking and writing the floor
                    await publisher.publish(1, weights(1))
                    await publisher.publish(2, weights(2))
                return seen

        channel = markers.channel()
        record = Consumer(name="r0", needs="every", floor=0)
        slow = Slow(channel.disk, channel.layout)
        seat = MarkerSeat(channel.runtime, slow, record, 10.0)
        await seat.join()
        try:
            (member,) = (await markers.book().view()).members
            assert member.record.floor == 2
            await publisher.publish(3, weights(3))
            assert markers.folders() == [2, 3]
        finally:
            await seat.leave()


async def test_a_heartbeat_that_comes_too_late_does_not_revive(markers: World) -> None:
    """Whoever was taken for dead learns of it at its next touch, also if it touches first."""
    channel = markers.channel()
    await channel.make()
    runtime = markers.hanging()
    layout = channel.layout
    seat = MarkerSeat(
        runtime,
        Markers(channel.disk, layout),
        Consumer(name="r0", needs="latest", floor=0),
        0.5,
    )
    foreign(markers, 0)
    await seat.join()
    try:
        await seat.pin(0)
        assert await seat.holds(0)
        runtime.hangs = True
        book = markers.book()

        async def dead() -> bool:
            view = await book.view()
            return all(member.until_s <= view.now_s for member in view.members)

        await until(dead)
        with pytest.raises(LeaseLost):
            await seat._beat()  # what its heartbeat task does when it wakes up
        assert seat.lost.is_set()
        assert not await seat.holds(0)
    finally:
        await seat.leave()


async def test_a_consumer_whose_folder_is_removed_takes_another_seat(markers: World) -> None:
    """Removing a life's folder ends that life, and only that one."""
    async with markers.publisher() as publisher, markers.subscriber(lease_s=LEASE_S) as reader:
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


async def test_a_pin_is_given_up_when_the_disk_has_room_again(markers: World) -> None:
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
    at = Channel(markers.root, None, "policy", disk=Filling())
    reader = Subscriber("", None, consumer="r0", needs="latest", lease_s=LEASE_S, at=at)
    async with markers.publisher() as publisher, reader:
        await publisher.publish(0, weights(0))
        async with reader.pin() as pin:
            full = True
        await publisher.publish(1, weights(1))
        assert markers.folders() == [0, 1]
        assert not pin.lost
        full = False
        await swept(publisher, markers, 0)
        assert not pin.lost, "it was given up, not lost"


# ---- marker files: publishers ------------------------------------------------------


async def test_a_publisher_that_dies_behind_its_marker_has_published(markers: World) -> None:
    """The marker is the commit: the next publisher goes on behind it, with the same content."""
    async with markers.publisher() as publisher:
        await publisher.publish(0, weights(0))
        faults.arm("weights.publish.marked:raise=Unavailable")
        try:
            with pytest.raises(Unavailable):
                await publisher.publish(1, weights(1))
        finally:
            faults.disarm()
    async with markers.publisher() as publisher:
        assert await publisher.next_version() == 2
        assert isinstance(await publisher.publish(1, weights(1)), Version)
        assert b'"version":1' in (markers.hidden / "HEAD").read_bytes()
        assert markers.folders() == [1]


async def test_epochs_are_unique(markers: World) -> None:
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
