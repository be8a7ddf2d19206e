"""A transport that takes new connections once the other side has refused one.

Some load balancers answer 400 with nothing in it when they are done with a connection. The
client libraries then make a new HTTP client, which would go on with the same connections if
they were handed one of ours. So this sees the empty 400 as well: from then on requests go out
on new connections. Those that are under way stay where they are; the old connections are
closed with the last of them.
"""

from collections.abc import AsyncIterator, Awaitable, Callable

import httpx

__all__ = ["RenewingTransport"]


class RenewingTransport(httpx.AsyncBaseTransport):
    """Sends with what `make` gives, and with a new one after every empty 400."""

    def __init__(self, make: Callable[[], httpx.AsyncBaseTransport]) -> None:
        self._make = make
        self._now = _Connections(make())
        self._old: set[_Connections] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request. An empty 400 is the last that comes on its connections."""
        used = self._now
        used.busy += 1
        try:
            response = await used.transport.handle_async_request(request)
        except BaseException:
            await self._done(used)
            raise
        if _refused(response) and used is self._now:
            self._now = _Connections(self._make())
            self._old.add(used)
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Watched(response.stream, lambda: self._done(used))
        return response

    async def aclose(self) -> None:
        """Close all connections."""
        old, self._old = self._old, set()
        for one in (self._now, *old):
            await one.transport.aclose()

    async def _done(self, used: "_Connections") -> None:
        used.busy -= 1
        if used in self._old and not used.busy:
            self._old.discard(used)
            await used.transport.aclose()


class _Connections:
    def __init__(self, transport: httpx.AsyncBaseTransport) -> None:
        self.transport = transport
        self.busy = 0


class _Watched(httpx.AsyncByteStream):
    """A body that says, once, that it has been closed."""

    def __init__(
        self, inner: httpx.AsyncByteStream, closed: Callable[[], Awaitable[None]]
    ) -> None:
        self._inner = inner
        self._closed: Callable[[], Awaitable[None]] | None = closed

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._inner:
            yield part

    async def aclose(self) -> None:
        closed, self._closed = self._closed, None
        try:
            await self._inner.aclose()
        finally:
            if closed is not None:
                await closed()


def _refused(response: httpx.Response) -> bool:
    return response.status_code == 400 and response.headers.get("content-length", "0") == "0"
