"""Accepts callers and gives their requests to a handler.

Stopping is gentle: no new connections, idle ones close, requests in work are finished and
their connections closed; what is left at the deadline is cut.
"""

import asyncio
import contextlib
import itertools
import ssl as tls
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import TypeVar

from holdfast.errors import Mistake
from holdfast.gateway.http.connection import Connection
from holdfast.gateway.http.exchange import Exchange
from holdfast.gateway.http.limits import Limits
from holdfast.gateway.http.pool import Pool
from holdfast.gateway.http.shares import Shares

__all__ = ["Handler", "Server", "run"]

T = TypeVar("T")
Handler = Callable[[Exchange], Awaitable[None]]
Record = Callable[[Exception, Exchange], None]

_BACKLOG = 1024
_TICKS_PER_TIME = 4
_TICK_MOST_S = 0.5
"""How late a bound of `Limits` may be kept, at most: the clock of the engine, no setting."""


def _report(error: Exception, exchange: Exchange) -> None:
    asyncio.get_running_loop().call_exception_handler(
        {"message": f"the handler of {exchange.head.path} failed", "exception": error}
    )


class Server:
    """See the module. `record` hears of errors that a handler let pass."""

    def __init__(
        self,
        handler: Handler,
        *,
        limits: Limits | None = None,
        record: Record = _report,
    ) -> None:
        self.handler = handler
        self.limits = limits or Limits()
        self.limits.check()
        self.pool = Pool(self.limits)
        self.record = record
        self.counts: Counter[str] = Counter()
        """How often the engine refused or cut something, by code."""
        self.requests = 0
        """Requests in work."""
        self.stopping = False
        """Whether `stop` has been called."""
        self._connections: set[Connection] = set()
        self._strangers: dict[Connection, None] = {}
        """Connections without an owner, the oldest first."""
        self.owned_connections = Shares(self.limits.connections - self.limits.strangers)
        self.owned_requests = Shares(self.limits.requests)
        self.owned_polls = Shares(self.limits.polls)
        self._server: asyncio.Server | None = None
        self._ticking: asyncio.TimerHandle | None = None
        self._empty = asyncio.Event()
        self._tick_s = self._tick_length()

    @property
    def connections(self) -> int:
        """Open connections of callers."""
        return len(self._connections)

    @property
    def port(self) -> int:
        """The port that callers come to."""
        if self._server is None or not self._server.sockets:
            raise Mistake("the server has not been started")
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def start(
        self,
        host: str,
        port: int,
        *,
        reuse_port: bool = False,
        ssl: tls.SSLContext | None = None,
    ) -> None:
        """Listen. Several processes may share a port with `reuse_port`."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(self),
            host,
            port,
            backlog=_BACKLOG,
            reuse_port=reuse_port or None,
            ssl=ssl,
            ssl_handshake_timeout=self.limits.head_s if ssl else None,
        )
        self._ticking = loop.call_later(self._tick_s, self._tick)

    async def stop(self, drain_s: float = 10.0) -> int:
        """Stop; return how many requests had to be cut at the deadline."""
        self.stopping = True
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.stop()
        if self._connections:
            self._empty.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(drain_s):
                    await self._empty.wait()
        left = list(self._connections)
        cut = sum(connection.busy for connection in left)
        await asyncio.gather(*(connection.abandon() for connection in left))
        if self._ticking is not None:
            self._ticking.cancel()
        self.pool.close()
        return cut

    # From connections.

    def admit(self, connection: Connection) -> bool:
        """Take a stranger's connection in; False: there is no room for it.

        A caller that has a key says so at once. So the oldest connection that rests makes room,
        and connections that say nothing cannot keep callers out.
        """
        self._connections.add(connection)
        self._strangers[connection] = None
        if len(self._strangers) > self.limits.strangers:
            before = connection.since - self.limits.greeting_s
            old = itertools.takewhile(lambda one: one.since <= before, self._strangers)
            if (one := next((one for one in old if not one.busy), None)) is not None:
                self.counts["too_many_strangers"] += 1
                one.give_way()
                return True
        return len(self._connections) <= self.limits.connections

    def known(self, connection: Connection) -> None:
        """A connection has an owner: it is no stranger's any more."""
        self._strangers.pop(connection, None)

    def forget(self, connection: Connection) -> None:
        """A connection has ended."""
        self._connections.discard(connection)
        self._strangers.pop(connection, None)
        if not self._connections:
            self._empty.set()

    def _tick_length(self) -> float:
        limits = self.limits
        shortest = min(
            limits.head_s, limits.idle_s, limits.stranger_s, limits.pace_s, limits.linger_s
        )
        return min(_TICK_MOST_S, shortest / _TICKS_PER_TIME)

    def _tick(self) -> None:
        """One timer for all connections: their bounds are in seconds, so this is exact enough,
        and a request costs no timer of its own."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in list(self._connections):
            connection.tick(now)
        self._ticking = loop.call_later(self._tick_s, self._tick)


def run(main: Coroutine[object, object, T]) -> T:
    """Run a program on the fastest event loop that there is here: uvloop, or asyncio's own."""
    factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    with contextlib.suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)
