"""The proxy between a real client and a real server: every fault, seen end to end."""

import asyncio
import signal
import socket
import struct
import sys
from collections.abc import Callable

import pytest

from holdfast.chaos.proxy import READ_AHEAD_BYTES, CutMode, Proxy, ProxyThread
from holdfast.chaos.stream import Direction, Stream, drop_point
from holdfast.errors import Mistake, Unavailable
from holdfast.proc import HeldPort, spawn
from patience import auntil

from .wires import LIMIT_S, Reader, Server, client, exchange, line, noise

SOON_S = 0.3  # long enough for a byte to arrive if it were let through


async def no_bytes(reader: Reader) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(1), SOON_S)


async def until_idle(proxy: Proxy) -> None:
    await auntil(lambda: not proxy.open_connections)


# ---- a healthy line --------------------------------------------------------------


async def test_a_healthy_line_changes_nothing() -> None:
    """Bytes and ends of streams pass as they are, both ways, and connections do not mix."""
    messages = [noise(50_000 if seed else 3_000_000, seed) for seed in range(30)]
    async with line(Server()) as proxy:
        assert await asyncio.gather(*(exchange(proxy, one) for one in messages)) == messages
        assert (
            proxy.stats.bytes_to_server == proxy.stats.bytes_to_client == 50_000 * 29 + 3_000_000
        )
        assert (proxy.stats.connections, proxy.stats.resets, proxy.stats.flips) == (30, 0, 0)


async def test_a_reset_of_one_side_reaches_the_other() -> None:
    """A client that dies in disorder is seen by the server as such."""
    server = Server()
    async with line(server) as proxy, client(proxy, heard=True) as (_, writer):
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
        async with client(proxy, heard=True) as (first, writer):
            with pytest.raises(ConnectionError):
                await exchange(proxy, b"no room")
            writer.write_eof()
            assert await first.read() == b""
        await until_idle(proxy)
        assert await exchange(proxy, b"again") == b"again"
        assert proxy.stats.turned_away == 1


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


@pytest.mark.parametrize("mode", ["refuse", "blackhole"])
async def test_a_cut_resets_what_is_open_and_lets_nobody_in(mode: CutMode) -> None:
    """Both sides see a reset; who comes is refused, or hangs until it is healed; after that the
    address is the same and works."""
    server = Server()
    async with line(server) as proxy:
        address = proxy.address
        async with client(proxy, heard=True) as (reader, _):
            proxy.cut(mode)
            with pytest.raises(ConnectionResetError):
                await reader.read()
            await server.until(lambda s: s.ends == ["reset"])
        waiting = [asyncio.ensure_future(asyncio.open_connection(*address)) for _ in "ab"]
        done, hanging = await asyncio.wait(waiting, timeout=2 * SOON_S)
        assert len(done if mode == "refuse" else hanging) == 2
        proxy.heal()
        assert proxy.address == address
        assert await exchange(proxy, b"back") == b"back"
        assert (proxy.stats.cuts, proxy.stats.heals, proxy.stats.resets) == (1, 1, 1)
        async with asyncio.timeout(LIMIT_S):  # the kernel tries again after 1 s, 3 s, ...
            for came in waiting:
                if mode == "refuse":
                    with pytest.raises(ConnectionRefusedError):
                        await came
                    continue
                reader, writer = await came
                writer.write(b"late")
                assert await reader.readexactly(4) == b"late"
                writer.close()
                await writer.wait_closed()


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
    """A round trip takes twice the delay; messages sent meanwhile do not add up, nor overtake."""
    loop = asyncio.get_running_loop()
    async with line(Server()) as proxy, client(proxy) as (reader, writer):
        proxy.delay(0.15, 0.01)
        start = loop.time()
        for number in range(20):
            writer.write(b"%10d" % number)
            await asyncio.sleep(0.005)
        assert await reader.readexactly(200) == b"".join(b"%10d" % number for number in range(20))
        assert 0.28 <= loop.time() - start < 20 * 0.15
        assert proxy.stats.delayed_chunks >= 2


@pytest.mark.parametrize(
    ("fault", "to_server", "passes"),
    [
        (lambda proxy: proxy.stall(), False, 0),
        (lambda proxy: proxy.stall(direction="to_server"), False, 0),
        (lambda proxy: proxy.stall(direction="to_client"), True, 0),
        (lambda proxy: proxy.delay(600.0, 1.0, direction="to_client"), True, 0),
        # a byte per minute, of which the first may pass at once
        (lambda proxy: proxy.throttle(1 / 60, direction="to_client"), True, 1),
    ],
)
async def test_what_is_held_back_arrives_after_healing(
    fault: Callable[[Proxy], None], to_server: bool, passes: int
) -> None:
    """Connections are accepted and stay open, nothing passes in that direction, and then
    everything arrives in order."""
    server = Server()
    data = noise(100_000)
    async with line(server) as proxy:
        fault(proxy)
        async with client(proxy) as (reader, writer):
            writer.write(data)
            assert await reader.readexactly(passes) == data[:passes]
            await no_bytes(reader)
            if to_server:
                await server.until(lambda s: s.received == [data])
            else:
                assert b"".join(server.received) == b""
            proxy.heal()
            assert await reader.readexactly(len(data) - passes) == data[passes:]
        assert proxy.stats.resets == 0


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
    async with line(Server()) as proxy, client(proxy, heard=True) as (reader, writer):
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
async def test_every_flip_is_counted(how: dict[str, float], direction: Direction) -> None:
    """N flips counted are N bytes that differ by a bit, on the side that was asked for, at the
    places that the seed says (`test_chaos_stream.py`)."""
    seed = 5
    data = noise(200_000)
    server = Server()
    async with line(server, seed=seed) as proxy:
        proxy.corrupt(direction=direction, **how)  # type: ignore[arg-type]
        answer = await exchange(proxy, data)
        assert answer == Stream(seed, 0, direction).flip(data, proxy.faults(direction))[0]
        to_server = mismatches(data, bytes(server.received[0]))
        to_client = mismatches(bytes(server.received[0]), answer)
        assert to_server == proxy.stats.flips_to_server, f"seed {seed}"
        assert to_client == proxy.stats.flips_to_client, f"seed {seed}"
        assert proxy.stats.flips == to_server + to_client > 100
        assert (to_client if direction == "to_server" else to_server) == 0


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
        with pytest.raises(Mistake, match="does not run"):
            print(proxy.address)
        with (
            pytest.raises(Unavailable, match="cannot listen"),
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
