"""Bodies of any size pass, both ways at once, and a slow side does not fill our memory."""

import asyncio
import hashlib
import tracemalloc
from collections.abc import Callable

import pytest

from gateway.http.wires import (
    Flood,
    Passing,
    Reader,
    Seen,
    Upstream,
    Writer,
    called,
    passing,
    request,
    settled,
    upstream,
)
from holdfast.gateway.http import Limits, Relayed
from patience import auntil

SIZE = 16 * 1024 * 1024
SLOW = 200_000_000
BLOCK = hashlib.sha256(b"block").digest() * 2048  # 64 KiB


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_large_bodies_arrive_as_they_were(framing: str) -> None:
    """16 MiB up and the same bytes down at the same time (the upstream echoes while it
    reads), byte for byte."""

    async def script(_up: Upstream, reader: Reader, writer: Writer, seen: Seen) -> None:
        known = seen.get(b"content-length")
        if known is not None:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %s\r\n\r\n" % known)
            left = int(known)
            while left:
                data = await reader.read(min(left, 1 << 18))
                assert data
                left -= len(data)
                writer.write(data)
                await writer.drain()
        else:
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            size = 1
            while size:
                size = int(await reader.readuntil(b"\r\n"), 16)
                writer.write(b"%x\r\n" % size + await reader.readexactly(size + 2))
                await writer.drain()

    async with passing(script) as (_up, handler, caller):
        sent = hashlib.sha256()

        async def send() -> None:
            field = f"Content-Length: {SIZE}"
            field = field if framing == "length" else "Transfer-Encoding: chunked"
            await caller.send(request("POST", fields=[field]))
            for number in range(SIZE // len(BLOCK)):
                block = number.to_bytes(8, "big") + BLOCK[8:]
                sent.update(block)
                if framing == "chunked":
                    block = b"%x\r\n%s\r\n" % (len(block), block)
                await caller.send(block)
            if framing == "chunked":
                await caller.send(b"0\r\n\r\n")

        sending = asyncio.create_task(send())
        answer = await caller.answer()
        await sending
    assert hashlib.sha256(answer.body).digest() == sent.digest()
    assert handler.outcomes == [Relayed(200, SIZE)]


async def held_when_settled(figure: Callable[[], int]) -> int:
    """Wait until no more passes, which is before all of it did; how much memory that took."""
    tracemalloc.start()
    try:
        assert await settled(figure) < SLOW // 2
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


async def test_a_slow_caller_does_not_fill_our_memory() -> None:
    """The upstream offers 200 MB and the caller does not read: the upstream is stopped, and
    the engine holds no more than `memory_bytes`."""
    written = 0

    async def script(_up: Upstream, _reader: Reader, writer: Writer, _seen: Seen) -> None:
        nonlocal written
        writer.transport.set_write_buffer_limits(high=len(BLOCK))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % SLOW)
        for _ in range(SLOW // len(BLOCK)):
            writer.write(BLOCK)
            await writer.drain()
            written += len(BLOCK)

    async with passing(script) as (_up, _handler, caller):
        caller.writer.transport.pause_reading()  # type: ignore[attr-defined]  # a read transport, too
        await caller.send(request())
        assert await held_when_settled(lambda: written) < Limits().memory_bytes
        caller.writer.transport.resume_reading()  # type: ignore[attr-defined]
        before = written
        await caller.reader.readexactly(1_000_000)
        await auntil(lambda: written > before)  # it goes on as soon as it is read


async def test_a_slow_upstream_does_not_fill_our_memory() -> None:
    """The caller offers 200 MB and the upstream does not read: the caller is stopped."""
    done = asyncio.Event()

    async def script(_up: Upstream, reader: Reader, writer: Writer, _seen: Seen) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # a read transport, too
        await done.wait()

    async with passing(script) as (_up, _handler, caller):
        caller.writer.transport.set_write_buffer_limits(high=len(BLOCK))
        await caller.send(request("POST", fields=[f"Content-Length: {SLOW}"]))
        flood = Flood(caller, BLOCK, SLOW // len(BLOCK))
        held = await held_when_settled(lambda: flood.sent * len(BLOCK))
        flood.sending.cancel()
        assert held < Limits().memory_bytes + 2 * (1 << 20)  # the upstream's own buffer
        done.set()


async def test_a_body_that_nobody_wants_yet_is_not_read() -> None:
    """While the handler waits for something else, only a little of the body is taken in."""
    release = asyncio.Event()
    async with upstream() as up:

        async def handler(exchange: object) -> None:
            await release.wait()
            await Passing(up)(exchange)  # type: ignore[arg-type]  # it is an exchange

        async with called(handler) as caller:
            await caller.send(request("POST", fields=[f"Content-Length: {SIZE}"]))
            flood = Flood(caller, BLOCK, SIZE // len(BLOCK))
            assert await settled(lambda: flood.sent) < SIZE // len(BLOCK)
            (connection,) = caller.server._connections
            assert connection._exchange is not None
            assert connection._exchange.received_bytes <= 64 * 1024 + 256 * 1024
            release.set()
            await flood.sending
            assert (await caller.answer()).body == b"POST / %d" % SIZE
