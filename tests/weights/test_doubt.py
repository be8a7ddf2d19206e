"""A commit whose outcome nobody knows: it is found out, or it never happens."""

from pathlib import Path

import pytest

from holdfast.errors import Fenced, UnknownOutcome
from holdfast.ledger.memory import MemoryLedger
from holdfast.weights import Publisher, Subscriber
from weights.family import until, weights
from weights.ledgers import Lossy


async def _in_doubt(ledger: Lossy, publisher: Publisher) -> None:
    await publisher.publish(0, weights(0))
    ledger.lose = "/versions/"
    with pytest.raises(UnknownOutcome, match="publish it again"):
        await publisher.publish(1, weights(1))
    ledger.away = False


async def _read(root: Path, ledger: Lossy) -> tuple[int, int]:
    async with Subscriber(root, ledger) as subscriber, subscriber.pin() as pin:
        return pin.number, int(pin.numpy("w")[0])


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
        assert await _read(tmp_path, ledger) == (1, contents)


async def test_a_commit_that_took_effect_is_found(tmp_path: Path) -> None:
    """If it arrived before we look, it is the version; other contents are a mistake then."""
    async with Lossy() as ledger, Publisher(tmp_path, ledger) as publisher:
        await _in_doubt(ledger, publisher)
        assert (await ledger.late[0]()).succeeded
        done = await publisher.publish(1, weights(1))
        assert done.version == 1
        assert await _read(tmp_path, ledger) == (1, 1)


async def test_doubt_takes_nothing_back(tmp_path: Path) -> None:
    """Who was replaced while in doubt stops; it does not fence off its successor."""
    async with Lossy() as ledger, Publisher(tmp_path, ledger) as first:
        await _in_doubt(ledger, first)
        async with Publisher(tmp_path, ledger, name="second") as second:
            with pytest.raises(Fenced, match="second"):
                await first.publish(1, weights(1))
            await second.publish(1, weights(2))
            assert not (await ledger.late[0]()).succeeded
        assert await _read(tmp_path, ledger) == (1, 2)


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
            await until(lambda: subscriber.seat_id != first)
            await publisher.publish(1, weights(1))
            view = await publisher._book.view()
            await subscriber.acknowledge(0)
            assert not await publisher._book.forget(view, 0)
            # A further life brings the acknowledgement along, and keeps the version too.
            view = await publisher._book.view()
            second = subscriber.seat_id
            await ledger.revoke(int(second.rpartition("-")[2]))
            await until(lambda: subscriber.seat_id != second)
            assert not await publisher._book.forget(view, 0)
