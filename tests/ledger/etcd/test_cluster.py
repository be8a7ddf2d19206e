"""Three real etcd members that die, stop and come back under a ledger in use."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from holdfast.errors import Unavailable, UnknownOutcome
from holdfast.ledger.etcd import EtcdLedger
from holdfast.ledger.etcd.watch import EtcdWatch
from holdfast.ledger.types import Batch, Put, absent
from holdfast.servers import EtcdCluster, EtcdServer
from holdfast.timeouts import Timeouts
from patience import HANG_S, auntil

pytestmark = pytest.mark.etcd


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """One cluster for all tests here."""
    with EtcdCluster(3, tmp_path_factory.mktemp("cluster")) as started:
        yield started


@pytest.fixture
def cluster(members: EtcdCluster) -> Iterator[EtcdCluster]:
    """The cluster with all members up, before and after a test."""
    yield members
    for member in members.members:
        if member.child is None:
            member.restart(wait=False)
        else:
            member.resume()
    for member in members.members:
        member.wait_ready()


async def up(member: EtcdServer) -> None:
    """Bring a member back without holding up the event loop."""
    member.restart(wait=False)
    await asyncio.to_thread(member.wait_ready)


async def collect(watch: EtcdWatch, into: list[Batch], last: str) -> None:
    """Follow a watch up to the batch that has the key `last`."""
    async for batch in watch:
        into.append(batch)
        if any(event.key == last for event in batch.events):
            return


class Load:
    """Writers of unique keys, who note what was acknowledged and what is unknown."""

    def __init__(self, ledger: EtcdLedger, prefix: str) -> None:
        self.ledger, self.prefix = ledger, prefix
        self.acknowledged: list[str] = []
        self.unknown: list[str] = []
        self.failed: list[str] = []
        self.done = False

    async def write(self, writer: int) -> None:
        n = 0
        while not self.done:
            n += 1
            key = f"{self.prefix}{writer}-{n:05}"
            try:
                made = await self.ledger.txn([absent(key)], [Put(key, b"%d" % n)])
            except UnknownOutcome:
                self.unknown.append(key)
            except Unavailable:
                self.failed.append(key)
            else:
                assert made.succeeded, f"{key} was written twice"
                self.acknowledged.append(key)

    async def more(self, count: int) -> None:
        """Wait until so many more writes have been acknowledged."""
        target = len(self.acknowledged) + count
        await auntil(lambda: len(self.acknowledged) >= target)


@pytest.mark.long
async def test_members_die_and_no_write_is_lost_and_no_event_is_missed(
    cluster: EtcdCluster,
) -> None:
    """One of three is killed, restarted, then another is killed, under load.

    Every acknowledged write is there, and each watch shows it once and in order; what is
    unknown is either there and shown, or neither; what failed is neither.
    """
    first, second, _ = cluster.members
    where = cluster.endpoints
    async with (
        EtcdLedger(where, timeout_s=2) as ledger,
        EtcdLedger(where[::-1]) as other,
        ledger.watch("/load/", start=1) as near,
        other.watch("/load/", start=1) as far,
    ):
        load = Load(ledger, "/load/")
        shown: tuple[list[Batch], list[Batch]] = ([], [])
        async with asyncio.timeout(50), asyncio.TaskGroup() as group:
            for watch, seen in zip((near, far), shown, strict=True):
                assert isinstance(watch, EtcdWatch)
                group.create_task(collect(watch, seen, "/load/~end"))
            writers = [group.create_task(load.write(n)) for n in range(4)]
            await load.more(200)
            first.kill()
            await load.more(200)
            await up(first)
            await load.more(200)
            second.kill()
            await load.more(200)
            await up(second)
            cluster.members[2].kill()
            await load.more(200)
            load.done = True
            await asyncio.wait(writers)
            await auntil(lambda: written(ledger, "/load/~end"))
        present = {entry.key: entry for entry in (await ledger.range("/load/")).entries}

    assert len(load.acknowledged) >= 1000
    assert set(load.acknowledged) <= set(present), "an acknowledged write was lost"
    assert not set(load.failed) & set(present), "a write that 'took no effect' took effect"
    assert {*present} <= {*load.acknowledged, *load.unknown, "/load/~end"}
    for seen in shown:
        revisions = [batch.revision for batch in seen]
        assert revisions == sorted(set(revisions)), "out of order or repeated"
        keys = Counter(event.key for batch in seen for event in batch.events)
        # A write of unknown outcome may still take effect after the last one, and be shown then.
        due = {key for key, entry in present.items() if entry.mod_revision <= revisions[-1]}
        assert set(present) - due <= set(load.unknown)
        assert set(keys) == due, "the watch and the range differ"
        assert set(keys.values()) == {1}
        for batch in seen:
            for event in batch.events:
                assert event.entry is not None
                assert event.entry.mod_revision == batch.revision


async def test_the_next_endpoint_takes_over(cluster: EtcdCluster) -> None:
    """When the endpoint in use dies, calls and the lease go on with another."""
    async with EtcdLedger(cluster.endpoints) as ledger:
        lease = await ledger.grant(30)
        await ledger.txn([], [Put("/over/1", b"", lease.id)])
        cluster.members[0].kill()
        began = time.monotonic()
        assert await ledger.get("/over/1") is not None
        assert await ledger.keep_alive(lease.id) == 30
        assert (await ledger.lease_info(lease.id)).keys == ("/over/1",)
        assert lease.id in await ledger.leases()
        assert time.monotonic() - began < 20, "it waited for the lease to end"
        await ledger.revoke(lease.id)
        assert await ledger.get("/over/1") is None


async def written(ledger: EtcdLedger, key: str) -> bool:
    """Write a key once; False where the servers could not say that it is there."""
    began = time.monotonic()
    try:
        await ledger.txn([absent(key)], [Put(key, b"")])
        return True
    except (Unavailable, UnknownOutcome):
        return False
    finally:
        assert time.monotonic() - began < HANG_S / 2, "a write ignored its limit of 6 s"


async def test_a_paused_member_hangs_nobody(cluster: EtcdCluster) -> None:
    """A member that keeps its connections and says nothing delays reads and watches only."""
    times = Timeouts(watch_silence_s=0.5, watch_backstop_s=0.25)
    async with EtcdLedger(cluster.endpoints, timeout_s=6, timeouts=times) as ledger:
        start = (await ledger.txn([], [Put("/paused/1", b"")])).revision
        async with ledger.watch("/paused/", start=start) as watch:
            assert (await watch.__anext__()).events[0].key == "/paused/1"
            waiting = asyncio.ensure_future(watch.__anext__())
            await asyncio.sleep(0)
            cluster.members[0].pause()
            began = time.monotonic()
            assert await ledger.get("/paused/1") is not None
            assert time.monotonic() - began < HANG_S / 2, "a read ignored its limit of 6 s"
            # Moved away from the silent member: from here on nothing waits for it.
            # The others may have to elect a leader first: a write may say that it does not know.
            await auntil(lambda: written(ledger, "/paused/2"))
            async with asyncio.timeout(HANG_S):
                assert (await waiting).events[0].key == "/paused/2"
            cluster.members[0].resume()


async def test_without_a_majority_calls_end_in_time(cluster: EtcdCluster) -> None:
    """One member of three can promise nothing: every call says so within its limit."""
    async with EtcdLedger(cluster.endpoints, timeout_s=2) as ledger:
        await ledger.txn([], [Put("/major", b"1")])
        cluster.members[0].kill()
        cluster.members[1].kill()
        began = time.monotonic()
        with pytest.raises(Unavailable, match=f":{cluster.members[2].port}"):
            await ledger.get("/major")
        with pytest.raises((Unavailable, UnknownOutcome)):
            await ledger.txn([], [Put("/major", b"2")])
        assert time.monotonic() - began < HANG_S / 2, "a call ignored its limit of 2 s"
        await up(cluster.members[0])
        async with asyncio.timeout(HANG_S):
            entry = None
            while entry is None:
                try:
                    entry = await ledger.get("/major")
                except Unavailable:
                    continue
        assert entry.value in (b"1", b"2")
