"""The proxy between a real client and a real server: every fault, seen end to end."""

import asyncio
import contextlib
import random
import signal
import socket
import struct
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeAlias

import pytest

from holdfast.chaos.proxy import READ_AHEAD_BYTES, Proxy, ProxyThread
from holdfast.chaos.stream import Directions, drop_point
from holdfast.errors import Mistake, Unavailable
from holdfast.proc import HeldPort, spawn
from patience import HANG_S

LIMIT_S = HANG_S
SOON_S = 0.3  # long enough for a byte to arrive if it were let through
Reader: TypeAlias = asyncio.StreamReader
Writer: TypeAlias = asyncio.StreamWriter


class Server:
    """A real TCP server that records what each connection received and how it ended."""

    def __init__(self, *, echo: bool = True, answer: bytes = b"", read: bool = True) -> None:
        self.received: list[bytearray] = []
        self.ends: list[str] = []
        self._echo, self._answer, self._read = echo, answer, read
        self._changed = asyncio.Condition()
        self._leave = asyncio.Event()
        self._writers: list[Writer] = []

    async def _serve(self, reader: Reader, writer: Writer) -> None:
        got = bytearray()
        self.received.append(got)
        self._writers.append(writer)
        end = "eof"
        try:
            writer.write(self._answer)
            if not self._read:
                await self._leave.wait()
            while data := await reader.read(65_536):
                got += data
                await self._tell()
                if self._echo:
                    writer.write(data)
                    await writer.drain()
        except ConnectionError:
            end = "reset"
        self.ends.append(end)
        await self._tell()
        writer.close()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def until(self, condition: Callable[["Server"], bool]) -> None:
        async with asyncio.timeout(LIMIT_S), self._changed:
            await self._changed.wait_for(lambda: condition(self))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[int]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            self._leave.set()
            server.close()
            for writer in self._writers:
                writer.transport.abort()
            await self.until(lambda s: len(s.ends) == len(s.received))


@contextlib.asynccontextmanager
async def line(server: Server, **options: Any) -> AsyncIterator[Proxy]:
    async with server.running() as port, Proxy("127.0.0.1", port, **options) as proxy:
        yield proxy


@contextlib.asynccontextmanager
async def client(proxy: Proxy) -> AsyncIterator[tuple[Reader, Writer]]:
    async with asyncio.timeout(LIMIT_S):
        reader, writer = await asyncio.open_connection(*proxy.address)
        try:
            yield reader, writer
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def exchange(proxy: Proxy, data: bytes, chunk: int = 65_536) -> bytes:
    """Send everything in chunks, end the stream, and read to the end meanwhile."""
    async with client(proxy) as (reader, writer):

        async def send() -> None:
            for at in range(0, len(data), chunk):
                writer.write(data[at : at + chunk])
                await writer.drain()
            writer.write_eof()

        _, answer = await asyncio.gather(send(), reader.read())
        return answer


async def no_bytes(reader: Reader) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(1), SOON_S)


async def until_idle(proxy: Proxy) -> None:
    async with asyncio.timeout(LIMIT_S):
        while proxy.open_connections:
            await asyncio.sleep(0.005)


def noise(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


# ---- a healthy line --------------------------------------------------------------


async def test_a_healthy_line_changes_nothing() -> None:
    """Bytes, ends of streams and counts pass as they are, both ways."""
    data = noise(3_000_000)
    async with line(Server()) as proxy:
        assert await exchange(proxy, data) == data
        assert proxy.stats.bytes_to_server == proxy.stats.bytes_to_client == len(data)
        assert (proxy.stats.connections, proxy.stats.resets, proxy.stats.flips) == (1, 0, 0)


async def test_many_connections_at_once() -> None:
    """Connections do not mix."""
    async with line(Server()) as proxy:
        messages = [noise(50_000, seed) for seed in range(30)]
        answers = await asyncio.gather(*(exchange(proxy, one) for one in messages))
        assert answers == messages
        assert proxy.stats.connections == 30


async def test_a_reset_of_one_side_reaches_the_other() -> None:
    """A client that dies in disorder is seen by the server as such."""
    server = Server()
    async with line(server) as proxy, client(proxy) as (reader, writer):
        writer.write(b"x")
        assert await reader.read(1) == b"x"
        raw = writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        await server.until(lambda s: s.ends == ["reset"])
        assert proxy.stats.resets == 1


async def test_a_target_that_is_down_resets_the_client() -> None:
    """The client sees an error, not a silence, and it is counted."""
    with HeldPort() as nobody:
        async with Proxy("127.0.0.1", nobody) as proxy:
            with pytest.raises(ConnectionError):
                await exchange(proxy, b"anybody?")
            assert proxy.stats.target_failures == 1


async def test_the_death_of_a_real_server_process_is_passed_on() -> None:
    """SIGKILL of the server ends the client's connection."""
    script = (
        "import socket, sys\n"
        "listener = socket.create_server(('127.0.0.1', 0))\n"
        "print(listener.getsockname()[1], flush=True)\n"
        "peer, _ = listener.accept()\n"
        "while data := peer.recv(100): peer.sendall(data)\n"
    )
    with spawn([sys.executable, "-c", script], stdout=-1) as child:
        assert child.process.stdout is not None
        port = int(child.process.stdout.readline())
        async with Proxy("127.0.0.1", port) as proxy, client(proxy) as (reader, writer):
            writer.write(b"hello")
            assert await reader.readexactly(5) == b"hello"
            child.signal(signal.SIGKILL)
            assert await reader.read() == b""


async def test_more_connections_than_allowed_are_turned_away() -> None:
    """The number of connections is bounded; room is given again when one ends."""
    async with line(Server(), max_connections=1) as proxy:
        async with client(proxy) as (first, writer):
            writer.write(b"x")
            assert await first.read(1) == b"x"
            with pytest.raises(ConnectionError):
                await exchange(proxy, b"no room")
            writer.write_eof()
            assert await first.read() == b""
        await until_idle(proxy)
        assert await exchange(proxy, b"again") == b"again"
        assert proxy.stats.turned_away == 1


async def test_an_address_in_use_is_a_clear_error() -> None:
    """No traceback from the depths of a socket."""
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(Unavailable, match="cannot listen"),
    ):
        await Proxy("127.0.0.1", 1, listen_port=taken.getsockname()[1]).start()


async def test_back_pressure_reaches_the_sender() -> None:
    """A server that does not read stops the client, and the proxy holds no more than its
    bound."""
    async with line(Server(read=False)) as proxy, client(proxy) as (_, writer):

        async def send(blocks: int) -> None:
            for _ in range(blocks):
                writer.write(bytes(1 << 20))
                await writer.drain()

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(send(200), 1.5)
        assert READ_AHEAD_BYTES - 65_536 < proxy.held_bytes <= READ_AHEAD_BYTES
        writer.transport.abort()


# ---- cut ---------------------------------------------------------------------------


async def test_a_cut_resets_what_is_open_and_refuses_what_comes() -> None:
    """Both sides see a reset; new clients are refused; after healing the address is the
    same and works."""
    server = Server()
    async with line(server) as proxy:
        address = proxy.address
        async with client(proxy) as (reader, writer):
            writer.write(b"x")
            assert await reader.read(1) == b"x"
            proxy.cut()
            with pytest.raises(ConnectionResetError):
                await reader.read()
            await server.until(lambda s: s.ends == ["reset"])
        for _ in range(3):
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection(*address)
        proxy.heal()
        assert proxy.address == address
        assert await exchange(proxy, b"back") == b"back"
        assert (proxy.stats.cuts, proxy.stats.heals, proxy.stats.resets) == (1, 1, 1)


async def test_a_cut_just_after_connecting_leaks_nothing() -> None:
    """A connection that was accepted but not yet served is reset as well."""
    async with line(Server()) as proxy:
        for _ in range(20):
            raw = socket.create_connection(proxy.address)
            with raw:
                proxy._accept()  # the loop has had no turn: its task has not begun
                proxy.cut()
                raw.setblocking(False)
                with pytest.raises(ConnectionResetError):
                    await asyncio.wait_for(asyncio.get_running_loop().sock_recv(raw, 1), LIMIT_S)
            proxy.heal()
        assert proxy.open_connections == 0
        assert proxy.stats.resets == 20


async def test_a_black_hole_answers_nobody_until_healed() -> None:
    """What is open is reset; a new connect hangs, and completes after healing."""
    async with line(Server()) as proxy:
        async with client(proxy) as (reader, writer):
            writer.write(b"x")
            assert await reader.read(1) == b"x"
            proxy.cut("blackhole")
            with pytest.raises(ConnectionResetError):
                await reader.read()
        waiting = [asyncio.ensure_future(asyncio.open_connection(*proxy.address)) for _ in "ab"]
        done, _ = await asyncio.wait(waiting, timeout=2 * SOON_S)
        assert not done
        proxy.heal()
        async with asyncio.timeout(LIMIT_S):  # the kernel tries again after 1 s, 3 s, ...
            for reader, writer in await asyncio.gather(*waiting):
                writer.write(b"late")
                assert await reader.readexactly(4) == b"late"
                writer.close()
                await writer.wait_closed()


async def test_cuts_can_follow_each_other() -> None:
    """From one mode to the other and back, the port stays ours."""
    async with line(Server()) as proxy:
        for mode in ("refuse", "blackhole", "blackhole", "refuse"):
            proxy.cut(mode)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*proxy.address)
        proxy.heal()
        proxy.heal()
        assert await exchange(proxy, b"x") == b"x"


# ---- slow and silent ---------------------------------------------------------------


async def test_a_delay_holds_bytes_back_without_serialising_them() -> None:
    """A round trip takes twice the delay; messages sent meanwhile do not add up."""
    loop = asyncio.get_running_loop()
    async with line(Server()) as proxy, client(proxy) as (reader, writer):
        proxy.delay(0.15)
        start = loop.time()
        for _ in range(20):
            writer.write(b"0123456789")
            await asyncio.sleep(0.005)
        assert await reader.readexactly(200) == b"0123456789" * 20
        assert 0.3 <= loop.time() - start < 20 * 0.15
        assert proxy.stats.delayed_chunks >= 2


async def test_a_delay_can_be_one_way_and_ends_with_healing() -> None:
    """The server hears at once; the answer is held back, and let go by healing."""
    server = Server()
    async with line(server) as proxy, client(proxy) as (reader, writer):
        proxy.delay(600.0, 1.0, direction="to_client")
        writer.write(b"ping")
        await server.until(lambda s: s.received == [b"ping"])
        await no_bytes(reader)
        proxy.heal()
        assert await reader.readexactly(4) == b"ping"


@pytest.mark.parametrize("direction", ["both", "to_server", "to_client"])
async def test_a_stall_is_silent_and_loses_nothing(direction: Directions) -> None:
    """Connections are accepted and stay open, nothing passes, and after healing
    everything arrives in order."""
    server = Server()
    data = noise(100_000)
    async with line(server) as proxy:
        proxy.stall(direction=direction)
        async with client(proxy) as (reader, writer):
            writer.write(data)
            await no_bytes(reader)
            arrived = b"".join(server.received)
            if direction == "to_client":
                await server.until(lambda s: s.received == [data])
            else:
                assert arrived == b""
            proxy.heal()
            assert await reader.readexactly(len(data)) == data
        assert (proxy.stats.stalls, proxy.stats.resets) == (1, 0)


async def test_a_throttle_bounds_the_rate() -> None:
    """100 kB at 200 kB/s take about half a second; the other way is not slowed."""
    loop = asyncio.get_running_loop()
    data = noise(100_000)
    server = Server()
    async with line(server) as proxy:
        proxy.throttle(200_000, direction="to_client")
        start = loop.time()
        async with client(proxy) as (reader, writer):
            writer.write(data)
            await server.until(lambda s: s.received == [data])
            assert proxy.stats.bytes_to_client < len(data)
            assert await reader.readexactly(len(data)) == data
        assert 0.4 <= loop.time() - start < 5.0
        assert proxy.stats.throttled_chunks > 10


async def test_a_throttle_is_lifted_by_healing() -> None:
    """A byte per minute, until somebody ends it."""
    async with line(Server()) as proxy, client(proxy) as (reader, writer):
        proxy.throttle(1 / 60)
        writer.write(b"abc")
        assert await reader.read(3) == b"a"  # the first may pass at once
        await no_bytes(reader)
        proxy.heal()
        assert await reader.readexactly(2) == b"bc"


# ---- dropped and truncated -----------------------------------------------------------


async def test_drops_come_at_the_byte_that_the_seed_says() -> None:
    """Which connections are reset, and after how many bytes, follows from the seed."""
    seed, count, size = 7, 24, 5_000
    server = Server(echo=False)
    async with line(server, seed=seed) as proxy:
        proxy.drop(0.5, within_bytes=size - 1, direction="to_server")
        sent_bytes = 0
        dropped = 0
        for number in range(count):
            point = drop_point(seed, number, 0.5, size - 1, "to_server")
            async with client(proxy) as (reader, writer):
                writer.write(noise(size))
                if point is None:
                    writer.write_eof()
                    assert await reader.read() == b"", f"seed {seed}"
                else:
                    dropped += 1
                    with pytest.raises(ConnectionResetError):
                        await reader.read()
            sent_bytes += size if point is None else point[1]
            assert proxy.stats.bytes_to_server == sent_bytes, f"seed {seed}"
        assert 0 < dropped < count
        assert proxy.stats.dropped == proxy.stats.resets == dropped
        await server.until(lambda s: s.ends.count("reset") == dropped)


async def test_a_drop_holds_for_connections_that_are_open() -> None:
    """The bytes are counted from the moment it was asked for."""
    seed = 3
    async with line(Server(), seed=seed) as proxy, client(proxy) as (reader, writer):
        writer.write(bytes(1000))
        await reader.readexactly(1000)
        proxy.drop(1.0, within_bytes=50, direction="to_client")
        point = drop_point(seed, 0, 1.0, 50, "to_client")
        assert point is not None
        writer.write(bytes(1000))
        with pytest.raises(ConnectionResetError):
            await reader.readexactly(1000)
        assert proxy.stats.bytes_to_client == 1000 + point[1], f"seed {seed}"


async def test_a_truncated_answer_ends_in_good_order() -> None:
    """The client gets exactly the first bytes and an ordinary end; nothing is reset."""
    data = noise(300_000)
    async with line(Server()) as proxy:
        proxy.truncate(12_345, direction="to_client")
        assert await exchange(proxy, data) == data[:12_345]
        await until_idle(proxy)
        assert (proxy.stats.truncated, proxy.stats.resets) == (1, 0)
        assert proxy.stats.discarded_bytes == len(data) - 12_345


async def test_a_truncated_request_and_an_open_connection() -> None:
    """Bytes are counted from the call on; zero ends the stream at once."""
    server = Server(echo=False)
    async with line(server) as proxy, client(proxy) as (reader, writer):
        writer.write(b"before")
        await server.until(lambda s: s.received == [b"before"])
        proxy.truncate(2, direction="to_server")
        writer.write(b"XYZ")
        await server.until(lambda s: s.ends == ["eof"])
        assert server.received[0] == b"beforeXY"
        assert await reader.read() == b""
        proxy.heal()
        proxy.truncate(0, direction="to_server")
        async with client(proxy) as (_, second):
            second.write(b"never")
            await server.until(lambda s: s.ends == ["eof", "eof"])
            assert server.received[1] == b""


async def test_healing_calls_off_ends_that_have_not_come() -> None:
    """A connection that was to be dropped or truncated later lives on."""
    async with line(Server()) as proxy, client(proxy) as (reader, writer):
        writer.write(b"x")
        assert await reader.read(1) == b"x"
        proxy.drop(1.0, within_bytes=5_000)
        proxy.truncate(10_000)
        proxy.heal()
        data = noise(50_000)
        writer.write(data)
        assert await reader.readexactly(len(data)) == data
        assert (proxy.stats.dropped, proxy.stats.truncated) == (0, 0)


# ---- corruption ----------------------------------------------------------------------


def mismatches(sent: bytes, got: bytes) -> int:
    """How many bytes differ; each by exactly one bit."""
    assert len(sent) == len(got)
    wrong = [a ^ b for a, b in zip(sent, got, strict=True) if a != b]
    assert all(bits.bit_count() == 1 for bits in wrong)
    return len(wrong)


@pytest.mark.parametrize(
    "how", [{"probability": 0.001}, {"every_bytes": 1000}, {"probability": 1.0}]
)
@pytest.mark.parametrize("direction", ["to_server", "to_client"])
async def test_every_flip_is_counted(how: dict[str, float], direction: Directions) -> None:
    """N flips counted are N bytes that differ by a bit, on the side that was asked for."""
    seed = 5
    data = noise(200_000)
    server = Server()
    async with line(server, seed=seed) as proxy:
        proxy.corrupt(direction=direction, **how)  # type: ignore[arg-type]
        answer = await exchange(proxy, data)
        to_server = mismatches(data, bytes(server.received[0]))
        to_client = mismatches(bytes(server.received[0]), answer)
        assert to_server == proxy.stats.flips_to_server, f"seed {seed}"
        assert to_client == proxy.stats.flips_to_client, f"seed {seed}"
        assert proxy.stats.flips == to_server + to_client > 100
        assert (to_client if direction == "to_server" else to_server) == 0


async def test_corruption_replays_from_its_seed_whatever_the_chunks() -> None:
    """Position by byte offset: the same seed flips the same bits of a stream that is sent
    in other pieces, and another seed flips others."""
    data = noise(60_000)

    async def seen(seed: int, chunk: int) -> bytes:
        server = Server(echo=False)
        async with line(server, seed=seed) as proxy:
            proxy.corrupt(0.01, direction="to_server")
            await exchange(proxy, data, chunk)
            return bytes(server.received[0])

    first = await seen(1, 60_000)
    assert first != data
    assert await seen(1, 977) == first
    assert await seen(2, 60_000) != first


async def test_corruption_can_be_switched_off() -> None:
    """A probability of nothing is a healthy line again, in an open connection too."""
    async with line(Server()) as proxy, client(proxy) as (reader, writer):
        proxy.corrupt(1.0)
        writer.write(b"abc")
        assert await reader.readexactly(3) != b"abc"
        proxy.corrupt(0.0)
        writer.write(b"abc")
        assert await reader.readexactly(3) == b"abc"


# ---- a conversation under faults -------------------------------------------------------


async def test_a_conversation_is_right_or_broken_but_never_wrong() -> None:
    """Requests and answers, as with a key-value server, over a line that drops, delays and
    is cut: every answer that arrives in full is the right one."""
    seed = 2024
    store: dict[bytes, bytes] = {}

    async def serve(reader: Reader, writer: Writer) -> None:
        with contextlib.suppress(ConnectionError):
            while request := await reader.readline():
                verb, key, value = request.split()
                if verb == b"SET":
                    store[key] = value
                writer.write(store.get(key, b"-") + b"\n")
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, Proxy(*server.sockets[0].getsockname(), seed=seed) as proxy:
        proxy.drop(0.5, within_bytes=2_000)
        proxy.delay(0.0, 0.002)
        right = broken = 0
        async with asyncio.timeout(LIMIT_S * 3):
            while right < 300:
                if right % 100 == 50:
                    proxy.cut()
                    proxy.heal()
                    proxy.drop(0.5, within_bytes=2_000)
                with contextlib.suppress(ConnectionError):
                    async with client(proxy) as (reader, writer):
                        for _ in range(20):
                            key, value = b"k%d" % (right % 7), b"v%d" % right
                            for verb in (b"SET", b"GET"):
                                writer.write(b"%s %s %s\n" % (verb, key, value))
                                answer = await reader.readline()
                                if not answer.endswith(b"\n"):
                                    raise ConnectionResetError
                                assert answer == value + b"\n", f"seed {seed}"
                            right += 1
                    continue
                broken += 1
        assert broken > 0
        assert proxy.stats.dropped > 0


# ---- without an event loop ---------------------------------------------------------------


def test_a_proxy_in_a_thread_serves_code_without_a_loop() -> None:
    """Faults, counters and errors reach plain synchronous code."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with ProxyThread(*listener.getsockname(), seed=1) as proxy:
            with socket.create_connection(proxy.address, timeout=LIMIT_S) as sock:
                peer, _ = listener.accept()
                with peer:
                    sock.sendall(b"over")
                    assert peer.recv(4) == b"over"
                    proxy.do(lambda line: line.cut())
                    with pytest.raises(ConnectionResetError):
                        sock.recv(1)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(proxy.address)
            with pytest.raises(Mistake, match="explode"):
                proxy.do(lambda line: line.cut("explode"))  # type: ignore[arg-type]
            proxy.do(lambda line: line.heal())
            assert (proxy.stats.cuts, proxy.stats.bytes_to_server) == (1, 4)
        with pytest.raises(Mistake, match="does not run"):
            proxy.do(lambda line: line.heal())
        with (
            pytest.raises(Unavailable),
            ProxyThread("x", 1, listen_port=listener.getsockname()[1]),
        ):
            pass


# ---- mistakes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda p: p.cut("softly"),
        lambda p: p.delay(-1.0),
        lambda p: p.delay(float("nan")),
        lambda p: p.drop(1.5),
        lambda p: p.drop(0.5, within_bytes=0),
        lambda p: p.drop(0.5, direction="up"),
        lambda p: p.stall(direction="up"),
        lambda p: p.corrupt(-0.1),
        lambda p: p.corrupt(0.1, every_bytes=10),
        lambda p: p.throttle(0),
        lambda p: p.truncate(-1),
    ],
)
async def test_senseless_faults_are_refused(call: Callable[[Proxy], None]) -> None:
    """A fault that could not happen is the caller's mistake, and changes nothing."""
    async with line(Server()) as proxy:
        with pytest.raises(Mistake):
            call(proxy)
        assert await exchange(proxy, b"fine") == b"fine"


async def test_a_proxy_that_does_not_run_says_so() -> None:
    """Before start and after close there is no address and no fault."""
    proxy = Proxy("127.0.0.1", 1)
    for call in (proxy.cut, proxy.heal, lambda: proxy.address):
        with pytest.raises(Mistake, match="does not run"):
            call()
    await proxy.start()
    await proxy.close()
    await proxy.close()
    with pytest.raises(Mistake, match="does not run"):
        proxy.cut()
