"""Stopping: nothing new, what is in work is finished, the rest is cut at the deadline."""

import asyncio

import pytest

from gateway.http.wires import HOST, answers, calling, request
from holdfast.gateway.http import Exchange, Server
from patience import HANG_S, auntil


async def test_requests_in_work_are_finished() -> None:
    """New connections are refused, idle ones close, the request in work gets its answer with
    `Connection: close`, and nothing has to be cut."""
    release = asyncio.Event()
    server = Server(answers(200, b"done", after=release))
    await server.start(HOST, 0)
    port = server.port
    async with calling(port) as busy, calling(port) as idle:
        await busy.send(request() + request(target="/pipelined"))
        await auntil(lambda: server.requests == 1)
        stopping = asyncio.create_task(server.stop(10))
        assert await idle.closed()
        with pytest.raises(ConnectionError):
            await asyncio.open_connection(HOST, port)
        assert not stopping.done()
        release.set()
        answer = await busy.answer()
        assert (answer.body, answer.fields["connection"]) == (b"done", "close")
        assert await busy.closed()
        assert await asyncio.wait_for(stopping, HANG_S) == 0


async def test_what_is_left_at_the_deadline_is_cut() -> None:
    """A handler that does not end is cancelled, and its caller's connection closed."""
    cancelled = asyncio.Event()

    async def handler(_exchange: Exchange) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    server = Server(handler)
    await server.start(HOST, 0)
    async with calling(server.port) as caller:
        await caller.send(request())
        await auntil(lambda: server.requests == 1)
        assert await asyncio.wait_for(server.stop(0.1), HANG_S) == 1
        assert cancelled.is_set()
        assert await caller.closed()
    assert (server.connections, server.requests) == (0, 0)
