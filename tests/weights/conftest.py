"""The channels of these tests: kept with each kind of ledger, and without one."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from weights.family import House, house


@pytest.fixture(params=["sqlite", "memory:", "markers"])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[House]:
    """A channel with every kind of book."""
    async with house(tmp_path, request.param) as home:
        yield home


@pytest.fixture(params=["sqlite", "markers"])
async def shared(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[House]:
    """Channels that several processes can use."""
    async with house(tmp_path, request.param) as home:
        yield home


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[House]:
    """A channel with a ledger beside it."""
    async with house(tmp_path) as found:
        yield found


@pytest.fixture
async def markers(tmp_path: Path) -> AsyncIterator[House]:
    """A channel without a ledger."""
    async with house(tmp_path, "markers") as home:
        yield home
