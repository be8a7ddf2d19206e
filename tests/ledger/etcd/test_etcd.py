"""The etcd ledger on one real server: what is particular to this back end."""

import asyncio
import base64
from collections.abc import Callable

import psutil
import pytest

from holdfast.errors import Compacted, LeaseLost, Mistake, TooLarge
from holdfast.ledger.base import Watch
from holdfast.ledger.etcd import EtcdLedger
from holdfast.ledger.types import (
    Batch,
    Compare,
    Delete,
    Entry,
    Get,
    Put,
    absent,
    present,
    unchanged,
    value_is,
)
from holdfast.servers import EtcdServer
from patience import HANG_S

pytestmark = pytest.mark.etcd


async def take(watch: Watch, count: int, limit_s: float = HANG_S) -> list[Batch]:
    """The next batches of a watch, or a failure after `limit_s`."""
    async with asyncio.timeout(limit_s):
        return [await anext(watch) for _ in range(count)]


def connections(server: EtcdServer) -> int:
    """How many connections this process holds to a server."""
    held = psutil.Process().net_connections("tcp")
    there = [one for one in held if one.status == psutil.CONN_ESTABLISHED]
    return [one.raddr[1] for one in there].count(server.port)


async def until(condition: Callable[[], bool], limit_s: float = HANG_S) -> None:
    """Wait for something that this process can only see by looking."""
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.01)


# ---- reading and writing ------------------------------------------------------------


async def test_a_key_lives_changes_and_goes(ledger: EtcdLedger) -> None:
    """Revisions, versions and leases are etcd's own; a delete returns what it removed."""
    assert await ledger.get("/life") is None
    made = await ledger.txn([absent("/life")], [Put("/life", b"1"), Get("/life")])
    assert made.succeeded
    entry = made.results[1]
    assert entry is not None
    assert (entry.value, entry.version, entry.create_revision) == (b"1", 1, made.revision)
    assert entry.mod_revision == made.revision
    assert await ledger.get("/life") == entry

    again = await ledger.txn([absent("/life")], [Put("/life", b"2")], [Get("/life")])
    assert (again.succeeded, again.revision, again.results) == (False, made.revision, (entry,))

    changed = await ledger.txn([unchanged(entry)], [Put("/life", b"")])
    assert changed.revision == made.revision + 1
    gone = await ledger.txn([value_is("/life", b"")], [Delete("/life"), Delete("/other")])
    removed, nothing = gone.results
    assert removed is not None
    assert nothing is None
    assert (removed.value, removed.version) == (b"", 2)
    idle = await ledger.txn([], [Delete("/life")])
    assert (idle.revision, idle.results) == (gone.revision, (None,))


@pytest.mark.parametrize(
    ("compare", "holds"),
    [
        (Compare("/c/none", "value", "!=", b"x"), False),
        (Compare("/c/none", "mod", "<", 1), True),
        (Compare("/c/none", "lease", "==", 0), True),
        (Compare("/c/one", "version", ">", 0), True),
        (Compare("/c/one", "version", "<", 1 << 70), True),
        (Compare("/c/one", "value", "<", b"\xff"), True),
        (Compare("/c/one", "value", "==", b""), False),
        (present("/c/one"), True),
    ],
)
async def test_conditions(ledger: EtcdLedger, compare: Compare, holds: bool) -> None:
    """Each condition means on etcd what `types.holds` says it means."""
    await ledger.txn([], [Put("/c/one", b"1")])
    assert (await ledger.txn([compare])).succeeded is holds


async def test_the_largest_transaction_fits(ledger: EtcdLedger) -> None:
    """128 operations and nearly 1 MiB go through with etcd's default settings."""
    puts = [Put(f"/big/{n:03}", bytes(8000)) for n in range(128)]
    made = await ledger.txn([absent(put.key) for put in puts], puts, [Get(p.key) for p in puts])
    assert made.succeeded
    assert len((await ledger.range("/big/")).entries) == 128
    with pytest.raises(TooLarge):
        await ledger.txn([], [Put("/big/x", bytes(1 << 20))])


async def test_a_range_is_one_moment_over_many_pages(ledger: EtcdLedger) -> None:
    """Pages behind the first do not see what changed after it."""
    await ledger.txn([], [Put(f"/p/{n}", b"old") for n in range(7)])
    seen: list[Entry] = []
    async for page in ledger.pages("/p/", limit=2):
        seen += page.entries
        await ledger.txn([], [Put(f"/p/{n}", b"new") for n in range(9)])
    assert [entry.key for entry in seen] == [f"/p/{n}" for n in range(7)]
    assert {entry.value for entry in seen} == {b"old"}


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


# ---- leases ---------------------------------------------------------------------------


async def test_a_lease_and_its_keys(ledger: EtcdLedger) -> None:
    """A lease lasts whole seconds, binds keys, and takes them along when it ends."""
    lease = await ledger.grant(59.2)
    assert lease.ttl_s == 60
    await ledger.txn([], [Put("/l/b", b"", lease.id), Put("/l/a", b"", lease.id)])
    info = await ledger.lease_info(lease.id)
    assert (info.id, info.ttl_s, info.keys) == (lease.id, 60, ("/l/a", "/l/b"))
    assert 50 < info.remaining_s <= 60
    assert lease.id in await ledger.leases()
    assert await ledger.keep_alive(lease.id) == 60

    await ledger.revoke(lease.id)
    await ledger.revoke(lease.id)
    assert (await ledger.range("/l/")).entries == ()
    assert lease.id not in await ledger.leases()
    for call in (ledger.keep_alive(lease.id), ledger.lease_info(lease.id)):
        with pytest.raises(LeaseLost):
            await call
    with pytest.raises(LeaseLost):
        await ledger.txn([], [Put("/l/c", b""), Put("/l/d", b"", lease.id)])
    assert (await ledger.range("/l/")).entries == ()


async def test_a_lease_ends_by_itself(ledger: EtcdLedger) -> None:
    """The server grants its minimum; the end is a transaction that watches see."""
    lease = await ledger.grant(0.1)
    assert 1 <= lease.ttl_s <= 5
    put = await ledger.txn([], [Put("/end", b"x", lease.id)])
    async with ledger.watch("/end", start=put.revision + 1) as watch:
        (batch,) = await take(watch, 1)
    (event,) = batch.events
    assert event.entry is None
    assert event.previous is not None
    assert event.previous.lease == lease.id


# ---- watches --------------------------------------------------------------------------


async def test_a_watch_delivers_transactions_whole(ledger: EtcdLedger) -> None:
    """Also when one is larger than a frame of the server, and larger than a read."""
    keys = [f"/w/{n:03}" for n in range(100)]
    first = await ledger.txn([], [Put(key, b"a" * 9000) for key in keys])
    await ledger.txn([], [Put("/elsewhere", b"")])
    second = await ledger.txn([], [Put(key, b"b" * 9000) for key in keys])
    third = await ledger.txn([], [Delete(keys[0]), Put(keys[1], b"c")])
    async with ledger.watch("/w/", start=first.revision) as watch:
        batches = await take(watch, 3)
    assert [one.revision for one in batches] == [first.revision, second.revision, third.revision]
    assert [[event.key for event in one.events] for one in batches] == [keys, keys, keys[:2]]
    assert all(event.previous is None for event in batches[0].events)
    for event in batches[1].events:
        assert event.entry is not None
        assert event.previous is not None
        assert (event.entry.value, event.previous.value) == (b"b" * 9000, b"a" * 9000)
    assert batches[2].events[0].entry is None


async def test_a_cancelled_wait_loses_nothing(ledger: EtcdLedger) -> None:
    """Who gave up waiting and comes back finds everything, once."""
    revision = (await ledger.txn([], [Put("/cw/0", b"")])).revision
    seen: list[str] = []
    async with ledger.watch("/cw/", start=revision) as watch:
        written = asyncio.create_task(_write(ledger, "/cw/", 30))
        while len(seen) < 31:
            try:
                async with asyncio.timeout(0.003):
                    seen += [event.key for event in (await watch.__anext__()).events]
            except TimeoutError:
                await asyncio.sleep(0)
        await written
    assert seen == ["/cw/0", *(f"/cw/{n}" for n in range(1, 31))]


async def _write(ledger: EtcdLedger, prefix: str, count: int) -> None:
    for n in range(1, count + 1):
        await ledger.txn([], [Put(f"{prefix}{n}", b"")])


async def test_compacted_history_is_said_to_be_gone(ledger: EtcdLedger) -> None:
    """A watch is refused exactly when what it asks for begins at or before the compaction."""
    revisions = [(await ledger.txn([], [Put("/h", b"%d" % n)])).revision for n in range(4)]
    revisions.append((await ledger.txn([], [Delete("/h")])).revision)
    cut = revisions[3]
    await ledger.compact(cut)
    await ledger.compact(cut - 1)
    await ledger.compact(cut)
    with pytest.raises(Mistake, match="future"):
        await ledger.compact(cut + 1000)
    for start in (1, cut - 1, cut):
        async with ledger.watch("/h", start=start) as watch:
            with pytest.raises(Compacted) as caught:
                await take(watch, 1)
            assert caught.value.revision == cut
            with pytest.raises(Compacted):
                await take(watch, 1)
    async with ledger.watch("/h", start=cut + 1) as watch:
        (batch,) = await take(watch, 1)
    assert (batch.revision, batch.events[0].entry) == (revisions[4], None)
    assert batch.events[0].previous is not None

    assert [entry.value for entry in (await ledger.range("/h", revision=cut)).entries] == [b"3"]
    with pytest.raises(Compacted):
        await ledger.range("/h", revision=cut - 1)
    with pytest.raises(Mistake, match="future"):
        await ledger.range("/h", revision=cut + 1000)


async def everything(watch: Watch) -> list[Batch]:
    """What a watch shows until it is closed."""
    return [batch async for batch in watch]


async def test_closing_ends_watches_and_connections(etcd: EtcdServer) -> None:
    """Whoever waits is told or just ends; no task and no connection is left."""
    before = asyncio.all_tasks()
    async with EtcdLedger(etcd.endpoints) as ledger:
        watches = [ledger.watch("/quiet", start=1 << 40) for _ in range(3)]
        waits = [asyncio.create_task(everything(watch)) for watch in watches]
        await until(lambda: connections(etcd) >= 3)
        with pytest.raises(Mistake, match="already waits"):
            await take(watches[0], 1)
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
    await until(lambda: not connections(etcd))
    assert asyncio.all_tasks() == before
