"""Serve an ASGI application, with the signals and the order of ending left to the caller."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn

from holdfast.errors import Mistake
from holdfast.timeouts import DEFAULTS

__all__ = ["Asgi", "serve_asgi"]


class Asgi(uvicorn.Server):
    """A server that takes no signals: they are the process's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override,unused-ignore]
        """Leave them alone."""
        yield


@contextlib.asynccontextmanager
async def serve_asgi(
    app: Any,
    *,
    host: str = "",
    port: int = 0,
    listening: socket.socket | None = None,
) -> "AsyncIterator[tuple[Asgi, asyncio.Task[None]]]":
    """Serve meanwhile, at an address or at a socket that listens already.

    The task ends only if serving does, and then with a `Mistake` that says why. At the end,
    requests that are being answered have `serve_drain_s`; set `force_exit` to keep none waiting.
    """
    server = Asgi(
        uvicorn.Config(
            app,
            host=host,
            port=port,
            lifespan="off",
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=round(DEFAULTS.serve_drain_s),
        )
    )

    async def serve() -> None:
        try:
            await server.serve([listening] if listening is not None else None)
        except SystemExit:  # what uvicorn does when it cannot listen
            raise Mistake(f"could not listen at {host}:{port}: is the port taken?") from None
        if not server.should_exit:
            raise Mistake("the server ended by itself")

    task = asyncio.create_task(serve(), name="http")
    try:
        yield server, task
    finally:
        server.should_exit = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DEFAULTS.serve_drain_s + 1):
                await asyncio.gather(task, return_exceptions=True)
