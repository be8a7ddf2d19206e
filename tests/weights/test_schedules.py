"""Schedules that a simulation finds too rarely, played step by step."""

from pathlib import Path

import pytest

from holdfast.errors import Fenced, Unavailable, UnknownOutcome
from holdfast.ledger import Entry, Txn
from holdfast.ledger.memory import MemoryLedger
from holdfast.weights import Publisher, Retention, Subscriber
from holdfast.weights.channel import Channel
from holdfast.weights.disk import Folder
from holdfast.weights.local import LocalDisk
from holdfast.weights.manifest import MARKER, STABLE
from holdfast.weights.sweep import clear
from holdfast.weights.writing import Ticket
from patience import auntil
from weights.family import fill, read, weights
from weights.ledgers import Lossy, Played, Send


class Interrupted(Played):
    """Something happens between a consumer's look at the head and its joining."""

    publisher: Publisher | None = None
    interruptions = 0

    async def play(self, keys: list[str], send: Send) -> Txn:
        publisher = self.publisher
        if publisher is not None and any("/consumers/" in key for key in keys):
            self.publisher = None
            self.interruptions += 1
            await fill(publisher, 1, 2, 3)
        return await send()


async def test_a_consumer_joins_at_the_head_of_that_moment(tmp_path: Path) -> None:
    """Its floor is the head when it enters the book: what lies below may be gone already."""
    async with (
        Interrupted() as ledger,
        Publisher(tmp_path, ledger, retention=Retention(keep_last=1)) as publisher,
    ):
        await publisher.publish(0, weights(0))
        ledger.publisher = publisher
        async with Subscriber(tmp_path, ledger) as subscriber:
            assert ledger.interruptions == 1
            view = await publisher._book.view()
            (member,) = view.members
            assert member.record.floor == 3
            assert sorted(view.versions) == [3]
            async with subscriber.pin() as pin:
                assert pin.number == 3


class Watching(LocalDisk):
    """Remembers what was removed where it lay."""

    def __init__(self) -> None:
        super().__init__()
        self.removed: list[str] = []

    async def remove(self, path: str) -> None:
        self.removed.append(path)
        await super().remove(path)


async def test_a_draft_is_renamed_before_it_is_emptied(tmp_path: Path) -> None:
    """A replaced publisher that wakes up must not give a half-emptied draft its name."""
    async with MemoryLedger() as ledger:
        async with Publisher(tmp_path, ledger) as dead:
            ticket = await dead.begin(0)
        assert Path(ticket.path).is_dir()
        disk = Watching()
        channel = Channel(tmp_path, ledger, "policy", disk=disk)
        async with Publisher("", None, at=channel):
            assert not Path(ticket.path).exists()
        assert disk.removed
        assert all("/.holdfast/trash/" in path for path in disk.removed)


async def test_a_folder_that_is_being_emptied_cannot_be_marked(tmp_path: Path) -> None:
    """A replaced publisher wakes up just before the marker, while its folder is cleared."""

    class Late(Publisher):
        async def _show(self, folder: Folder, ticket: Ticket) -> None:
            await self._place(ticket)
            assert await clear(self._disk, self._layout.version(ticket.step), ticket.epoch)
            await folder.rename(MARKER, STABLE)

    async with MemoryLedger() as ledger, Late(tmp_path, ledger) as publisher:
        with pytest.raises(Unavailable):
            await publisher.publish(0, weights(0))
        assert list((tmp_path / "policy" / "step_0").iterdir()) == []
        view = await publisher._book.view()
        assert view.versions == {}


class Repeating(Played):
    """Delivers a consumer's writes again, long after they were answered."""

    def __init__(self) -> None:
        super().__init__()
        self.again: list[Send] = []

    async def play(self, keys: list[str], send: Send) -> Txn:
        if any("/consumers/" in key for key in keys):
            self.again.append(send)
        return await send()


async def test_a_call_that_arrives_twice_does_not_undo_a_newer_one(tmp_path: Path) -> None:
    """A consumer's old writes, delivered again, never take a pin away."""
    async with Repeating() as ledger, Publisher(tmp_path, ledger) as publisher:
        await publisher.publish(0, weights(0))
        async with Subscriber(tmp_path, ledger) as subscriber:
            async with subscriber.pin(0):
                pass
            async with subscriber.pin(0) as pin:
                assert len(ledger.again) == 4  # joined, pinned, unpinned, pinned
                for again in ledger.again:
                    assert not (await again()).succeeded
                await pin.check()


async def test_a_version_is_staged_for_a_fleet_before_a_sweep_takes_it(tmp_path: Path) -> None:
    """Entering the target touches the record, so a sweep that looked before loses."""
    from holdfast.weights import Fleet

    async with MemoryLedger() as ledger, Publisher(tmp_path, ledger) as publisher:
        await fill(publisher, 0, 1, 2)
        view = await publisher._book.view()
        assert sorted(view.versions) == [1, 2]
        async with Fleet(ledger) as fleet:
            await fleet._begin(1, rollback=False)
            assert not await publisher._book.forget(view, 1)
            assert isinstance(await ledger.get(publisher._channel.keys.version(1)), Entry)


# ---- a commit whose outcome nobody knows: it is found out, or it never happens ----------


async def _in_doubt(ledger: Lossy, publisher: Publisher) -> None:
    await publisher.publish(0, weights(0))
    ledger.lose = "/versions/"
    with pytest.raises(UnknownOutcome, match="publish it again"):
        await publisher.publish(1, weights(1))
    ledger.away = False


@pytest.mark.parametrize("contents", [1, 2], ids=["same", "other"])
async def test_a_commit_that_arrives_late_changes_nothing(tmp_path: Path, contents: int) -> None:
    """After doubt the number is published under a new epoch, so the lost commit is fenced off."""
    async with Lossy() as ledger, Publisher(tmp_path, ledger) as publisher:
        await _in_doubt(ledger, publisher)
        before = publisher.epoch
        await publisher.publish(1, weights(contents))
        assert publisher.epoch > before
        (late,) = ledger.late
        assert not (await late()).succeeded
        assert await read(tmp_path, ledger, 1) == contents


async def test_a_commit_that_took_effect_is_found(tmp_path: Path) -> None:
    """If it arrived before we look, it is the version; other contents are a mistake then."""
    async with Lossy() as ledger, Publisher(tmp_path, ledger) as publisher:
        await _in_doubt(ledger, publisher)
        assert (await ledger.late[0]()).succeeded
        done = await publisher.publish(1, weights(1))
        assert done.version == 1
        assert await read(tmp_path, ledger, 1) == 1


async def test_doubt_takes_nothing_back(tmp_path: Path) -> None:
    """Who was replaced while in doubt stops; it does not fence off its successor."""
    async with Lossy() as ledger, Publisher(tmp_path, ledger) as first:
        await _in_doubt(ledger, first)
        async with Publisher(tmp_path, ledger, name="second") as second:
            with pytest.raises(Fenced, match="second"):
                await first.publish(1, weights(1))
            await second.publish(1, weights(2))
            assert not (await ledger.late[0]()).succeeded
        assert await read(tmp_path, ledger, 1) == 2


async def test_what_is_acknowledged_under_a_new_seat_is_kept(tmp_path: Path) -> None:
    """A sweep that looked before the acknowledgement loses, also without a pin of this life."""
    async with (
        MemoryLedger() as ledger,
        Publisher(tmp_path, ledger) as publisher,
        Subscriber(tmp_path, ledger, needs="latest") as subscriber,
    ):
        await publisher.publish(0, weights(0))
        async with subscriber.pin(0):
            first = subscriber.seat_id
            await ledger.revoke(int(first.rpartition("-")[2]))
            await auntil(lambda: subscriber.seat_id != first)
            await publisher.publish(1, weights(1))
            view = await publisher._book.view()
            await subscriber.acknowledge(0)
            assert not await publisher._book.forget(view, 0)
            # A further life brings the acknowledgement along, and keeps the version too.
            view = await publisher._book.view()
            second = subscriber.seat_id
            await ledger.revoke(int(second.rpartition("-")[2]))
            await auntil(lambda: subscriber.seat_id != second)
            assert not await publisher._book.forget(view, 0)
