"""Bodies in memory: those that were refused are gone, and all of them together have a bound."""

import asyncio
import contextlib
import gc
import json
import socket
import tracemalloc
from collections.abc import AsyncIterator, Iterator

import pytest
import zstandard

from holdfast.proc.asgi import serve_asgi
from holdfast.trainer.app import App
from holdfast.trainer.service import NOT_NEEDED, NUMBERED, WITH_DATA, Bases, Request, Service
from holdfast.trainer.wire.answers import Offer
from holdfast.trainer.wire.body import JSON, PROTOBUF, Budget, Limits
from trainer.living import STEP, begin_model, living

LARGE = 1 << 18
SMALL = Limits(body_bytes=1 << 20, plain_bytes=2 << 20, all_bytes=3 << 20)


class NoBases(Bases):
    """A service that has no models."""

    def offers(self) -> list[Offer]:
        return []

    def about(self, base: str) -> tuple[str, str]:
        return base, base

    async def probe(self) -> None:
        """Nothing."""


@contextlib.asynccontextmanager
async def serving(limits: Limits) -> AsyncIterator[tuple[Service, App, int]]:
    """A trainer behind a real HTTP server."""
    async with living() as there:
        service = Service(there.core, there.upkeep, NoBases(), limits=limits)
        app = App(service, limits)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            async with serve_asgi(app, listening=listening) as (server, _):
                server.force_exit = True
                yield service, app, listening.getsockname()[1]


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """What is only freed by the collector of cycles is not freed."""
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()
        gc.enable()


BODIES = {
    "blanks": (b" " * LARGE, JSON),
    "cut short": (b'{"model_id":"m","seq_id":1,"x":"' + b"a" * LARGE, JSON),
    "a list": (b'["' + b"a" * LARGE + b'"]', JSON),
    "NaN": (b'{"model_id":"m","seq_id":1,"path":NaN,"x":"' + b"a" * LARGE + b'"}', JSON),
    "protobuf": (b"\x0a\xff\xff\xff\x7f" + b"a" * LARGE, PROTOBUF),
}


@pytest.mark.parametrize("what", BODIES)
async def test_a_refused_body_is_freed_at_once(what: str) -> None:
    """By every endpoint: nothing of it waits for the collector of cycles."""
    plain, kind = BODIES[what]
    raw = zstandard.compress(plain)
    async with living() as there:
        service = Service(there.core, there.upkeep, NoBases())
        headers = {"content-type": kind, "content-encoding": "zstd"}
        with without_collector():
            for name in (*service._posts, *NUMBERED, *WITH_DATA, *NOT_NEEDED):
                before, _ = tracemalloc.get_traced_memory()
                await service.answer(Request("POST", f"/api/v1/{name}", headers, raw))
                kept = tracemalloc.get_traced_memory()[0] - before
                assert kept < LARGE // 2, f"{name} keeps {kept} bytes"


@pytest.mark.parametrize("why", ["all bodies", "operations waiting"])
async def test_a_body_that_is_put_off_is_freed_at_once(why: str) -> None:
    """A 503 keeps nothing of the body until it comes again."""
    tags = {"tags": ["a" * LARGE], "model_id": "", "seq_id": 2, "adam_params": {}}
    async with living(max_waiting=1) as there:
        core = there.core
        there.compute.may_end.clear()
        tags["model_id"] = model = await begin_model(core)
        await core.submit(model, 1, STEP)
        service = Service(core, there.upkeep, NoBases())
        budget = Budget(0 if why == "all bodies" else 1 << 30)
        raw = zstandard.compress(json.dumps(tags).encode())
        headers = {"content-type": JSON, "content-encoding": "zstd"}
        with without_collector(), budget.share() as share:
            request = Request("POST", "/api/v1/optim_step", headers, raw, share=share)
            answer = await service.answer(request)
            kept, _ = tracemalloc.get_traced_memory()
        assert answer.status == 503
        assert why in answer.body.decode()
        assert kept < LARGE // 2


class Caller:
    """Sends a body in pieces over a connection of its own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    @contextlib.asynccontextmanager
    async def begin(cls, port: int, length: int) -> "AsyncIterator[Caller]":
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST /api/v1/create_session HTTP/1.1\r\nhost: x\r\ncontent-length: {length}"
        writer.write(head.encode() + b"\r\n\r\n")
        try:
            yield cls(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def send(self, piece: bytes) -> None:
        self._writer.write(piece)

    async def answer(self) -> tuple[int, dict[str, str], dict[str, object]]:
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        headers = dict(line.split(": ", 1) for line in head[1:] if line)
        body = await self._reader.readexactly(int(headers["content-length"]))
        return int(head[0].split()[1]), headers, json.loads(body)


async def test_all_bodies_together_have_a_bound() -> None:
    """While the bodies of others fill the bound, one more is put off with 503 and comes through
    when it is sent again; those that were there first come through as well."""
    body = b'{"tags":[]}' + b" " * (SMALL.body_bytes - 11)
    count = SMALL.all_bytes // len(body)
    async with serving(SMALL) as (_, app, port), contextlib.AsyncExitStack() as stack:

        async def caller() -> Caller:
            return await stack.enter_async_context(Caller.begin(port, len(body)))

        first = [await caller() for _ in range(count)]
        for one in first:
            one.send(body[:-1])
        while app._budget.held_bytes < count * (len(body) - 1):
            await asyncio.sleep(0.01)
        late = await caller()
        late.send(body)
        status, headers, told = await late.answer()
        assert (status, headers["connection"]) == (503, "close"), told
        assert int(headers["retry-after-ms"]) >= 1000
        assert str(SMALL.all_bytes) in str(told)
        assert app._budget.held_bytes == count * (len(body) - 1)
        for one in first:
            one.send(body[-1:])
            assert (await one.answer())[0] == 200
        again = await caller()
        again.send(body)
        assert (await again.answer())[0] == 200
        while app._budget.held_bytes:
            await asyncio.sleep(0.01)


async def test_what_is_decompressed_counts() -> None:
    """A body that is small on the wire takes its share when it is decompressed."""
    packed = zstandard.compress(b'{"tags":[]}' + b" " * (SMALL.plain_bytes - 11))
    headers = {"content-type": JSON, "content-encoding": "zstd"}
    async with serving(SMALL) as (service, app, _):
        with app._budget.share() as others, app._budget.share() as share:
            others.take(SMALL.all_bytes - SMALL.plain_bytes + 1)
            request = Request("POST", "/api/v1/create_session", headers, packed, share=share)
            assert (await service.answer(request)).status == 503
        with app._budget.share() as share:
            request = Request("POST", "/api/v1/create_session", headers, packed, share=share)
            assert (await service.answer(request)).status == 200
            assert app._budget.held_bytes == SMALL.plain_bytes
        assert app._budget.held_bytes == 0
