"""Accounts: keys are shown once, hashed at rest, rotated without a restart."""

import asyncio
import time

import pytest

from holdfast.errors import Denied, Mistake, NotFound
from holdfast.jobs.accounts import Accounts, Guests
from holdfast.ledger import Ledger, LiveRuntime
from patience import HANG_S


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def accounts(opened: Ledger, clock: Clock) -> Accounts:
    return Accounts(LiveRuntime(opened), "r", clock)


@pytest.fixture
def guests(opened: Ledger, clock: Clock) -> Guests:
    return Guests(LiveRuntime(opened), "r", clock)


async def test_a_new_key_works_at_once_and_a_revoked_one_no_more(
    accounts: Accounts, guests: Guests
) -> None:
    """Making: at once, also where nothing was heard of it yet. Revoking: when it is heard."""
    following = asyncio.create_task(guests.run())
    first, kept = await accounts.add_key("a")
    assert await guests.who(first) == "a"
    second, _ = await accounts.add_key("a")
    other, _ = await accounts.add_key("b")
    await accounts.revoke("a", kept.id)
    async with asyncio.timeout(HANG_S):
        while True:
            try:
                await guests.who(first)
            except Denied:
                break
            await asyncio.sleep(0.01)
    assert (await guests.who(second), await guests.who(other)) == ("a", "b")
    following.cancel()


async def test_the_key_itself_is_nowhere(accounts: Accounts, opened: Ledger) -> None:
    key, kept = await accounts.add_key("a")
    secret = key.rpartition("-")[2]
    for entry in (await opened.range("/")).entries:
        assert secret.encode() not in entry.value
    assert secret not in repr(kept)


async def test_wrong_keys(accounts: Accounts, guests: Guests) -> None:
    """A wrong secret, an unknown id, something else: denied, and never who it belongs to."""
    key, _ = await accounts.add_key("a")
    flipped = key[:-1] + ("x" if key[-1] != "x" else "y")
    for wrong in (flipped, "tml-" + "a" * 12 + "-" + "b" * 32, "", "tml-", "eyJhb", key + "x"):
        with pytest.raises(Denied) as caught:
            await guests.who(wrong)
        assert "tml-" + "a" not in str(caught.value)
    assert await guests.who(key) == "a"


async def test_keys_expire(accounts: Accounts, guests: Guests, clock: Clock) -> None:
    key, _ = await accounts.add_key("a", lives_s=60.0)
    assert await guests.who(key) == "a"
    clock.now += 60
    with pytest.raises(Denied):
        await guests.who(key)


async def test_bounds(accounts: Accounts) -> None:
    for _ in range(32):
        await accounts.add_key("a")
    with pytest.raises(Mistake, match="revoke one"):
        await accounts.add_key("a")
    with pytest.raises(Mistake):
        await accounts.add_key("../b")
    with pytest.raises(NotFound):
        await accounts.revoke("a", "nothing")
    with pytest.raises(NotFound):
        await accounts.revoke("nobody", "nothing")


async def test_asking_with_unknown_keys_does_not_ask_the_ledger_each_time(
    accounts: Accounts, guests: Guests, opened: Ledger
) -> None:
    await accounts.add_key("a")
    reads = 0
    page = type(opened)._page

    async def counted(self: Ledger, *args: object) -> object:
        nonlocal reads
        reads += 1
        return await page(self, *args)  # type: ignore[arg-type]

    type(opened)._page = counted  # type: ignore[method-assign, assignment]
    try:
        began = time.monotonic()
        strangers = (guests.who(f"tml-{number:012}-" + "b" * 32) for number in range(200))
        told = await asyncio.gather(*strangers, return_exceptions=True)
        assert all(isinstance(one, Denied) for one in told)
        assert 1 <= reads <= 2 + (time.monotonic() - began)
    finally:
        type(opened)._page = page  # type: ignore[method-assign]
