"""Both ends of a line with a proxy in it: real sockets, and real processes to be hurt."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeAlias

from holdfast.chaos.proxy import Proxy
from patience import HANG_S

LIMIT_S = HANG_S
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
async def client(proxy: Proxy, *, heard: bool = False) -> AsyncIterator[tuple[Reader, Writer]]:
    """A connection; with `heard`, one through which a byte has gone there and back."""
    async with asyncio.timeout(LIMIT_S):
        reader, writer = await asyncio.open_connection(*proxy.address)
        try:
            if heard:
                writer.write(b"x")
                assert await reader.read(1) == b"x"
            yield reader, writer
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def exchange(proxy: Proxy, data: bytes) -> bytes:
    """Send everything in chunks, end the stream, and read to the end meanwhile."""
    async with client(proxy) as (reader, writer):

        async def send() -> None:
            for at in range(0, len(data), 65_536):
                writer.write(data[at : at + 65_536])
                await writer.drain()
            writer.write_eof()

        _, answer = await asyncio.gather(send(), reader.read())
        return answer


def noise(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)
