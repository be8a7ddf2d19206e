"""One ledger per test, on every back end, and ways to open it again.

The etcd server is shared by all tests, so each test keeps to a prefix of its own, takes
revisions as they come, and ends the leases it began.
"""

import contextlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from holdfast import ledger as ledgers
from holdfast.ledger import Lease, Ledger
from holdfast.ledger.sqlite import SqliteLedger

Opener = Callable[[], Awaitable[Ledger]]
Granter = Callable[[float], Awaitable[Lease]]

pytest.register_assert_rewrite("ledger.conformance")


@pytest.fixture(params=["memory", "sqlite", pytest.param("etcd", marks=pytest.mark.etcd)])
def ledger_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The same back end for everybody in one test."""
    if request.param == "memory":
        return f"memory:{uuid.uuid4().hex}"
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'ledger.db'}"
    url: str = request.getfixturevalue("etcd_url")
    return url


@pytest.fixture
async def open_ledger(ledger_url: str) -> AsyncIterator[Opener]:
    """Opens one more client of the same ledger."""
    async with contextlib.AsyncExitStack() as stack:

        async def opened() -> Ledger:
            return await stack.enter_async_context(ledgers.open(ledger_url))

        yield opened


@pytest.fixture
async def ledger(open_ledger: Opener) -> Ledger:
    return await open_ledger()


@pytest.fixture
async def led(tmp_path: Path) -> AsyncIterator[SqliteLedger]:
    """A ledger in `x.db`, for what need not be tried on every back end."""
    async with SqliteLedger(tmp_path / "x.db") as led:
        yield led


@pytest.fixture
def root() -> str:
    """A prefix that nobody else uses."""
    return f"/t/{uuid.uuid4().hex}/"


@pytest.fixture
async def grant(open_ledger: Opener) -> AsyncIterator[Granter]:
    """Grants leases that end with the test: one that ends later would disturb the next test."""
    ledger, begun = await open_ledger(), list[int]()

    async def granted(ttl_s: float) -> Lease:
        lease = await ledger.grant(ttl_s)
        begun.append(lease.id)
        return lease

    yield granted
    for lease in begun:
        await ledger.revoke(lease)
