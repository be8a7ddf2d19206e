"""The disk of the ledger is full: the trainer waits for room, and so does its successor."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import events
from holdfast import ledger as ledgers
from holdfast.errors import Fenced, NoRoom
from holdfast.trainer.core import Core
from holdfast.trainer.journal import Waiting
from trainer.disks import full, small
from trainer.living import Living, begin_model, living, step

DISK_BYTES = 4 << 20


@pytest.fixture
def waits(tmp_path: Path) -> Iterator[list[Waiting]]:
    """What trainers of this process have waited for."""
    found: list[Waiting] = []

    def see(event: events.Event) -> None:
        if isinstance(event, Waiting):
            found.append(event)

    events.configure(tmp_path / "events", "trainer", sinks=[see])
    yield found
    events.unconfigure()


async def _until_it_waits(core: Core, model: str, waits: list[Waiting]) -> "asyncio.Task[float]":
    """Take steps until there is no room for the result of one; that one."""
    number = 0
    while True:
        number += 1
        task = asyncio.create_task(step(core, model, number))
        while not task.done():
            if waits:
                return task
            await asyncio.wait([task], timeout=0.05)


@contextlib.asynccontextmanager
async def small_ledger(folder: Path, **policy: Any) -> AsyncIterator[tuple[Path, Living, str]]:
    """A trainer whose ledger is on a small disk: the disk, the trainer, and a model."""
    with small(folder / "disk", DISK_BYTES) as disk:
        url = f"sqlite:///{disk}/ledger.db"
        async with ledgers.open(url) as ledger, living(ledger, **policy) as there:
            yield disk, there, await begin_model(there.core)


@pytest.mark.timeout(60)
async def test_a_trainer_waits_for_room_in_its_ledger(
    tmp_path: Path, waits: list[Waiting]
) -> None:
    """Nothing fails, nothing is lost, and a successor that begins meanwhile waits as well."""
    async with small_ledger(tmp_path) as (disk, there, model):
        with full(disk):
            stuck = await _until_it_waits(there.core, model, waits)
            assert "no room" in waits[0].reason
            successor = living(there.core.runtime.ledger, epoch=2)
            begun = asyncio.create_task(successor.__aenter__())
            seen = len(waits)
            while len(waits) < seen + 3:
                await asyncio.sleep(0.05)
            assert there.core.journal.failure is None
            assert not begun.done()
        # What the first one still had to record is recorded, or it finds that it was replaced.
        with contextlib.suppress(Fenced):
            assert await stuck
        later = await begun
        try:
            assert model in later.core.lines
        finally:
            await successor.__aexit__(None, None, None)


@pytest.mark.timeout(60)
async def test_patience_has_an_end(tmp_path: Path, waits: list[Waiting]) -> None:
    """After `room_s` the trainer ends, and says what is full."""
    async with small_ledger(tmp_path, room_s=0.1) as (disk, there, model):
        with full(disk):
            stuck = await _until_it_waits(there.core, model, waits)
            for ends in (there.core.journal.failed(), stuck):
                with pytest.raises(NoRoom, match="no room"):
                    await ends
