"""Servers that are not there, are somebody else, lose answers, stop, restart, or are full."""

import asyncio
import contextlib
import time
from pathlib import Path

import pytest

from holdfast.errors import NoRoom, Unavailable, UnknownOutcome
from holdfast.ledger.base import Watch
from holdfast.ledger.etcd import EtcdLedger
from holdfast.ledger.types import Batch, Get, Put
from holdfast.proc import HeldPort
from holdfast.servers import EtcdServer
from patience import HANG_S

pytestmark = pytest.mark.etcd


class Cable:
    """A TCP connection in between. `swallow` lets requests through and loses the answers."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.swallow = False
        self.swallowed = 0

    async def __aenter__(self) -> "Cable":
        self._server = await asyncio.start_server(self._joined, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def endpoint(self) -> tuple[str, int]:
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return "127.0.0.1", port

    async def _joined(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            there, back = await asyncio.open_connection(*self._target)
            try:
                await asyncio.wait(
                    {
                        asyncio.ensure_future(self._copy(reader, back, answers=False)),
                        asyncio.ensure_future(self._copy(there, writer, answers=True)),
                    },
                    return_when=asyncio.FIRST_COMPLETED,
                )
            finally:
                back.close()
        finally:
            writer.close()
            self._tasks.discard(task)

    async def _copy(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, answers: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                if answers and self.swallow:
                    self.swallowed += 1
                    return
                sink.write(data)
                await sink.drain()


@pytest.fixture
def cable(etcd: EtcdServer) -> Cable:
    return Cable(etcd.endpoint)


async def take(watch: Watch, count: int, limit_s: float = HANG_S) -> list[Batch]:
    """The next batches of a watch, or a failure after `limit_s`."""
    async with asyncio.timeout(limit_s):
        return [await anext(watch) for _ in range(count)]


async def _write(ledger: EtcdLedger, prefix: str, count: int) -> None:
    for n in range(1, count + 1):
        await ledger.txn([], [Put(f"{prefix}{n}", b"")])


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


async def test_a_lost_answer_is_never_sent_again(etcd: EtcdServer, cable: Cable) -> None:
    """A write whose answer was lost is UnknownOutcome and was applied once; a read goes on."""
    async with cable, EtcdLedger([cable.endpoint, etcd.endpoint]) as ledger:
        await ledger.txn([], [Put("/lost/0", b"")])
        cable.swallow = True
        with pytest.raises(UnknownOutcome, match="may or may not"):
            await ledger.txn([], [Put("/lost/1", b"")])
        assert cable.swallowed == 1
        entry = await ledger.get("/lost/1")
        assert entry is not None
        assert entry.version == 1
        # An endpoint that failed is asked first whether it works: nothing else is unknown.
        for n in range(2, 5):
            await ledger.txn([], [Put(f"/lost/{n}", b"")])
        cable.swallow = False


async def test_a_read_goes_on_elsewhere(etcd: EtcdServer, cable: Cable) -> None:
    """A lost answer to a read costs another attempt, not an error."""
    async with cable, EtcdLedger([cable.endpoint, etcd.endpoint]) as ledger:
        await ledger.txn([], [Put("/read", b"1")])
        cable.swallow = True
        entry = await ledger.get("/read")
        assert entry is not None
        assert entry.value == b"1"
        assert cable.swallowed == 1


async def test_a_lost_grant_is_unknown(etcd: EtcdServer, cable: Cable) -> None:
    """A lease may have been granted although nobody heard of it: one, not two."""
    async with cable, EtcdLedger([cable.endpoint, etcd.endpoint]) as ledger:
        before = await ledger.leases()
        cable.swallow = True
        with pytest.raises(UnknownOutcome):
            await ledger.grant(30)
        (new,) = set(await ledger.leases()) - set(before)
        assert await ledger.keep_alive(new) == 30
        await ledger.revoke(new)


async def test_a_stopped_server_makes_an_unknown_outcome(tmp_path: Path) -> None:
    """SIGSTOP in the middle of a write: told in time, and the write is applied at most once."""
    with EtcdServer(tmp_path) as server:
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


async def test_a_watch_goes_on_over_a_restart(tmp_path: Path) -> None:
    """The server is killed under a watch and comes back: nothing is missed or repeated."""
    with EtcdServer(tmp_path) as server:
        async with EtcdLedger(server.endpoints) as ledger, ledger.watch("/r/", start=1) as watch:
            await _write(ledger, "/r/", 3)
            seen = await take(watch, 2)
            server.kill()
            waiting = asyncio.create_task(take(watch, 5, limit_s=20))
            with pytest.raises(Unavailable):
                await EtcdLedger(server.endpoints, timeout_s=0.2)
            server.restart()
            await _write(ledger, "/r/more", 4)
            seen += await waiting
    names = [batch.events[0].key for batch in seen]
    assert names == ["/r/1", "/r/2", "/r/3", *(f"/r/more{n}" for n in range(1, 5))]
    assert [batch.revision for batch in seen] == list(range(2, 9))


async def test_a_full_server_has_no_room(tmp_path: Path) -> None:
    """When etcd's quota is used up writes say so and change nothing; reads go on.

    A write that crosses the limit while others write may be applied *and* answered with
    the same error; then the outcome is unknown, never "no effect".
    """
    with EtcdServer(tmp_path, args=["--quota-backend-bytes", str(2 << 20)]) as server:
        async with EtcdLedger(server.endpoints) as ledger:

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


async def everything(watch: Watch) -> list[Batch]:
    """What a watch shows until it is closed."""
    return [batch async for batch in watch]


async def test_closing_does_not_wait_for_a_silent_server(tmp_path: Path) -> None:
    """A watch that is just connecting to a stopped server ends at once when it is closed."""
    with EtcdServer(tmp_path) as server:
        async with EtcdLedger(server.endpoints, timeout_s=20) as ledger:
            server.pause()
            watch = ledger.watch("/silent", start=1)
            waiting = asyncio.create_task(everything(watch))
            done, _ = await asyncio.wait({waiting}, timeout=0.3)
            assert not done
            await watch.aclose()
            async with asyncio.timeout(10):  # a call may take 20 s
                assert await waiting == []
        server.resume()
