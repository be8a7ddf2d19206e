"""Real sockets on both sides of the engine: callers that write bytes, upstreams that check
every byte that they get."""

import asyncio
import contextlib
import re
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from holdfast.gateway.http import Exchange, Forwarded, Handler, Limits, Server
from patience import auntil

Reader = asyncio.StreamReader
Writer = asyncio.StreamWriter
PATIENCE_S = 15.0
HOST = "127.0.0.1"
_START = re.compile(rb"(GET|HEAD|POST|PUT|PATCH|DELETE|OPTIONS) (/[\x21-\x7e]*) HTTP/1\.1")
_SEEN = rb"[\x21-\x7e\x80-\xff]"
_FIELD = re.compile(
    rb"([a-z0-9!#$%%&'*+\-.^_`|~]+): ((?:%s(?:[\t\x20-\x7e\x80-\xff]*%s)?)?)" % (_SEEN, _SEEN)
)


@dataclass
class Seen:
    """A request as an upstream saw it."""

    method: str
    target: str
    fields: list[tuple[bytes, bytes]]
    body: bytes = b""
    whole: bool = False

    def get(self, name: bytes) -> bytes | None:
        return dict(self.fields).get(name)


Script = Callable[["Upstream", Reader, Writer, Seen], Awaitable[None]]


def says(*raw: bytes) -> Script:
    """A script that answers with these bytes, in turn; the last of them again and again."""

    async def script(up: "Upstream", _reader: Reader, writer: Writer, _seen: Seen) -> None:
        writer.write(raw[min(len(up.seen), len(raw)) - 1])

    return script


async def polite(_upstream: "Upstream", reader: Reader, writer: Writer, seen: Seen) -> None:
    """Read the body, and answer with its size."""
    await read_body(reader, writer, seen)
    text = b"%s %s %d" % (seen.method.encode(), seen.target.encode(), len(seen.body))
    body = b"" if seen.method == "HEAD" else text
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(text), body))


@dataclass
class Upstream:
    """A server that refuses everything that we would not write ourselves."""

    script: Script = polite
    seen: list[Seen] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    connections: int = 0
    port: int = 0
    _tasks: set["asyncio.Task[None]"] = field(default_factory=set)

    @property
    def address(self) -> tuple[str, int]:
        return (HOST, self.port)

    async def serve(self, reader: Reader, writer: Writer) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while (seen := await read_request(reader)) is not None:
                self.seen.append(seen)
                await self.script(self, reader, writer, seen)
                await writer.drain()
                if writer.is_closing():
                    break
        except AssertionError as error:
            self.faults.append(str(error))
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the gateway cut the line
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    def end(self) -> None:
        for task in list(self._tasks):
            task.cancel()


@contextlib.asynccontextmanager
async def upstream(script: Script = polite) -> AsyncIterator[Upstream]:
    """A running upstream; at the end nothing that it saw may have been malformed."""
    one = Upstream(script)
    server = await asyncio.start_server(one.serve, HOST, 0, limit=1 << 20)
    one.port = server.sockets[0].getsockname()[1]
    try:
        yield one
    finally:
        server.close()
        one.end()
        await auntil(lambda: not one._tasks)
    assert not one.faults


@contextlib.asynccontextmanager
async def gate(
    handler: Handler, limits: Limits | None = None, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Server]:
    """A running engine; at the end it must have forgotten every connection and line."""
    failures: list[Exception] = []
    server = Server(handler, limits=limits, record=lambda error, _: failures.append(error))
    await server.start(HOST, 0, ssl=tls)
    try:
        yield server
    finally:
        await server.stop(0.2)
    await auntil(lambda: not server.connections and not server.requests)
    await auntil(lambda: not server.pool.open_lines)
    assert not server.pool._books, "nothing is kept of addresses without lines"
    assert not failures, failures


class Passing:
    """A handler that passes everything on and remembers what became of it."""

    def __init__(self, target: Upstream, ours: str = "", **options: object) -> None:
        self.target = target
        self.ours = ours
        """The path that is answered here, with 403."""
        self.options = options
        self.outcomes: list[Forwarded] = []

    async def __call__(self, exchange: Exchange) -> None:
        if exchange.head.path == self.ours:
            await exchange.answer(403, [], b"twelve bytes")
            return
        outcome = await exchange.forward(self.target.address, **self.options)  # type: ignore[arg-type]  # given by the test
        self.outcomes.append(outcome)
        if not exchange.answered:
            await exchange.answer(502, [], type(outcome).__name__.encode())


def answers(status: int, body: bytes = b"", after: asyncio.Event | None = None) -> Handler:
    """A handler that gives every request this answer, without reading it; not before `after`."""

    async def handler(exchange: Exchange) -> None:
        if after is not None:
            await after.wait()
        await exchange.answer(status, [], body)

    return handler


@dataclass
class Answer:
    """What a caller got."""

    status: int
    fields: dict[str, str]
    body: bytes
    interim: list[int] = field(default_factory=list)


class Caller:
    """A caller that writes bytes as they are."""

    server: Server
    """Of a caller that came with its engine."""

    def __init__(self, reader: Reader, writer: Writer) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, method: str = "GET") -> Answer:
        """Read one answer. Raises IncompleteReadError when it is cut off."""
        interim = []
        async with asyncio.timeout(PATIENCE_S):
            while True:
                raw = await self.reader.readuntil(b"\r\n\r\n")
                start, *lines = raw[:-4].decode("latin-1").split("\r\n")
                version, status, _reason = start.split(" ", 2)
                assert version == "HTTP/1.1"
                if int(status) >= 200:
                    break
                interim.append(int(status))
            pairs = [line.split(": ", 1) for line in lines]
            fields: dict[str, str] = dict(pairs)
            assert len(fields) == len(pairs), pairs
            body = await self._body(fields, int(status), method)
        return Answer(int(status), fields, body, interim)

    async def _body(self, fields: dict[str, str], status: int, method: str) -> bytes:
        if method == "HEAD" or status in (204, 304):
            return b""
        if fields.get("transfer-encoding") == "chunked":
            assert "content-length" not in fields
            return await read_chunks(self.reader)
        if "content-length" in fields:
            return await self.reader.readexactly(int(fields["content-length"]))
        return await self.reader.read()

    async def ask(self, data: bytes, method: str = "GET") -> Answer:
        """Send a request, and read its answer."""
        await self.send(data)
        return await self.answer(method)

    async def rest(self) -> bytes:
        """Everything until the connection closes."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.reader.read()

    async def closed(self) -> bool:
        """Whether the connection has been closed and nothing more was said."""
        try:
            return await self.rest() == b""
        except ConnectionError:
            return True


@contextlib.asynccontextmanager
async def calling(port: int, tls: ssl.SSLContext | None = None) -> AsyncIterator[Caller]:
    """A caller's connection."""
    reader, writer = await asyncio.open_connection(HOST, port, limit=1 << 20, ssl=tls)
    try:
        yield Caller(reader, writer)
    finally:
        writer.transport.abort()


@contextlib.asynccontextmanager
async def passing(
    script: Script = polite, limits: Limits | None = None, ours: str = "", **options: object
) -> AsyncIterator[tuple[Upstream, Passing, Caller]]:
    """An upstream, an engine that passes everything on to it, and a caller of that."""
    async with upstream(script) as up:
        handler = Passing(up, ours, **options)
        async with called(handler, limits) as caller:
            yield up, handler, caller


def self_signed(folder: Path) -> tuple[ssl.SSLContext, Path]:
    """TLS of a server on loopback, and its certificate, which nobody else vouches for."""
    key, cert = folder / "key.pem", folder / "cert.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
    names = ["-subj", "/CN=gate", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command.split(), *names, *files], check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    return context, cert


@contextlib.asynccontextmanager
async def called(handler: Handler, limits: Limits | None = None) -> AsyncIterator[Caller]:
    """An engine with this handler, and a caller of it."""
    async with gate(handler, limits) as server, calling(server.port) as caller:
        caller.server = server
        yield caller


class Flood:
    """A caller sends something again and again; `sent` times so far."""

    def __init__(self, caller: Caller, data: bytes, times: int) -> None:
        self.sent = 0
        self.sending = asyncio.create_task(self._send(caller, data, times))

    async def _send(self, caller: Caller, data: bytes, times: int) -> None:
        for _ in range(times):
            await caller.send(data)
            self.sent += 1


async def settled(figure: Callable[[], int]) -> int:
    """Wait until a figure has stopped growing: all buffers on the way are full."""
    before = -1
    while before != figure() or not figure():
        before = figure()
        await asyncio.sleep(0.4)
    return before


async def drip(caller: Caller, pieces: Iterable[bytes], heard: "asyncio.Task[Any]") -> None:
    """Send piece by piece, all the time, until the caller has heard something."""
    for piece in pieces:
        if heard.done():
            return
        caller.writer.write(piece)
        await asyncio.sleep(0.02)
    pytest.fail("the connection was kept")


async def read_request(reader: Reader) -> Seen | None:
    """The head of a request, exactly in the form in which the engine may write one."""
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    start, *lines = raw[:-4].split(b"\r\n")
    match = _START.fullmatch(start)
    assert match, f"malformed request line {start!r}"
    fields = []
    for line in lines:
        one = _FIELD.fullmatch(line)
        assert one, f"malformed field {line!r}"
        fields.append((one[1], one[2]))
    names = [name for name, _ in fields]
    framing = [name for name in names if name in (b"content-length", b"transfer-encoding")]
    assert len(framing) <= 1, f"framed twice: {fields}"
    assert names.count(b"host") == 1, fields
    hop = {b"connection", b"keep-alive", b"te", b"trailer", b"upgrade"} & set(names)
    assert not hop, f"passed on: {hop}"
    assert not [name for name in names if name.startswith(b"proxy-")]
    return Seen(match[1].decode(), match[2].decode(), fields)


async def read_chunks(reader: Reader) -> bytes:
    """A chunked body, exactly in the form in which the engine may write one."""
    body = b""
    while True:
        line = await reader.readuntil(b"\r\n")
        assert re.fullmatch(rb"(0|[1-9a-f][0-9a-f]*)\r\n", line), f"malformed size {line!r}"
        piece = await reader.readexactly(int(line, 16) + 2)
        assert piece.endswith(b"\r\n")
        if piece == b"\r\n":
            return body
        body += piece[:-2]


async def read_body(reader: Reader, writer: Writer, seen: Seen) -> None:
    """The body, as the head frames it."""
    if seen.get(b"expect") is not None:
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    if seen.get(b"transfer-encoding") is not None:
        assert seen.get(b"transfer-encoding") == b"chunked"
        seen.body = await read_chunks(reader)
    elif (length := seen.get(b"content-length")) is not None:
        seen.body = await reader.readexactly(int(length))
    seen.whole = True


def request(
    method: str = "GET",
    target: str = "/",
    fields: Iterable[str] = (),
    body: bytes = b"",
    host: str = "gate",
) -> bytes:
    """A request as a decent caller writes it."""
    lines = [f"{method} {target} HTTP/1.1", f"Host: {host}", *fields]
    if body:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def chunked(*pieces: bytes) -> bytes:
    """A chunked body."""
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in (*pieces, b""))
