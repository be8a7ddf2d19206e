"""Answers that get lost between a real etcd and us: what we say of them is true."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from holdfast.chaos.proxy import Proxy
from holdfast.errors import Compacted, HoldfastError, UnknownOutcome
from holdfast.ledger import Put
from holdfast.ledger.etcd import EtcdLedger
from holdfast.servers import EtcdServer


@contextlib.asynccontextmanager
async def _through_a_proxy(folder: Path) -> AsyncIterator[tuple[EtcdLedger, EtcdLedger, Proxy]]:
    """A ledger behind a proxy with short patience, and one that goes straight to the server."""
    with EtcdServer(folder) as server:
        async with (
            Proxy(*server.endpoint) as proxy,
            EtcdLedger([server.endpoint]) as direct,
            EtcdLedger([proxy.address], timeout_s=1) as led,
        ):
            yield led, direct, proxy


async def test_a_revoke_without_an_answer_is_unknown(tmp_path: Path) -> None:
    """It was sent and it took effect: "unavailable" would say that it did not."""
    async with _through_a_proxy(tmp_path) as (led, direct, proxy):
        lease = await led.grant(60)
        await led.txn([], [Put("/a", b"1", lease.id)])
        proxy.stall(direction="to_client")
        with pytest.raises(UnknownOutcome):
            await led.revoke(lease.id)
        assert await direct.get("/a") is None


async def test_a_compaction_without_an_answer_is_unknown(tmp_path: Path) -> None:
    async with _through_a_proxy(tmp_path) as (led, direct, proxy):
        for number in range(5):
            newest = (await direct.txn([], [Put("/b", str(number).encode())])).revision
        await led.get("/b")  # the server is known to answer, so the next call is sent at once
        proxy.stall(direction="to_client")
        with pytest.raises(HoldfastError) as caught:
            await led.compact(newest)
        try:
            await direct.range("/b", revision=newest - 1)
        except Compacted:
            assert isinstance(caught.value, UnknownOutcome)


async def test_callers_are_not_cancelled_by_a_close(tmp_path: Path) -> None:
    """More calls than connections: every caller hears an error of ours."""
    async with _through_a_proxy(tmp_path) as (led, _, proxy):
        proxy.stall()
        calls = [asyncio.ensure_future(led.get("/a")) for _ in range(100)]
        await asyncio.wait(calls, timeout=0.2)
        await led.close()
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(answer, HoldfastError), answer


class _Line:
    """A plain relay in which one connection can go silent while the others work."""

    def __init__(self) -> None:
        self.silent = asyncio.Event()
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self, target: tuple[str, int]) -> tuple[str, int]:
        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, away = await asyncio.open_connection(*target)
            self._writers += [writer, away]
            watching = asyncio.Event()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await asyncio.gather(
                    self._pump(reader, away, watching), self._pump(there, writer, watching)
                )

        self._server = await asyncio.start_server(relay, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, watching: asyncio.Event
    ) -> None:
        while data := await source.read(65536):
            if b"/v3/watch" in data and not self.silent.is_set():
                watching.set()
            if watching.is_set() and self.silent.is_set():
                continue
            sink.write(data)
            await sink.drain()

    async def stop(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()
        for writer in self._writers:
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def test_a_watch_whose_own_connection_dies_silently_goes_on(tmp_path: Path) -> None:
    """The server is well and answers others: the watch still finds its event."""
    with EtcdServer(tmp_path) as server:
        line = _Line()
        address = await line.start(server.endpoint)
        try:
            async with EtcdLedger([address]) as led, led.watch("/a", start=1) as watch:
                await led.txn([], [Put("/a", b"1")])
                first = await anext(watch)
                line.silent.set()
                await led.txn([], [Put("/a", b"2")])
                async with asyncio.timeout(30):
                    second = await anext(watch)
                assert second.revision == first.revision + 1
        finally:
            await line.stop()


@pytest.mark.long
async def test_a_range_of_large_values_is_read_in_pages_that_fit(tmp_path: Path) -> None:
    """40 MB in values of 1 MB: each page stays within the time that a call may take."""
    with EtcdServer(tmp_path) as server:
        async with EtcdLedger([server.endpoint]) as led:
            value = bytes(1_000_000)
            for number in range(40):
                await led.txn([], [Put(f"/big/{number:03}", value)])
            sizes = [len(page.entries) async for page in led.pages("/big/")]
            assert sum(sizes) == 40
            assert max(sizes) <= 16
