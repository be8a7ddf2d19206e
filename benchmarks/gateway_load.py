"""A load generator that costs little: bytes out, so many bytes back, times in between.

Answers are told by their length, which is the same for all of them: the first one is read to
find it out. So one process keeps up with a proxy written in C.
"""

import asyncio
import socket
import time
from collections import deque
from typing import cast

__all__ = ["Load", "Result", "sink", "upload"]


class Result:
    """What was measured."""

    def __init__(self, times: list[float], seconds: float) -> None:
        self.times = sorted(times)
        self.count = len(times)
        self.per_s = len(times) / seconds

    def quantile(self, part: float) -> float:
        return self.times[min(len(self.times) - 1, int(part * len(self.times)))]


class _Line(asyncio.Protocol):
    """One connection with one request in flight."""

    def __init__(self, load: "Load") -> None:
        self._load = load
        self._left = 0
        self.began = 0.0
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are not asyncio's

    def send(self, began: float) -> None:
        self.began = began
        self._left = self._load.answer_bytes
        self.transport.write(self._load.request)

    def data_received(self, data: bytes) -> None:
        self._left -= len(data)
        if self._left == 0:
            self._load.on_answer(self)
        elif self._left < 0:
            raise AssertionError(f"an answer of another length: {data[:300]!r}")

    def connection_lost(self, error: Exception | None) -> None:
        self._load.on_lost(error)


class Load:
    """Requests to one port."""

    def __init__(self, port: int, request: bytes, connections: int) -> None:
        self._port = port
        self.request = request
        self._connections = connections
        self.answer_bytes = 0
        self._times: list[float] = []
        self._free: deque[_Line] = deque()
        self._due: deque[float] = deque()
        self._endless = False
        self._closing = False
        self.problem: str | None = None

    async def wait_until_there(self, limit_s: float = 20.0) -> None:
        deadline = time.perf_counter() + limit_s
        while True:
            try:
                await self._learn()
                return
            except (OSError, AssertionError):
                if time.perf_counter() > deadline:
                    raise
                await asyncio.sleep(0.05)

    async def _learn(self) -> None:
        """Find out how long an answer is, and that it is a good one."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(self.request)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        lines = head.lower().split(b"\r\n")
        length = next(int(one[15:]) for one in lines if one.startswith(b"content-length:"))
        await reader.readexactly(length)
        self.answer_bytes = len(head) + length
        writer.close()

    async def _open(self) -> None:
        await self._learn()
        loop = asyncio.get_running_loop()
        for _ in range(self._connections):
            _, line = await loop.create_connection(lambda: _Line(self), "127.0.0.1", self._port)
            self._free.append(line)

    def _close(self) -> None:
        self._closing = True
        for line in self._free:
            line.transport.close()
        if self.problem:
            raise AssertionError(self.problem)

    def on_lost(self, error: Exception | None) -> None:
        if not self._closing:
            self.problem = f"a connection was lost: {error}"

    def on_answer(self, line: _Line) -> None:
        now = time.perf_counter()
        self._times.append(now - line.began)
        if self._endless:
            line.send(now)
        elif self._due:
            line.send(self._due.popleft())
        else:
            self._free.append(line)

    async def flat_out(self, warm_s: float, seconds: float) -> Result:
        """As much as it takes, on all connections."""
        await self._open()
        self._endless = True
        now = time.perf_counter()
        while self._free:
            self._free.popleft().send(now)
        await asyncio.sleep(warm_s)
        self._times.clear()
        began = time.perf_counter()
        await asyncio.sleep(seconds)
        result = Result(self._times, time.perf_counter() - began)
        self._endless = False
        await self._drain()
        return result

    async def at(self, rate: float, warm_s: float, seconds: float) -> Result:
        """So many per second, each at its time, whether the others are answered or not."""
        await self._open()
        began = time.perf_counter()
        sent, warm = 0, int(rate * warm_s)
        while sent < rate * (warm_s + seconds):
            now = time.perf_counter()
            while sent < (now - began) * rate:
                due = began + sent / rate
                sent += 1
                if sent == warm:
                    self._times.clear()
                if self._free:
                    self._free.popleft().send(due)
                else:
                    self._due.append(due)
            await asyncio.sleep(max(0.0, began + sent / rate - time.perf_counter()))
        await self._drain()
        return Result(self._times, seconds)

    async def _drain(self) -> None:
        async with asyncio.timeout(30):
            while len(self._free) < self._connections:  # noqa: ASYNC110 -- it is over soon
                await asyncio.sleep(0.01)
        self._close()


class _Sink(asyncio.BufferedProtocol):
    """Takes a body and says so."""

    def __init__(self) -> None:
        self._buffer = bytearray(1 << 20)
        self._head = b""
        self._left = -1
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, _sizehint: int) -> memoryview:
        return memoryview(self._buffer)

    def buffer_updated(self, nbytes: int) -> None:
        if self._left < 0:
            self._head += self._buffer[:nbytes]
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            lines = self._head[:end].lower().split(b"\r\n")
            length = next(int(one[15:]) for one in lines if one.startswith(b"content-length:"))
            if b"100-continue" in self._head[:end].lower():
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._left = length - (len(self._head) - end - 4)
            self._head = b""
        else:
            self._left -= nbytes
        if self._left == 0:
            self._left = -1
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")


async def sink(port: int) -> asyncio.Server:
    """A server that takes bodies as fast as they come."""
    return await asyncio.get_running_loop().create_server(_Sink, "127.0.0.1", port)


def upload(port: int, head: bytes, nbytes: int) -> float:
    """Send one body; bytes per second until its answer."""
    piece = memoryview(bytes(1 << 20))
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        began = time.perf_counter()
        connection.sendall(head)
        for _ in range(nbytes // len(piece)):
            connection.sendall(piece)
        answer = b""
        while b"\r\n\r\n" not in answer or not answer.endswith((b"ok", b"}")):
            got = connection.recv(65536)
            assert got, answer
            answer += got
        took = time.perf_counter() - began
    assert b" 200 " in answer.split(b"\r\n", 1)[0], answer
    return nbytes / took
