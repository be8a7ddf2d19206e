"""Connections of servers in a test's own loop: none outlives its server.

A connection that is still being accepted when its server closes is known to nobody, and its
transport would be reported, unclosed, in the middle of some later test.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def listening(handler: Handler, **options: Any) -> AsyncIterator[int]:
    """A server at this port of loopback, and its end with all its connections."""
    server = await asyncio.start_server(handler, "127.0.0.1", 0, **options)
    port = int(server.sockets[0].getsockname()[1])
    async with server:
        yield port
    await hang_up(port)


async def hang_up(port: int) -> None:
    """End every connection that this loop's server at a port still has."""
    loop: Any = asyncio.get_running_loop()
    for _ in range(5):  # as many turns as a connection takes until its transport is there
        await asyncio.sleep(0)
    for one in list(loop._transports.values()):
        if _is_at(one, port):
            one.abort()
    await asyncio.sleep(0)  # in which those that were aborted close


def _is_at(transport: asyncio.Transport, port: int) -> bool:
    return (transport.get_extra_info("sockname") or (None, None))[1] == port
