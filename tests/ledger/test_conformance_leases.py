"""Leases and watches: what every back end must do, sentence by sentence."""

import asyncio
import math
import time

import pytest

from holdfast import ledger as ledgers
from holdfast.errors import Compacted, LeaseLost, Mistake
from holdfast.ledger import Batch, Delete, Entry, Event, Get, Ledger, Op, Put, Range, absent

from .conformance import LIMIT_S, ordered, take, within
from .conftest import Granter, Opener
from .test_conformance import put, revision

SHORT_S = 0.3  # etcd makes about 2 s of it


async def lost(ledger: Ledger, lease: int, key: str) -> None:
    """Everything that needs the lease says that it has ended."""
    for call in (
        ledger.keep_alive(lease),
        ledger.lease_info(lease),
        ledger.txn(then=[Put(key, b"", lease)]),
    ):
        with pytest.raises(LeaseLost):
            await call
    assert lease not in await ledger.leases()


# ---- leases ------------------------------------------------------------------------------


async def test_a_lease_tells_about_itself(ledger: Ledger, root: str, grant: Granter) -> None:
    """Time to live as it really is, time left, and its keys in order; no revision is made."""
    before = await revision(ledger, root)
    first, second = await grant(100.0), await grant(SHORT_S + 200)
    assert await revision(ledger, root) == before
    assert first.ttl_s == 100.0
    assert second.ttl_s >= SHORT_S + 200
    assert first.id != second.id
    await put(ledger, root + "b", b"", first.id)
    await put(ledger, root + "a", b"", first.id)
    info = await ledger.lease_info(first.id)
    assert (info.id, info.ttl_s, info.keys) == (first.id, 100.0, (root + "a", root + "b"))
    assert 0 < info.remaining_s <= 100.0
    leases = await ledger.leases()
    assert list(leases) == sorted(leases)
    assert {first.id, second.id} <= set(leases)


@pytest.mark.parametrize("ttl_s", [0, 0.05, -1, 86_401, math.inf, math.nan])
async def test_a_time_to_live_has_bounds(ledger: Ledger, ttl_s: float) -> None:
    """What no back end would keep is refused by all."""
    with pytest.raises(Mistake):
        await ledger.grant(ttl_s)


async def test_an_expired_lease_takes_its_keys_along(
    ledger: Ledger, open_ledger: Opener, root: str, grant: Granter
) -> None:
    """All at once, in one ordinary transaction that watches see, not early, and for good."""
    begun = time.monotonic()
    lease = await grant(SHORT_S)
    entries = [await put(ledger, root + name, b"x", lease.id) for name in ("a", "b", "c")]
    kept = await put(ledger, root + "kept")
    async with (await open_ledger()).watch(root, start=kept.mod_revision + 1) as watch:
        (batch,) = await take(watch)
    assert time.monotonic() - begun >= lease.ttl_s
    expected = Batch(batch.revision, tuple(Event(one.key, None, one) for one in entries))
    assert ordered(batch) == expected
    assert batch.revision == kept.mod_revision + 1
    assert await ledger.range(root) == Range((kept,), batch.revision)
    for _ in range(2):
        await lost(ledger, lease.id, root + "a")
    await ledger.revoke(lease.id)
    await lost(ledger, lease.id, root + "a")
    assert await ledger.range(root) == Range((kept,), batch.revision)


async def test_an_expired_lease_is_gone_for_readers_too(
    ledger: Ledger, root: str, grant: Granter
) -> None:
    """Nobody has to watch for a lease to end, and nobody sees it end early."""
    begun = time.monotonic()
    lease = await grant(SHORT_S)
    await put(ledger, root + "a", b"", lease.id)

    async def gone() -> None:
        while await ledger.get(root + "a") is not None:
            await asyncio.sleep(0.05)

    await within(gone())
    assert time.monotonic() - begun >= lease.ttl_s
    assert (await ledger.txn([absent(root + "a")])).succeeded


async def test_a_lease_that_is_kept_alive_lives(
    ledger: Ledger, open_ledger: Opener, root: str, grant: Granter
) -> None:
    """Any client may keep it; each time it begins again with its full time to live."""
    other = await open_ledger()
    lease = await grant(2.0)
    entry = await put(ledger, root + "a", b"", lease.id)
    deadline = time.monotonic() + 1.6 * lease.ttl_s
    while time.monotonic() < deadline:
        assert await other.keep_alive(lease.id) == lease.ttl_s
        await asyncio.sleep(lease.ttl_s / 5)
    assert await ledger.get(entry.key) == entry
    await ledger.revoke(lease.id)
    await lost(other, lease.id, entry.key)


async def test_revoking_deletes_the_keys_at_once(
    ledger: Ledger, root: str, grant: Granter
) -> None:
    """In one transaction; again, or for a lease that never was, it does no harm."""
    lease, empty = await grant(100), await grant(100)
    entries = [await put(ledger, root + name, b"x", lease.id) for name in ("a", "b")]
    before = await revision(ledger, root)
    for one in (lease.id, lease.id, empty.id, empty.id, 123_456_789, 0, -1):
        await ledger.revoke(one)
    assert await ledger.range(root) == Range((), before + 1)
    async with ledger.watch(root, start=before + 1) as watch:
        (batch,) = await take(watch)
    assert ordered(batch).events == tuple(Event(one.key, None, one) for one in entries)
    await lost(ledger, lease.id, root + "a")


async def test_a_put_on_a_dead_lease_changes_nothing(
    ledger: Ledger, root: str, grant: Granter
) -> None:
    """The whole transaction is refused; in the branch that does not run it is not looked at."""
    dead, alive = await grant(100), await grant(100)
    await ledger.revoke(dead.id)
    await put(ledger, root + "a", b"old")
    before = await ledger.range(root)
    for bad in (dead.id, 123_456_789, (1 << 63) - 1):
        ops: list[Op] = [
            Put(root + "b", b"", alive.id),
            Delete(root + "a"),
            Put(root + "c", b"", bad),
            Put(root + "d", b""),
        ]
        with pytest.raises(LeaseLost):
            await ledger.txn(then=ops)
        with pytest.raises(LeaseLost):
            await ledger.txn([absent(root + "a")], [], ops)
        assert await ledger.range(root) == before
        assert (await ledger.lease_info(alive.id)).keys == ()
        assert (await ledger.txn([], [Get(root + "a")], ops)).succeeded


async def test_a_key_has_the_lease_of_its_last_put(
    ledger: Ledger, root: str, grant: Granter
) -> None:
    """A put without lease unbinds, a put with another rebinds, a delete unbinds."""
    first, second = await grant(100), await grant(100)
    for name in ("unbound", "moved", "deleted", "again", "stays"):
        await put(ledger, root + name, b"", first.id)
    assert (await put(ledger, root + "unbound", b"")).lease == 0
    assert (await put(ledger, root + "moved", b"", second.id)).lease == second.id
    await ledger.txn(then=[Delete(root + "deleted"), Delete(root + "again")])
    await put(ledger, root + "again")
    await put(ledger, root + "stays", b"x", first.id)
    assert (await ledger.lease_info(first.id)).keys == (root + "stays",)
    assert (await ledger.lease_info(second.id)).keys == (root + "moved",)
    await ledger.revoke(first.id)
    names = [one.key.removeprefix(root) for one in (await ledger.range(root)).entries]
    assert names == ["again", "moved", "unbound"]


async def test_a_lease_outlives_the_object_that_took_it(ledger_url: str, root: str) -> None:
    """Closing lets go of connections, not of leases."""
    async with ledgers.open(ledger_url) as first:
        lease = await first.grant(100)
        entry = await put(first, root + "a", b"", lease.id)
    async with ledgers.open(ledger_url) as second:
        assert await second.get(root + "a") == entry
        assert await second.keep_alive(lease.id) == lease.ttl_s
        await second.revoke(lease.id)
        assert await second.get(root + "a") is None


# ---- watches -----------------------------------------------------------------------------


async def some_changes(ledger: Ledger, root: str) -> list[Batch]:
    """A few transactions of every kind, and the batches that tell them."""
    a, b, c = root + "a", root + "b", root + "c"
    batches: list[Batch] = []
    steps: list[list[Op]] = [
        [Put(a, b"1")],
        [Put(a, b"2"), Put(b, b"2"), Get(a)],
        [Delete(a), Put(c, b"3"), Delete(root + "missing")],
        [Put(a, b"4"), Delete(b)],
    ]
    for ops in steps:
        old = {one.key: one for one in (await ledger.range(root)).entries}
        answer = await ledger.txn(then=ops)
        new = {one.key: one for one in (await ledger.range(root)).entries}
        events = [
            Event(key, new.get(key), old.get(key))
            for key in (a, b, c)
            if new.get(key) != old.get(key)
        ]
        batches.append(Batch(answer.revision, tuple(events)))
    return batches


async def test_a_watch_replays_the_past_exactly(ledger: Ledger, root: str) -> None:
    """From any revision on, inclusive; each transaction whole, with what was there before."""
    batches = await some_changes(ledger, root)
    for number, first in enumerate(batches):
        async with ledger.watch(root, start=first.revision) as watch:
            found = await take(watch, len(batches) - number)
            assert [ordered(batch) for batch in found] == batches[number:]


async def test_a_watch_sees_what_happens_now(
    ledger: Ledger, open_ledger: Opener, root: str
) -> None:
    """Changes through another client arrive in order, and nothing else does."""
    other = await open_ledger()
    async with ledger.watch(root, start=await revision(ledger, root) + 1) as watch:
        waiting = asyncio.ensure_future(take(watch))
        batches = await some_changes(other, root)
        found = [*await waiting, *await take(watch, len(batches) - 1)]
        assert [ordered(batch) for batch in found] == batches
        await ledger.txn([absent(root + "a")], [Put(root + "a", b"")])
        await ledger.txn(then=[Delete(root + "missing")])
        end = await put(other, root + "end")
        (batch,) = await take(watch)
        assert batch == Batch(end.mod_revision, (Event(end.key, end, None),))


async def test_a_watch_sees_only_its_prefix(ledger: Ledger, root: str) -> None:
    """Of a transaction it delivers what lies below, of one that lies elsewhere nothing."""
    start = await revision(ledger, root) + 1
    await ledger.txn(then=[Put(root + name, b"") for name in ("a", "a/x", "ab", "b", "é")])
    await put(ledger, root + "b")
    end = await put(ledger, root + "a/end")
    for prefix, names in {"a": ["a", "a/x", "ab"], "a/": ["a/x"]}.items():
        async with ledger.watch(root + prefix, start=start) as watch:
            batches = await take(watch, 2)
        assert [event.key for event in ordered(batches[0]).events] == [root + n for n in names]
        assert batches[1].revision == end.mod_revision
    async with ledger.watch(root + "é", start=start) as watch:
        assert [event.key for event in (await take(watch))[0].events] == [root + "é"]


async def test_two_watches_know_nothing_of_each_other(ledger: Ledger, root: str) -> None:
    """Both get everything, at their own pace; the end of one is not the end of the other."""
    start = await revision(ledger, root) + 1
    first, second = ledger.watch(root, start=start), ledger.watch(root, start=start)
    batches = await some_changes(ledger, root)
    assert [ordered(one) for one in await take(first, len(batches))] == batches
    assert [ordered(one) for one in await take(second, 1)] == batches[:1]
    await first.aclose()
    assert [ordered(one) for one in await take(second, len(batches) - 1)] == batches[1:]
    end = await put(ledger, root + "end")
    assert (await take(second))[0].revision == end.mod_revision
    await second.aclose()


async def test_closing_a_watch_ends_it(ledger: Ledger, root: str) -> None:
    """Somebody who waits is woken, iterating stops, closing twice does no harm."""
    watch = ledger.watch(root, start=await revision(ledger, root) + 1)
    seen = asyncio.Queue[int]()

    async def follow() -> None:
        async for batch in watch:
            seen.put_nowait(batch.revision)

    waiting = asyncio.ensure_future(follow())
    entry = await put(ledger, root + "a")
    assert await within(seen.get()) == entry.mod_revision
    await ledger.get(root + "a")  # meanwhile it waits again
    await watch.aclose()
    await within(waiting)
    await watch.aclose()
    with pytest.raises(StopAsyncIteration):
        await within(anext(watch))


async def test_giving_up_waiting_loses_nothing(
    ledger: Ledger, open_ledger: Opener, root: str
) -> None:
    """Who gave up in whatever moment, and comes back, finds everything once."""
    other, seen, written = await open_ledger(), list[int](), list[int]()

    async def write() -> None:
        for _ in range(30):
            written.append((await put(other, root + "a")).mod_revision)

    async with ledger.watch(root, start=await revision(ledger, root) + 1) as watch:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(watch), 0.01)
        writing = asyncio.ensure_future(write())
        async with asyncio.timeout(LIMIT_S):
            while len(seen) < 30:
                try:
                    async with asyncio.timeout(0.003):
                        seen.append((await anext(watch)).revision)
                except TimeoutError:
                    await asyncio.sleep(0)
        await writing
        assert seen == written


async def test_a_watch_may_begin_in_the_future(ledger: Ledger, root: str) -> None:
    """Then it begins exactly there."""
    now = await revision(ledger, root)
    async with ledger.watch(root, start=now + 3) as watch:
        for _ in range(4):
            await put(ledger, root + "a")
        assert [batch.revision for batch in await take(watch, 2)] == [now + 3, now + 4]


async def test_a_watch_begins_at_one(ledger: Ledger, root: str) -> None:
    """There is no revision 0 to watch from."""
    for start in (0, -1):
        with pytest.raises(Mistake):
            ledger.watch(root, start=start)


async def test_a_watch_misses_nothing(ledger: Ledger, open_ledger: Opener, root: str) -> None:
    """Range plus watch is the ledger: at every revision the copy equals a range read there."""
    clients = [await open_ledger() for _ in range(3)]
    start = await ledger.range(root)

    async def write(client: Ledger, number: int) -> None:
        for turn in range(40):
            key = f"{root}{(number + turn) % 7}"
            if turn % 5 == 4:
                await client.txn(then=[Delete(key), Put(f"{root}x{number}", b"%d" % turn)])
            else:
                await client.txn(then=[Put(key, b"%d" % turn)])

    writers = asyncio.gather(*[write(client, n) for n, client in enumerate(clients)])
    copy: dict[str, Entry] = {}
    async with ledger.watch(root, start=start.revision + 1) as watch:
        for batch in await take(watch, 3 * 40):
            for event in batch.events:
                assert copy.get(event.key) == event.previous
                copy.pop(event.key, None)
                if event.entry is not None:
                    copy[event.key] = event.entry
            if batch.revision % 10 == 0:
                then = await ledger.range(root, revision=batch.revision)
                assert then.entries == tuple(copy[key] for key in sorted(copy))
    await writers
    assert (await ledger.range(root)).entries == tuple(copy[key] for key in sorted(copy))


async def test_a_long_history_is_replayed_whole(ledger: Ledger, root: str) -> None:
    """Many transactions of many keys: none is split, none is missing."""
    start = await revision(ledger, root) + 1
    keys = [f"{root}{n:03}" for n in range(128)]
    for turn in range(20):
        await ledger.txn(then=[Put(key, b"%d" % turn * 50) for key in keys])
    async with ledger.watch(root, start=start) as watch:
        batches = await take(watch, 20)
    assert [batch.revision for batch in batches] == list(range(start, start + 20))
    for turn, batch in enumerate(batches):
        assert [event.key for event in ordered(batch).events] == [
            f"{root}{n:03}" for n in range(128)
        ]
        assert {event.entry and event.entry.value for event in batch.events} == {b"%d" % turn * 50}


# ---- compaction --------------------------------------------------------------------------


async def test_compaction_forgets_and_says_so(ledger: Ledger, root: str) -> None:
    """Old reads and watches raise `Compacted`; entries and the newer history stay."""
    batches = await some_changes(ledger, root)
    at = batches[2].revision
    then, now = await ledger.range(root, revision=at), await ledger.range(root)
    for _ in range(2):
        await ledger.compact(at)
        await ledger.compact(at - 1)
    with pytest.raises(Mistake, match="future"):
        await ledger.compact(now.revision + 1000)
    assert await ledger.range(root) == now
    assert await ledger.range(root, revision=at) == then
    for old in (at - 1, at - 2):
        with pytest.raises(Compacted) as read:
            await ledger.range(root, revision=old)
        async with ledger.watch(root, start=old) as watch:
            for _ in range(2):
                with pytest.raises(Compacted) as watched:
                    await take(watch)
        for caught in (read, watched):
            assert old < caught.value.revision <= at
    async with ledger.watch(root, start=at + 1) as watch:
        (batch,) = await take(watch)
        assert batch.revision == batches[3].revision
        assert [one.entry for one in ordered(batch).events] == [
            one.entry for one in batches[3].events
        ]
        end = await put(ledger, root + "end")
        assert (await take(watch))[0].revision == end.mod_revision


@pytest.mark.parametrize("kind", ["put", "delete", "both"])
async def test_a_watch_from_the_compacted_revision_has_no_gap(
    ledger: Ledger, root: str, kind: str
) -> None:
    """What happened exactly there is told in full, or the watch says `Compacted`."""
    await put(ledger, root + "a")
    change: list[Op] = [Put(root + "b", b"")] if kind != "delete" else []
    change += [Delete(root + "a")] if kind != "put" else []
    answer = await ledger.txn(then=change)
    after = await put(ledger, root + "after")
    await ledger.compact(answer.revision)
    async with ledger.watch(root, start=answer.revision) as watch:
        try:
            (batch,) = await take(watch)
        except Compacted:
            return
        assert {event.key for event in batch.events} == {op.key for op in change}
        assert (await take(watch))[0].revision == after.mod_revision


async def test_a_living_watch_has_no_gap_after_a_compaction(ledger: Ledger, root: str) -> None:
    """It goes on where it was, or says `Compacted`; it never skips."""
    start = await revision(ledger, root) + 1
    async with ledger.watch(root, start=start) as watch:
        await put(ledger, root + "a")
        assert (await take(watch))[0].revision == start
        for _ in range(5):
            await put(ledger, root + "a")
        await ledger.compact(start + 4)
        try:
            found = [batch.revision for batch in await take(watch, 5)]
        except Compacted:
            return
        assert found == list(range(start + 1, start + 6))
