"""A gateway that plays a part, with a trainer behind it that counts; and a client of both."""

from collections.abc import AsyncIterator

import pytest

from holdfast import ledger as ledgers
from holdfast.client import Client
from holdfast.events import Event
from jobs.counting_trainer import Counting

from .dumb import QUICK, Dumb, admit, incarnation


@pytest.fixture
async def dumb() -> AsyncIterator[Dumb]:
    """All of it in this process."""
    async with ledgers.open("memory:") as ledger:
        await admit(ledger)
        trainer = Counting(ledger, incarnation())
        async with Dumb(trainer.answer, trainer=trainer, ledger=ledger).serve() as gateway:
            yield gateway


@pytest.fixture
async def client(dumb: Dumb) -> AsyncIterator[Client]:
    """A native client, not warmed up."""
    async with Client(dumb.target(policy=QUICK)) as made:
        yield made


@pytest.fixture
def seen() -> list[Event]:
    """Where a test has its events put."""
    return []
