"""A ledger, and the jobs in it."""

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from holdfast import ledger
from holdfast.jobs.store import Jobs
from holdfast.ledger import Ledger, LiveRuntime


@pytest.fixture
async def opened(tmp_path: Path) -> AsyncIterator[Ledger]:
    async with ledger.open(f"sqlite:///{tmp_path}/ledger.db") as it:
        yield it


@pytest.fixture
def jobs(opened: Ledger) -> Jobs:
    return Jobs(LiveRuntime(opened), "r", time.time)
