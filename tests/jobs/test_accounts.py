"""Accounts: keys are shown once, hashed at rest, rotated without a restart."""

import asyncio
import contextlib
import itertools
import math
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import Denied, Mistake, NotFound, Retriable, Unavailable
from holdfast.jobs.accounts import Accounts, Guests
from holdfast.jobs.note import Note, find_service, leave_note
from holdfast.jobs.records import Host, Keys
from holdfast.ledger import Delete, Ledger, LiveRuntime
from holdfast.ledger.records import put
from patience import HANG_S, auntil
from through import Through


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
    await auntil(lambda: not guests.known(first), "its end is heard of")
    with pytest.raises(Denied):
        await guests.who(first)
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
    for lives_s in (math.inf, math.nan):
        with pytest.raises(Mistake):
            await accounts.add_key("b", lives_s)
    with pytest.raises(NotFound):
        await accounts.revoke("a", "nothing")
    with pytest.raises(NotFound):
        await accounts.revoke("nobody", "nothing")


async def test_asking_with_unknown_keys_does_not_ask_the_ledger_each_time(
    accounts: Accounts, opened: Ledger
) -> None:
    """However many strangers come: the ledger is asked once a second."""
    calls: list[str] = []

    async def count(name: str, _: object) -> None:
        calls.append(name)

    await accounts.add_key("a")
    counted: Any = Through(opened, before=count)
    guests = Guests(LiveRuntime(counted), "r", time.time)
    began = time.monotonic()
    strangers = (guests.who(f"tml-{number:012}-" + "b" * 32) for number in range(200))
    told = await asyncio.gather(*strangers, return_exceptions=True)
    assert all(isinstance(one, Denied) for one in told)
    assert 1 <= calls.count("range") <= 2 + (time.monotonic() - began)


async def test_with_commands_there_is_one_account(accounts: Accounts) -> None:
    """A job's own command reads the ledger and can make keys: for others, if there are any."""
    await accounts.add_key("a")
    await accounts.allow_commands("a")
    await accounts.add_key("a")
    with pytest.raises(Mistake, match="all-accounts-are-trusted"):
        await accounts.add_key("b")
    await accounts.allow_commands("")
    _, kept = await accounts.add_key("b")
    with pytest.raises(Mistake, match="all-accounts-are-trusted"):
        await accounts.allow_commands("a")
    await accounts.add_key("c", lives_s=60.0)
    await accounts.revoke("b", kept.id)
    with pytest.raises(Mistake, match="beside a: c"):
        await accounts.allow_commands("a")


async def test_commands_end_with_the_hosts_that_let_them(
    accounts: Accounts, opened: Ledger
) -> None:
    """A service that starts without them opens the run to other accounts, but not under a host."""
    host = Keys("r").host("other")
    await accounts.allow_commands("a")
    await opened.txn([], [put(host, Host(name="other", any_command=True))])
    await accounts.forbid_commands()
    with pytest.raises(Mistake, match="gets no key"):
        await accounts.add_key("b")
    await opened.txn([], [Delete(host)])
    await accounts.forbid_commands()
    await accounts.add_key("b")


@pytest.mark.parametrize("late", range(4))
@pytest.mark.parametrize("slow_one", ["key", "commands"])
async def test_a_second_account_and_commands_never_both_come(
    opened: Ledger, slow_one: str, late: int
) -> None:
    """However the steps of the two meet, in two processes: one of them is refused."""
    held, go, calls = asyncio.Event(), asyncio.Event(), itertools.count()

    async def hold(*_: object) -> None:
        if next(calls) == late:
            held.set()
            await go.wait()

    slow: Any = Through(opened, before=hold)
    book = Accounts(LiveRuntime(opened), "r", time.time)
    other = Accounts(LiveRuntime(slow), "r", time.time)
    await book.add_key("a")

    async def make_key(book: Accounts) -> None:
        with contextlib.suppress(Mistake):
            await book.add_key("b")

    async def allow(book: Accounts) -> None:
        with contextlib.suppress(Mistake):
            await book.allow_commands("a")

    first, second = (make_key, allow) if slow_one == "key" else (allow, make_key)
    begun = asyncio.create_task(first(other))
    async with asyncio.timeout(HANG_S):
        await asyncio.wait(
            [begun, asyncio.create_task(held.wait())], return_when="FIRST_COMPLETED"
        )
        await second(book)
        go.set()
        await begun
        held.set()
    allowed = await opened.get(Keys("r").commands) is not None
    accounts = {account.name for account in await book.all()}
    assert allowed != ("b" in accounts)


async def test_a_revoked_key_does_not_come_back(accounts: Accounts, opened: Ledger) -> None:
    """A reading that began before the revocation and ended after it is not believed."""
    key, kept = await accounts.add_key("bob")
    slow, begun, go_on = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def hold(name: str, _: object) -> None:
        if name == "range" and slow.is_set():
            begun.set()
            await go_on.wait()

    lagging: Any = Through(opened, after=hold)
    guests = Guests(LiveRuntime(lagging), "r", time.time)
    following = asyncio.create_task(guests.run())
    try:
        async with asyncio.timeout(HANG_S):
            await guests.ready.wait()
            assert await guests.who(key) == "bob"
            slow.set()
            stranger = asyncio.create_task(guests.who("tml-" + "a" * 12 + "-" + "b" * 32))
            await begun.wait()
            await accounts.revoke("bob", kept.id)
            await auntil(lambda: kept.id not in guests._by_id)
            go_on.set()
            with pytest.raises(Denied):
                await stranger
            with pytest.raises(Denied):
                await guests.who(key)
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def test_a_key_is_not_called_wrong_while_the_ledger_is_away(
    accounts: Accounts, opened: Ledger
) -> None:
    """A gateway that has not heard of a key, and cannot ask, says so: try again."""
    key, _ = await accounts.add_key("bob")

    async def fail(*_: object) -> None:
        raise Unavailable("away")

    away: Any = Through(opened, before=fail)
    with pytest.raises(Retriable):
        await Guests(LiveRuntime(away), "r", time.time).who(key)


async def test_a_default_job_is_not_taken_by_a_later_one(
    accounts: Accounts, opened: Ledger
) -> None:
    """Two gateways, one of which has not heard of the first job yet: the first one stays."""
    await accounts.add_key("bob")
    stale = Guests(LiveRuntime(opened), "r", time.time)
    await stale._look()
    await accounts.set_default("bob", "first")  # through another gateway
    if not await stale.default_job("bob"):  # what the gateway's `announce` does
        await accounts.set_default("bob", "second")
    assert [account.default_job for account in await accounts.all()] == ["first"]


def test_the_key_of_ones_own_service_is_for_that_service_only(tmp_path: Path) -> None:
    """A note is no reason to send its key elsewhere."""
    leave_note(tmp_path, Note(url="http://127.0.0.1:8700", account="local", key="tml-secret"))
    assert find_service(tmp_path, "http://127.0.0.1:8700/", None)[1] == "tml-secret"
    with pytest.raises(Mistake, match="is not sent to"):
        find_service(tmp_path, "http://elsewhere:80", None)
