"""The etcd ledger on one real server: what is particular to this back end.

What every back end promises, this one too, is in the conformance suite one folder up.
"""

import asyncio
import base64

import psutil
import pytest

from holdfast.errors import Mistake
from holdfast.ledger.base import Watch
from holdfast.ledger.etcd import EtcdLedger
from holdfast.ledger.types import Batch, Put
from holdfast.servers import EtcdServer
from ledger.conformance import take
from patience import auntil

pytestmark = pytest.mark.etcd


def connections(server: EtcdServer) -> int:
    """How many connections this process holds to a server."""
    held = psutil.Process().net_connections("tcp")
    there = [one for one in held if one.status == psutil.CONN_ESTABLISHED]
    return [one.raddr[1] for one in there].count(server.port)


async def test_foreign_keys_do_no_harm(ledger: EtcdLedger, etcd: EtcdServer) -> None:
    """Keys that are not text are passed over, by pages and by watches."""
    start = (await ledger.txn([], [Put("/f/a", b"")])).revision
    for n in range(5):
        raw = base64.b64encode(b"/f/m\xff%d" % n).decode()
        status, _ = etcd.ask("/v3/kv/txn", {"success": [{"request_put": {"key": raw}}]})
        assert status == 200
    await ledger.txn([], [Put("/f/z", b"")])
    pages = [page async for page in ledger.pages("/f/", limit=2)]
    assert [entry.key for page in pages for entry in page.entries] == ["/f/a", "/f/z"]
    async with ledger.watch("/f/", start=start) as watch:
        batches = await take(watch, 2)
    assert [batch.events[0].key for batch in batches] == ["/f/a", "/f/z"]


@pytest.mark.parametrize(("asked_s", "granted_s"), [(59.2, {60.0}), (0.1, {1.0, 2.0, 3.0})])
async def test_a_lease_lasts_whole_seconds(
    ledger: EtcdLedger, asked_s: float, granted_s: set[float]
) -> None:
    """Rounded up, and not less than the server's minimum; every answer says the same."""
    lease = await ledger.grant(asked_s)
    assert lease.ttl_s in granted_s
    assert await ledger.keep_alive(lease.id) == lease.ttl_s
    assert (await ledger.lease_info(lease.id)).ttl_s == lease.ttl_s
    await ledger.revoke(lease.id)


async def test_a_watch_delivers_transactions_whole(ledger: EtcdLedger) -> None:
    """Also when one is larger than a frame of the server, and larger than a read."""
    keys = [f"/w/{n:03}" for n in range(100)]
    values = (b"a" * 9000, b"b" * 9000)
    made = [await ledger.txn([], [Put(key, value) for key in keys]) for value in values]
    async with ledger.watch("/w/", start=made[0].revision) as watch:
        batches = await take(watch, 2)
    assert [one.revision for one in batches] == [one.revision for one in made]
    for batch, value, before in zip(batches, values, (None, values[0]), strict=True):
        assert [event.key for event in batch.events] == keys
        assert {event.entry and event.entry.value for event in batch.events} == {value}
        assert {event.previous and event.previous.value for event in batch.events} == {before}


async def everything(watch: Watch) -> list[Batch]:
    """What a watch shows until it is closed."""
    return [batch async for batch in watch]


async def test_closing_ends_watches_and_connections(etcd: EtcdServer) -> None:
    """Whoever waits is told or just ends; no task and no connection is left."""
    before = asyncio.all_tasks()
    async with EtcdLedger(etcd.endpoints) as ledger:
        watches = [ledger.watch("/quiet", start=1 << 40) for _ in range(3)]
        waits = [asyncio.create_task(everything(watch)) for watch in watches]
        await auntil(lambda: connections(etcd) >= 3)
        with pytest.raises(Mistake, match="already waits"):
            await take(watches[0])
        await watches[0].aclose()
        await watches[0].aclose()
        waits[1].cancel()
        await asyncio.wait(waits[:2])
        assert not waits[2].done()
    with pytest.raises(Mistake, match="closed"):
        await waits[2]
    assert waits[0].result() == []
    assert waits[1].cancelled()
    with pytest.raises(Mistake, match="closed"):
        await ledger.get("/a")
    await ledger.close()
    await auntil(lambda: not connections(etcd))
    assert asyncio.all_tasks() == before


@pytest.mark.long
async def test_a_range_of_large_values_is_read_in_pages_that_fit(ledger: EtcdLedger) -> None:
    """40 MB in values of 1 MB: each page stays within the time that a call may take."""
    for number in range(40):
        await ledger.txn([], [Put(f"/large/{number:03}", bytes(1_000_000))])
    sizes = [len(page.entries) async for page in ledger.pages("/large/")]
    assert sum(sizes) == 40
    assert max(sizes) <= 16
