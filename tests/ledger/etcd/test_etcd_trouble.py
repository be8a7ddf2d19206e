"""Servers that are not there, are somebody else, lose answers, stop, restart, or are full."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from holdfast.chaos.proxy import Proxy
from holdfast.errors import HoldfastError, NoRoom, Unavailable, UnknownOutcome
from holdfast.ledger.etcd import EtcdLedger
from holdfast.ledger.etcd.watch import EtcdWatch
from holdfast.ledger.types import Get, Put
from holdfast.proc import HeldPort
from holdfast.servers import EtcdServer
from ledger.conformance import take
from patience import HANG_S

pytestmark = pytest.mark.etcd


async def _write(ledger: EtcdLedger, prefix: str, count: int) -> None:
    for n in range(1, count + 1):
        await ledger.txn([], [Put(f"{prefix}{n}", b"")])


# ---- not there, or somebody else ---------------------------------------------------------


async def test_nobody_there() -> None:
    """One clear line names every endpoint, within the time limit."""
    with HeldPort() as first, HeldPort() as second, pytest.raises(Unavailable) as caught:
        async with asyncio.timeout(HANG_S):  # far beyond its 0.5 s, and before a test's own limit
            await EtcdLedger([("127.0.0.1", first), ("127.0.0.1", second)], timeout_s=0.5)
    message = str(caught.value)
    assert f"127.0.0.1:{first}" in message
    assert f"127.0.0.1:{second}" in message
    assert "refused" in message.lower()
    assert "\n" not in message


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 404 Not Found\r\ncontent-length: 3\r\n\r\nno\n", b"-ERR unknown command\r\n", b""],
)
async def test_somebody_else_there(answer: bytes) -> None:
    """A server that is not etcd is told from one that is down."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(Unavailable, match=f":{port}") as caught:
            await EtcdLedger([("127.0.0.1", port)], timeout_s=0.5)
    assert "not like an etcd" in str(caught.value) or "without an answer" in str(caught.value)


# ---- lost answers ------------------------------------------------------------------------


@pytest.fixture
async def proxy(etcd: EtcdServer) -> AsyncIterator[Proxy]:
    """A line to the server that can fail."""
    async with Proxy(*etcd.endpoint) as proxy:
        yield proxy


@pytest.fixture
async def two_ways(etcd: EtcdServer, proxy: Proxy) -> AsyncIterator[EtcdLedger]:
    """A ledger that goes through the proxy, and past it when that fails."""
    async with EtcdLedger([proxy.address, etcd.endpoint]) as ledger:
        yield ledger


@pytest.fixture
async def one_way(proxy: Proxy) -> AsyncIterator[EtcdLedger]:
    """A ledger that knows no other way than the proxy, with short patience."""
    async with EtcdLedger([proxy.address], timeout_s=1) as ledger:
        yield ledger


def lose_answers(proxy: Proxy) -> None:
    """Requests arrive; each connection breaks with the first byte of an answer."""
    proxy.drop(1.0, within_bytes=1, direction="to_client")


async def test_a_lost_answer_is_never_sent_again(two_ways: EtcdLedger, proxy: Proxy) -> None:
    """A write whose answer was lost is UnknownOutcome and was applied once; a read goes on."""
    await two_ways.txn([], [Put("/lost/0", b"")])
    lose_answers(proxy)
    with pytest.raises(UnknownOutcome, match="may or may not"):
        await two_ways.txn([], [Put("/lost/1", b"")])
    assert proxy.stats.dropped == 1
    entry = await two_ways.get("/lost/1")
    assert entry is not None
    assert entry.version == 1
    # An endpoint that failed is asked first whether it works: nothing else is unknown.
    for n in range(2, 5):
        await two_ways.txn([], [Put(f"/lost/{n}", b"")])


async def test_a_read_goes_on_elsewhere(two_ways: EtcdLedger, proxy: Proxy) -> None:
    """A lost answer to a read costs another attempt, not an error."""
    await two_ways.txn([], [Put("/read", b"1")])
    lose_answers(proxy)
    entry = await two_ways.get("/read")
    assert entry is not None
    assert entry.value == b"1"
    assert proxy.stats.dropped == 1


async def test_a_lost_grant_is_unknown(two_ways: EtcdLedger, proxy: Proxy) -> None:
    """A lease may have been granted although nobody heard of it: one, not two."""
    before = await two_ways.leases()
    lose_answers(proxy)
    with pytest.raises(UnknownOutcome):
        await two_ways.grant(30)
    (new,) = set(await two_ways.leases()) - set(before)
    assert await two_ways.keep_alive(new) == 30
    await two_ways.revoke(new)


async def test_a_change_without_an_answer_is_unknown(
    one_way: EtcdLedger, ledger: EtcdLedger, proxy: Proxy
) -> None:
    """It was sent and it took effect: "unavailable" would say that it did not."""
    lease = await one_way.grant(60)
    newest = (await one_way.txn([], [Put("/changed", b"1", lease.id)])).revision
    for change in (one_way.revoke(lease.id), one_way.compact(newest)):
        proxy.heal()
        await one_way.get("/changed")  # the server is known to answer: the change is sent at once
        proxy.stall(direction="to_client")
        with pytest.raises(UnknownOutcome):
            await change
    assert await ledger.get("/changed") is None


async def test_callers_are_not_cancelled_by_a_close(one_way: EtcdLedger, proxy: Proxy) -> None:
    """More calls than connections: every caller hears an error of ours."""
    proxy.stall()
    calls = [asyncio.ensure_future(one_way.get("/a")) for _ in range(100)]
    await asyncio.wait(calls, timeout=0.2)
    await one_way.close()
    for answer in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(answer, HoldfastError), answer


async def test_a_watch_whose_own_connection_dies_silently_goes_on(ledger: EtcdLedger) -> None:
    """The server is well and answers others: the watch still finds its event."""
    made = await ledger.txn([], [Put("/quiet", b"1")])
    async with ledger.watch("/quiet", start=made.revision) as watch:
        await take(watch)
        assert isinstance(watch, EtcdWatch)
        assert watch._stream is not None
        assert watch._stream.connection is not None
        assert watch._stream.connection.transport is not None
        # Nobody hears any more what the server says there: not the watch, and not aiohttp.
        watch._stream.connection.transport.pause_reading()
        silent = watch._stream
        made = await ledger.txn([], [Put("/quiet", b"2")])
        assert (await take(watch))[0].revision == made.revision
        assert watch._stream is not silent


# ---- stopped, killed, full ---------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EtcdServer]:
    """A server of this test's own, to break."""
    with EtcdServer(tmp_path) as server:
        yield server


async def test_a_stopped_server_makes_an_unknown_outcome(server: EtcdServer) -> None:
    """SIGSTOP in the middle of a write: told in time, and the write is applied at most once."""
    async with EtcdLedger(server.endpoints, timeout_s=1) as ledger:
        await ledger.txn([], [Put("/stop/0", b"")])
        server.pause()
        began = time.monotonic()
        async with asyncio.timeout(HANG_S):  # far beyond its 1 s: the machine may be busy
            with pytest.raises(UnknownOutcome):
                await ledger.txn([], [Put("/stop/1", b"")])
        assert time.monotonic() - began > 0.8
        # Now the endpoint is not proven any more: nothing is sent, nothing is unknown.
        with pytest.raises(Unavailable):
            await ledger.txn([], [Put("/stop/2", b"")])
        with pytest.raises(Unavailable):
            await ledger.get("/stop/0")
        server.resume()
        await asyncio.to_thread(server.wait_ready)
        one, two = (await ledger.txn([], [Get("/stop/1"), Get("/stop/2")])).results
        assert one is None or one.version == 1
        assert two is None


async def test_a_watch_goes_on_over_a_restart(server: EtcdServer) -> None:
    """The server is killed under a watch and comes back: nothing is missed or repeated."""
    async with EtcdLedger(server.endpoints) as ledger, ledger.watch("/r/", start=1) as watch:
        await _write(ledger, "/r/", 3)
        seen = await take(watch, 2)
        server.kill()
        waiting = asyncio.create_task(take(watch, 5))
        with pytest.raises(Unavailable):
            await EtcdLedger(server.endpoints, timeout_s=0.2)
        server.restart()
        await _write(ledger, "/r/more", 4)
        seen += await waiting
    names = [batch.events[0].key for batch in seen]
    assert names == ["/r/1", "/r/2", "/r/3", *(f"/r/more{n}" for n in range(1, 5))]
    assert [batch.revision for batch in seen] == list(range(2, 9))


async def test_closing_does_not_wait_for_a_silent_server(server: EtcdServer) -> None:
    """A watch that is just connecting to a stopped server ends at once when it is closed."""
    async with EtcdLedger(server.endpoints, timeout_s=20) as ledger:
        server.pause()
        watch = ledger.watch("/silent", start=1)
        waiting = asyncio.create_task(take(watch))
        done, _ = await asyncio.wait({waiting}, timeout=0.3)
        assert not done
        await watch.aclose()
        with pytest.raises(StopAsyncIteration):
            async with asyncio.timeout(10):  # a call may take 20 s
                await waiting
    server.resume()


async def test_a_full_server_has_no_room(tmp_path: Path) -> None:
    """When etcd's quota is used up writes say so and change nothing; reads go on.

    A write that crosses the limit while others write may be applied *and* answered with
    the same error; then the outcome is unknown, never "no effect".
    """
    with EtcdServer(tmp_path, args=["--quota-backend-bytes", str(2 << 20)]) as server:
        # 200 writes at once: on a busy machine they take longer than a call usually may.
        async with EtcdLedger(server.endpoints, timeout_s=60) as ledger:

            async def write(n: int) -> str:
                try:
                    await ledger.txn([], [Put(f"/full/{n}", bytes(50_000))])
                except NoRoom:
                    return "no effect"
                except UnknownOutcome:
                    return "unknown"
                return "made"

            outcomes = [await write(0), *await asyncio.gather(*map(write, range(1, 200)))]
            assert outcomes[0] == "made"
            while "no effect" not in outcomes[200:]:
                assert len(outcomes) < 300, outcomes
                outcomes.append(await write(len(outcomes)))
            for n, outcome in enumerate(outcomes):
                there = await ledger.get(f"/full/{n}") is not None
                assert outcome == "unknown" or there == (outcome == "made"), (n, outcomes)
