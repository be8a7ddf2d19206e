"""Schedules that once broke a promise: each test is one of them, and says which promise."""

import asyncio
import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.errors import Corrupt, Fenced, Mistake, Unavailable, UnknownOutcome
from holdfast.ledger import Compare, Delete, LiveRuntime, Op, Put, Txn, absent
from holdfast.ledger.memory import MemoryLedger
from holdfast.ledger.records import decode
from holdfast.weights import Publisher, Retention, Subscriber, Version, write_part
from holdfast.weights.book import View
from holdfast.weights.channel import Channel
from holdfast.weights.ledger_book import LedgerBook
from holdfast.weights.local import LocalDisk
from holdfast.weights.manifest import MAX_MANIFEST_BYTES
from holdfast.weights.marker_book import MarkerBook
from holdfast.weights.records import Consumer, Keys
from holdfast.weights.sweep import Sweeper
from patience import HANG_S, auntil
from weights.family import House, fill, foreign, read, refused, weights
from weights.ledgers import Lossy, Played, Send

LAST_ONE = Retention(keep_last=1)


# ---- a number is published once -------------------------------------------------------


class Unswept(Publisher):
    """A publisher whose sweeps behind a commit fail."""

    async def _tidy(self, step: int) -> None:
        """As if the ledger, or the disk, were away."""


@pytest.mark.parametrize("newer", [0, 1], ids=["the same number", "a newer number"])
async def test_a_ticket_of_what_was_published_since_harms_nothing(
    world: House, newer: int
) -> None:
    """A version begun twice is published once, also when nobody swept the second draft."""
    async with Unswept(world.root, world.ledger) as publisher:
        late = await publisher.begin(5)
        await write_part(LocalDisk(), late, 0, weights(1))
        await publisher.publish(5 + newer, weights(2))
        async with asyncio.timeout(HANG_S):
            with pytest.raises(Mistake, match="begin"):
                await publisher.finish(late, 1)
        assert await read(world.root, world.ledger, 5 + newer) == 2
        assert world.folders() == [5 + newer]


# ---- what is acknowledged is kept -----------------------------------------------------


class OneWay(MemoryLedger):
    """A ledger that is reached, but whose answers to one consumer do not come back in time."""

    def __init__(self) -> None:
        super().__init__()
        self.mute = False
        self.joining = asyncio.Event()
        self.told = asyncio.Event()

    async def keep_alive(self, lease: int) -> float:
        answer = await super().keep_alive(lease)
        if self.mute:
            raise UnknownOutcome("the answer was lost")
        return answer

    async def _txn(
        self, compare: Sequence[Compare], then: Sequence[Op], otherwise: Sequence[Op]
    ) -> Txn:
        answer = None
        if self.mute and any("/consumers/" in op.key for op in then):
            if any(absent(one.key) == one and "/consumers/" in one.key for one in compare):
                self.joining.set()
                await self.told.wait()
            else:
                answer = await super()._txn(compare, then, otherwise)
                await self.joining.wait()
        return answer or await super()._txn(compare, then, otherwise)


async def test_what_was_acknowledged_while_a_new_seat_was_taken_is_kept(tmp_path: Path) -> None:
    """An acknowledgement that comes through on the old seat is known on the new one too."""
    async with (
        asyncio.timeout(HANG_S),
        OneWay() as ledger,
        Publisher(tmp_path, ledger, retention=LAST_ONE) as publisher,
        Subscriber(tmp_path, ledger, consumer="r", needs="latest", lease_s=1.0) as subscriber,
    ):
        await publisher.publish(0, weights(0))
        async with subscriber.pin() as pin:
            ledger.mute = True
            first = subscriber.seat_id
            acknowledging = asyncio.create_task(subscriber.acknowledge(pin.number))
            await ledger.joining.wait()
            for _ in range(100):
                await asyncio.sleep(0)
            ledger.told.set()
            await acknowledging
            ledger.mute = False
            await auntil(lambda: subscriber.seat_id != first)
        await fill(publisher, 1, 2)
        found = (await ledger.range(publisher._channel.keys.consumers)).entries
        assert [decode(Consumer, entry).acknowledged for entry in found] == [0]
        assert (tmp_path / "policy/step_0").exists()


# ---- doubt ----------------------------------------------------------------------------


async def test_a_publisher_is_not_fenced_by_itself(tmp_path: Path) -> None:
    """Doubt about taking over again, after doubt about a commit: nobody else was there."""
    async with Lossy("answer") as ledger, Publisher(tmp_path, ledger) as publisher:
        ledger.lose = "/head"
        with pytest.raises(UnknownOutcome):
            await publisher.publish(0, weights(0))
        ledger.away, ledger.lose = False, "/writer"
        with pytest.raises((Unavailable, UnknownOutcome)):
            await publisher.publish(0, weights(0))
        ledger.away = False
        found = await publisher.publish(0, weights(0))
        assert isinstance(found, Version)
        await publisher.publish(1, weights(1))


class Expired(Played):
    """Takes a commit whose answer is lost; then the publisher's guard goes before it looks."""

    armed = False
    late: Send | None = None

    async def play(self, keys: list[str], send: Send) -> Txn:
        if any(key.endswith("/head") for key in keys):
            if self.armed:
                self.armed, self.late = False, send
                raise UnknownOutcome("no answer")
            if self.late:
                assert (await self.late()).succeeded
                self.late = None
                await self.txn((), [Put("/guard", b"2")], ())
        return await send()


async def test_what_was_committed_keeps_its_marker(tmp_path: Path) -> None:
    """A guard that ends right after a commit does not take the commit back."""
    async with Expired() as ledger:
        await ledger.txn((), [Put("/guard", b"1")], ())
        guards = [Compare("/guard", "value", "==", b"1")]
        async with Publisher(tmp_path, ledger, guards=guards) as publisher:
            ledger.armed = True
            assert isinstance(await publisher.publish(0, weights(0)), Version)
        assert (tmp_path / "policy/step_0/STABLE").exists()


# ---- marker files ---------------------------------------------------------------------


class Overtaken(Publisher):
    """A publisher that is replaced between its marker and its last look."""

    async def _record(self, *args: Any) -> Version:
        await self.meanwhile()
        return await super()._record(*args)

    async def meanwhile(self) -> None:
        """What the others do."""


async def test_a_version_that_was_seen_is_not_taken_back(tmp_path: Path) -> None:
    """Without a ledger the marker is the commit: who has pinned it keeps it, and its number."""
    async with contextlib.AsyncExitStack() as stack:
        pins, others = [], []

        async def meanwhile() -> None:
            reader = Subscriber(tmp_path, None, consumer="reader", needs="latest")
            await stack.enter_async_context(reader)
            pins.append(await stack.enter_async_context(reader.pin()))
            others.append(await stack.enter_async_context(Publisher(tmp_path, None)))

        publisher = await stack.enter_async_context(Overtaken(tmp_path, None))
        publisher.meanwhile = meanwhile  # type: ignore[method-assign]
        with pytest.raises(Fenced):
            await publisher.publish(0, weights(0))
        await others[0].sweep()
        assert (tmp_path / "policy/step_0").exists(), "it was deleted under a live pin"
        with pytest.raises(Mistake, match="never used twice"):
            await others[0].publish(0, weights(7))
        assert int(pins[0].numpy("w")[0]) == 0
        assert await pins[0].stage()


@pytest.mark.parametrize("what", ["huge", "link", "pipe", "folder", "no marker"])
async def test_one_odd_folder_does_not_stop_a_channel(tmp_path: Path, what: str) -> None:
    """Whatever lies in one version's folder, the others are published and loaded."""
    async with Publisher(tmp_path, None) as publisher:
        await publisher.publish(1, weights(1))
        odd = tmp_path / "policy/step_0"
        odd.mkdir()
        (odd / "STABLE").touch()
        match what:
            case "huge":
                with (odd / "holdfast.json").open("wb") as file:
                    file.truncate(MAX_MANIFEST_BYTES + 1)
            case "link":
                (odd / "holdfast.json").symlink_to("/etc/hostname")
            case "pipe":
                os.mkfifo(odd / "holdfast.json")
            case "folder":
                (odd / "holdfast.json").mkdir()
            case "no marker":
                (odd / "STABLE").unlink()
                (odd / "STABLE").symlink_to("/nowhere")
        await publisher.publish(2, weights(2))
        async with Publisher(tmp_path, None) as second:
            await second.publish(3, weights(3))
        assert await read(tmp_path, None, 3) == 3


# ---- sweeping -------------------------------------------------------------------------


async def test_what_cannot_be_removed_does_not_stop_publishing(tmp_path: Path) -> None:
    """A leftover of another user is told of, counted, and tried again; publishing goes on."""
    root = tmp_path / "root"
    async with MemoryLedger() as ledger, Publisher(root, ledger, retention=LAST_ONE) as publisher:
        await publisher.publish(0, weights(0))
        deep = root / "policy/.holdfast/trash/1-poison"
        for _ in range(40):
            deep /= "x"
        deep.mkdir(parents=True)
        draft = root / "policy/.holdfast/drafts/e0-0-ab"
        draft.mkdir()
        await fill(publisher, 1, 2, 3)
        assert sorted(one.name for one in root.glob("policy/step_*")) == ["step_3"]
        assert not draft.exists()
        async with Publisher(root, ledger) as second:
            await second.publish(4, weights(4))


async def test_a_parent_that_is_damaged_is_no_obstacle(tmp_path: Path) -> None:
    """Files that cannot be shared are written."""
    async with MemoryLedger() as ledger, Publisher(tmp_path, ledger) as publisher:
        await publisher.publish(0, weights(0))
        (shard,) = (tmp_path / "policy/step_0").glob("*.safetensors")
        shard.unlink()
        shard.symlink_to("/nowhere")
        await publisher.publish(1, weights(0))
        assert await read(tmp_path, ledger, 1) == 0


@pytest.mark.long
async def test_the_parts_of_many_tensors_are_joined_quickly(tmp_path: Path) -> None:
    """The time grows with the number of tensors, not with its square."""
    count = 30_000
    async with MemoryLedger() as ledger, Publisher(tmp_path, ledger) as publisher:
        ticket = await publisher.begin(0)
        nothing = np.zeros(0)
        names = {
            f"model.layers.{n // 256}.experts.{n % 256}.weight": nothing for n in range(count)
        }
        await write_part(LocalDisk(), ticket, 0, names)
        async with asyncio.timeout(HANG_S):
            await publisher.finish(ticket, 1)


# ---- one folder, one book -------------------------------------------------------------


@pytest.mark.parametrize("other", ["an empty ledger", "another run", "marker files", "a ledger"])
async def test_a_publisher_with_the_wrong_book_touches_nothing(tmp_path: Path, other: str) -> None:
    """To a book that knows nothing everything belongs to nobody: it must not be swept by it.

    A consumer with the other kind of book is refused, too.
    """
    async with MemoryLedger() as right, MemoryLedger() as empty:
        first = None if other == "a ledger" else right
        second = {"another run": right, "marker files": None}.get(other, empty)
        run = "other" if other == "another run" else "default"
        async with (
            Publisher(tmp_path, first) as publisher,
            Subscriber(tmp_path, first, consumer="alive") as subscriber,
        ):
            await publisher.publish(0, weights(0))
            async with subscriber.pin() as pin:
                staged = Path(await pin.stage())
                for _ in range(2):
                    with pytest.raises(Mistake, match=r"book|knows nothing"):
                        await Publisher(tmp_path, second, run=run).open()
                if (first is None) != (second is None):  # its pins would hold nothing
                    await refused(Subscriber(tmp_path, second), Mistake, "one book")
                assert list(staged.iterdir())
            await publisher.publish(1, weights(1))
            assert await read(tmp_path, first, 0) == 0


# ---- damage ---------------------------------------------------------------------------


async def test_the_newest_that_is_not_damaged_is_never_swept(world: House) -> None:
    """When newer ones are marked, the newest without a mark is what there is to load."""
    async with world.publisher(keep_last=2) as publisher:
        await fill(publisher, *range(3))
        await publisher._book.mark(2, "a byte was changed by hand")
    async with world.publisher(keep_last=1) as publisher:
        await publisher.sweep()
        async with world.subscriber("late") as subscriber, subscriber.pin() as pin:
            assert pin.number == 1
            await refused(subscriber.pin(2), Corrupt, "by hand")
        await publisher.publish(3, weights(3))
    assert world.folders() == [3]


async def test_a_mark_and_a_sweep_at_once(tmp_path: Path) -> None:
    """A sweep that has decided before the newest version was marked gives nothing up."""
    async with (
        MemoryLedger() as ledger,
        Publisher(tmp_path, ledger, retention=Retention(keep_last=2)) as publisher,
    ):
        await fill(publisher, *range(2))
        book = publisher._book
        view = await book.view()
        await book.mark(1, "a byte was changed by hand")
        assert not await book.forget(view, 0)
        assert await read(tmp_path, ledger, 0) == 0


# ---- trainers that are not ours -------------------------------------------------------


class Rewritten(MarkerBook):
    """A book that is read just when the trainer writes its newest version once more."""

    root: Path
    number = 0

    async def view(self) -> View:
        marker = self.root / f"policy/step_{self.number}/STABLE"
        if not self.number or not marker.exists():
            return await super().view()
        marker.unlink()
        found = await super().view()
        foreign(self.root / "policy", self.number)
        self.number = 0
        return found


async def test_a_version_that_is_written_again_is_not_missed(tmp_path: Path) -> None:
    """Whoever looked while it was not there looks again, though its number is the same."""
    foreign(tmp_path / "policy", 5)
    subscriber = Subscriber(tmp_path, None)
    book = Rewritten(LiveRuntime(MemoryLedger()), LocalDisk(), subscriber.channel.layout, "reader")
    book.root = tmp_path
    subscriber._book = book
    async with subscriber:
        foreign(tmp_path / "policy", 6)
        book.number = 6
        assert (await subscriber.wait_newer(5, HANG_S)).version == 6
        assert not book.number


async def test_a_folder_that_another_trainer_has_just_made_stays(tmp_path: Path) -> None:
    """Nobody knows whose an empty folder is."""
    foreign(tmp_path / "policy", 1)
    channel = Channel(tmp_path, None, "policy")
    await channel.make()
    for number in (0, 2):
        (tmp_path / f"policy/step_{number}").mkdir()
    await Sweeper(channel, channel.book("anybody"), LAST_ONE).sweep()
    assert len(list(tmp_path.glob("policy/step_*"))) == 3


async def test_names_that_mean_nothing_are_no_numbers(tmp_path: Path) -> None:
    """Whatever lies in the trash, there is a next version."""
    async with MemoryLedger() as ledger, Publisher(tmp_path, ledger) as publisher:
        for name in ("5abc", "\N{SUPERSCRIPT TWO}-x", "7-ab"):
            (tmp_path / "policy/.holdfast/trash" / name).mkdir()
        assert await publisher.next_version() == 8


# ---- cancelled ------------------------------------------------------------------------


class Slow(Played):
    """Takes what a consumer writes, and answers when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.holding = False
        self.taken = asyncio.Event()

    async def play(self, keys: list[str], send: Send) -> Txn:
        answer = await send()
        if self.holding and any("/consumers/" in key for key in keys):
            self.holding = False
            self.taken.set()
            await asyncio.Event().wait()
        return answer


async def test_a_pin_that_was_cancelled_holds_nothing(tmp_path: Path) -> None:
    """Whoever gives up while it pins does not keep the version for as long as it lives."""
    async with (
        Slow() as ledger,
        Publisher(tmp_path, ledger, retention=LAST_ONE) as publisher,
        Subscriber(tmp_path, ledger, needs="latest") as subscriber,
    ):
        await publisher.publish(0, weights(0))
        ledger.holding = True
        pinning = asyncio.create_task(subscriber.pin().__aenter__())
        await ledger.taken.wait()
        pinning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pinning
        await publisher.publish(1, weights(1))
        assert sorted(one.name for one in tmp_path.glob("policy/step_*")) == ["step_1"]


async def test_an_unreadable_version_or_consumer_concerns_itself(tmp_path: Path) -> None:
    """Others publish, load and wait; an unreadable version is damaged, and goes as such.

    What an unreadable consumer needs is not known: while it is there nothing is deleted.
    """
    ledger = MemoryLedger()
    keys = Keys("default", "policy")
    book = LedgerBook(LiveRuntime(ledger), keys, "x")
    async with Publisher(tmp_path, ledger, retention=LAST_ONE) as publisher:
        await fill(publisher, 1, 2)
        await ledger.txn([], [Put(keys.consumer("odd", 7), b"?"), Put(keys.version(2), b"[")])
        async with Subscriber(tmp_path, ledger, consumer="other"):
            await fill(publisher, 3, 4)
            view = await book.view()
            assert set(view.versions) == {2, 3, 4}
            assert set(view.marks) == {2}
            assert await read(tmp_path, ledger, 3) == 3, "the unreadable consumer may need it"
        await ledger.txn([], [Delete(keys.consumer("odd", 7))])
        await publisher.publish(5, weights(5))
        assert set((await book.view()).versions) == {5}
