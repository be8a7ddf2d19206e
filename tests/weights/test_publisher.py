"""Publishing by real processes that are killed, stopped, replaced and failed by their disk.

Invariants: whoever reads (a subscriber, or a program that knows only `step_N` and `STABLE`)
sees whole versions or none; a number that was committed never means anything else; the next
publisher cleans up and goes on; a publisher that was replaced changes nothing any more.
"""

import asyncio
import contextlib
import errno
import os
import random
import signal
from pathlib import Path

import pytest

from holdfast.errors import Mistake, Unavailable
from holdfast.weights import Publisher, Version
from kids import Kid, points
from weights.children import publish
from weights.family import House, go, house, refused

PUBLISH = points("weights.publish.")
COMMITTED = "weights.publish.committed"


def _seed() -> random.Random:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    return random.Random(seed)


# ---- killed ------------------------------------------------------------------------


async def _goes_on(home: House, next_one: Publisher, again: int, committed: bool) -> None:
    """Publish 7 again, after its first publisher (flavour 0) died; then 8."""
    assert home.leftovers() == []
    earlier = home.folders() != [7] * committed
    assert await next_one.next_version() == (8 if committed else 7 if earlier else 0)
    assert (7 in home.folders()) == committed
    if committed:
        first = home.bytes_of(7)
        assert (await publish(next_one, 7, 0)).version == 7
        with pytest.raises(Mistake, match="other contents"):
            await publish(next_one, 7, 1)
        assert home.bytes_of(7) == first
    else:
        await publish(next_one, 7, again, "ranks")
        with pytest.raises(Mistake, match="other contents"):
            await publish(next_one, 7, 1 - again)
    assert await home.read(7) == (7, 0 if committed else again)
    await publish(next_one, 8)
    with pytest.raises(Mistake):
        await publish(next_one, 7, 2)


@pytest.mark.parametrize("point", PUBLISH)
@pytest.mark.parametrize(
    ("earlier", "again"),
    [
        pytest.param(False, 0, id="first-same"),
        pytest.param(True, 1, id="later-other"),
        pytest.param(False, 1, id="first-other", marks=pytest.mark.long),
        pytest.param(True, 0, id="later-same", marks=pytest.mark.long),
    ],
)
async def test_killed_publisher(home: House, point: str, earlier: bool, again: int) -> None:
    """kill -9 at every point: no reader sees half a version, and the next publisher goes on.

    The number is published again with the same contents, or with others if it was never
    committed; a committed one keeps its contents for ever. Nothing is left lying around.
    """
    luck = _seed()
    hit = luck.choice((1, 2)) if point == "weights.publish.shard" else 1
    if earlier:
        async with home.publisher() as first:
            await publish(first, 5, 0, "ranks")
            await publish(first, 6, 0, "ranks")
    with (
        home.start("readers") as readers,
        home.start("publisher", fault=f"{point}:kill@{hit}", versions=[(7, 0)]) as victim,
    ):
        await go(victim)
        await readers.ahear("ready")
        assert await victim.killed() == point
        committed = point == COMMITTED
        assert await home.committed() == [5, 6] * earlier + [7] * committed
        async with home.publisher() as next_one:
            await _goes_on(home, next_one, again, committed)
            readers.tell(8)
            report = await readers.ahear("report")
            await next_one.sweep()
        assert report["problems"] == []
        assert report["reads"] > 0
        assert await home.committed() == home.folders() == [7, 8]
        assert await home.read_all() == [(7, 0 if committed else again), (8, 0)]
        assert home.leftovers() == []


@pytest.mark.long
async def test_killed_again_and_again(home: House) -> None:
    """Publishers that die one after the other, each at another point, leave one clean channel."""
    luck = _seed()
    order = luck.sample(PUBLISH, len(PUBLISH))[:5]
    print(f"order {order}")
    for point in order:
        versions = [(number, 0) for number in range(20)]
        kill = f"{point}:kill"
        with home.start("publisher", fault=kill, versions=versions, way="whole") as victim:
            await go(victim)
            assert await victim.killed() == point
    async with home.publisher() as last:
        assert home.leftovers() == []
        assert home.folders() == await home.committed()
        number = await last.next_version()
        assert number == order.count(COMMITTED)
        await publish(last, number, 1)
        assert await home.read() == (number, 1)


# ---- stopped, and replaced meanwhile -----------------------------------------------


async def _outcome(kid: Kid) -> str:
    found: str = (await kid.ahear("outcome"))["error"]
    return found


@pytest.mark.parametrize("point", PUBLISH)
async def test_stopped_and_replaced(home: House, point: str) -> None:
    """A publisher that sleeps while another takes over wakes up fenced, and does no harm.

    The number it was publishing is published by the successor with other contents. Those
    stay as they are, byte for byte. The old one is told `Fenced`, now and ever after.
    """
    async with home.publisher() as first:
        await publish(first, 6, 0, "ranks")
    versions = [(7, 0), (8, 0), (9, 0)]
    with home.start("publisher", fault=f"{point}:stop", versions=versions) as old:
        await go(old)
        assert await asyncio.to_thread(old.stopped) == point
        async with home.publisher() as new:
            flavour = 1
            if point == COMMITTED:  # then it is too late for other contents
                flavour = 0
                with pytest.raises(Mistake, match="other contents"):
                    await publish(new, 7, 1)
            else:
                await publish(new, 7, 1, "ranks")
            right = home.bytes_of(7)
            old.child.signal(signal.SIGCONT)
            assert await _outcome(old) == ("" if point == COMMITTED else "Fenced")
            assert [await _outcome(old), await _outcome(old)] == ["Fenced", "Fenced"]
            await old.ahear("done")
            assert home.bytes_of(7) == right
            await publish(new, 8, 1)  # the old one has not taken anything back
            assert await home.read_all() == [(7, flavour), (8, 1)]
            await new.sweep()
        assert home.folders() == [7, 8]
        assert home.leftovers() == []


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("point", PUBLISH)
async def test_both_stopped(tmp_path: Path, point: str) -> None:
    """The successor too sleeps, at every point, while the old publisher wakes up and goes on."""
    for second in PUBLISH:
        folder = tmp_path / second
        folder.mkdir()
        async with house(folder) as home:
            with home.start("publisher", fault=f"{point}:stop", versions=[(7, 0)]) as old:
                await go(old)
                await asyncio.to_thread(old.stopped)
                known = point == COMMITTED
                versions = [(8, 1)] if known else [(7, 1)]
                with home.start("publisher", fault=f"{second}:stop", versions=versions) as new:
                    await go(new)
                    await asyncio.to_thread(new.stopped)
                    old.child.signal(signal.SIGCONT)
                    assert await _outcome(old) == ("" if known else "Fenced"), second
                    new.child.signal(signal.SIGCONT)
                    assert await _outcome(new) == "", second
            assert await home.read() == (8 if known else 7, 1)
            async with home.publisher():
                assert home.leftovers() == []
                assert home.folders() == await home.committed()


async def test_an_emptied_folder_is_no_obstacle(home: House) -> None:
    """What is left when somebody dies while clearing a folder away is cleared away too."""
    async with home.publisher() as first:
        await publish(first, 6)
        for number in (5, 7, 8):
            (home.base / f"step_{number}").mkdir()
        await publish(first, 7)
    async with home.publisher():
        assert home.folders() == [6, 7]
    assert await home.read_all() == [(6, 0), (7, 0)]


async def test_somebody_elses_folder_is_not_touched(home: House) -> None:
    """A folder that holds other people's files is left alone, and publishing says so."""
    async with home.publisher() as publisher:
        (home.base / "step_3").mkdir()
        (home.base / "step_3" / "model.safetensors").write_bytes(b"precious")
        with pytest.raises(Mistake, match="in the way"):
            await publish(publisher, 3)
        assert home.bytes_of(3) == {"model.safetensors": b"precious"}
        assert home.leftovers() == []
        await publish(publisher, 4)
        assert home.bytes_of(3) == {"model.safetensors": b"precious"}


async def test_begun_and_never_finished(home: House) -> None:
    """A draft that was given up goes when its number can no longer be published."""
    async with home.publisher() as publisher:
        ticket = await publisher.begin(1)
        other = await publisher.begin(1)
        later = await publisher.begin(3)
        await publisher.sweep()
        assert len(home.leftovers()) == 3
        await publish(publisher, 1, 0, "ranks")
        assert home.leftovers() == [f".holdfast/drafts/{Path(later.path).name}"]
        for late in (ticket, other):
            with pytest.raises(Mistake, match="begin it again"):
                await publisher.finish(late, 3)
        await publish(publisher, 3)
        assert home.leftovers() == []


# ---- a disk that fails ---------------------------------------------------------------


class FailingSync:
    """fsync of the real disk, which fails once: as the `fails_at`-th that is asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fails_at = self.asked = 0
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self)

    def __call__(self, descriptor: int) -> None:
        self.asked += 1
        if self.asked == self.fails_at:
            raise OSError(errno.EIO, "Input/output error")
        self._fsync(descriptor)

    def arm(self, fails_at: int) -> None:
        """Let this one fail, counted from now on."""
        self.fails_at, self.asked = fails_at, 0


@pytest.mark.parametrize(("way", "files"), [("whole", 4), ("ranks", 6)])
async def test_failing_fsync(
    home: House, monkeypatch: pytest.MonkeyPatch, way: str, files: int
) -> None:
    """EIO from any fsync of a publish: a clean error, nothing is seen, and a later try works.

    They are those of its new files, of its draft, of the channel and of its folder. Each try has
    other contents, which could not be published if anything of an earlier one had been recorded.
    That they come in the right order the simulation holds, which takes the power away
    (`NoDraftSync`, `NoParentSync` and `MarkerFirst` are its broken variants).
    """
    sync = FailingSync(monkeypatch)
    async with home.publisher(keep_last=1) as publisher:
        await publish(publisher, 0, 0, way)
        for number in range(1, files + 4):
            sync.arm(number)
            with pytest.raises(Unavailable, match=f"{number} was not published: Input/output"):
                await publish(publisher, number, 1, way)
            assert await home.read_all() == [(number - 1, 0)]
            assert home.leftovers() == []
            await publish(publisher, number, 0, way)


async def test_a_channel_whose_folder_cannot_be_synced_is_not_opened(
    home: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EIO while a publisher opens a channel is told, and the next one opens it."""
    FailingSync(monkeypatch).arm(1)
    await refused(home.publisher(), Unavailable, "Input/output error")
    async with home.publisher() as publisher:
        await publish(publisher, 1)
    assert await home.read_all() == [(1, 0)]


async def test_trouble_after_the_commit_is_no_failure(home: House) -> None:
    """Once a version exists, a sweep that fails does not make `publish` say otherwise."""
    fault = "weights.sweep.decided:raise=OSError(EIO)@1"
    versions = [(1, 0), (2, 0), (3, 0)]
    with home.start(
        "publisher", fault=fault, versions=versions, way="whole", keep_last=1
    ) as child:
        await go(child)
        outcomes = [await child.ahear("outcome") for _ in range(3)]
        assert [one["error"] for one in outcomes] == ["", "", ""], outcomes
        assert child.fired() == "weights.sweep.decided"
    assert await home.committed() == home.folders() == [3]


async def test_a_damaged_leftover_does_not_keep_us_from_opening(home: House) -> None:
    """A folder beyond the newest version whose manifest cannot be read is not ours to judge."""
    async with home.publisher() as first:
        await publish(first, 1)
    (home.base / "step_2").mkdir()
    (home.base / "step_2" / "holdfast.json").write_bytes(b"{}")
    async with home.publisher() as second:
        with contextlib.suppress(Mistake):
            await publish(second, 2)
        assert isinstance(await publish(second, 3), Version)
    assert await home.read() == (3, 0)
