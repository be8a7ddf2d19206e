"""A TCP proxy between a client and a real server, which breaks the line on request.

Each fault is switched on and off by a plain method call while connections are open; all
of them are ended by `heal()`. Most take a direction, so that a line can fail one way
only. Everything done is counted in `Proxy.stats`.

Invariants: the port stays ours while the line is cut; at most `max_connections` are
served at a time; what happens is decided by the seed and the order in which clients come
(`stream` says how far). A `Proxy` belongs to one event loop; `ProxyThread` is for code
without one. The proxy sees bytes, not messages.
"""

import asyncio
import dataclasses
import errno
import math
import socket
from collections.abc import Callable
from typing import Any, Literal, Self, TypeVar

from holdfast.chaos.connection import READ_AHEAD_BYTES, Connection, Stats, close_socket
from holdfast.chaos.stream import (
    DIRECTIONS,
    Direction,
    Directions,
    Faults,
    directions,
    drop_point,
)
from holdfast.errors import Mistake, Unavailable
from holdfast.loopthread import LoopThread
from holdfast.timeouts import DEFAULTS

__all__ = ["READ_AHEAD_BYTES", "CutMode", "Proxy", "ProxyThread", "Stats"]

_BACKLOG = 128

T = TypeVar("T")
CutMode = Literal["refuse", "blackhole"]


class Proxy:
    """Forwards `listen_host:listen_port` to the target; use `async with`.

    With `listen_port=0` the system chooses; `address` tells. Faults outlive connections:
    they hold for those that are open and those that come, until changed or healed.
    """

    def __init__(
        self,
        target_host: str,
        target_port: int,
        *,
        listen_host: str = "127.0.0.1",
        listen_port: int = 0,
        seed: int = 0,
        max_connections: int = 1024,
    ) -> None:
        self.target = (target_host, target_port)
        self.seed = seed
        self.stats = Stats()
        self._listen = (listen_host, listen_port)
        self._max_connections = max_connections
        self._faults: dict[Direction, Faults] = dict.fromkeys(DIRECTIONS, Faults())
        self._drop: tuple[float, int, Directions] | None = None
        self._connections: dict[int, Connection] = {}
        self._reserve: socket.socket | None = None  # keeps the port while nobody listens
        self._listener: socket.socket | None = None
        self._filler: socket.socket | None = None

    # ---- life ------------------------------------------------------------------

    async def start(self) -> None:
        """Listen. Raises `Unavailable` when the address cannot be had."""
        host, port = self._listen
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            self._reserve = _bound(found[0][0], found[0][4])
            self._open_listener(_BACKLOG)
        except OSError as error:
            await self.close()
            raise Unavailable(
                f"cannot listen on {host}:{port} ({error}): choose another address"
            ) from error

    async def close(self) -> None:
        """Stop listening and reset every connection. Closing twice does no harm."""
        self._close_listener()
        if self._reserve is not None:
            self._reserve.close()
            self._reserve = None
        connections = list(self._connections.values())
        for connection in connections:
            connection.reset()
        for connection in connections:
            await connection.ended()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def address(self) -> tuple[str, int]:
        """Where clients connect to: host and port."""
        host, port = self._reserved().getsockname()[:2]
        return host, port

    @property
    def open_connections(self) -> int:
        """How many connections are being served now."""
        return len(self._connections)

    @property
    def held_bytes(self) -> int:
        """How many bytes have been read and not yet sent on, in all connections."""
        lanes = (lane for one in self._connections.values() for lane in one.lanes)
        return sum(lane.held_bytes for lane in lanes)

    # ---- faults ----------------------------------------------------------------

    def cut(self, mode: CutMode = "refuse") -> None:
        """Reset every connection and let nobody in until `heal()`.

        New ones are refused at once (`refuse`: like a dead process), or never answered
        (`blackhole`: like a dead host; the client's connect hangs).
        """
        if mode not in ("refuse", "blackhole"):
            raise Mistake(f"a cut refuses or blackholes, it does not {mode!r}")
        reserve = self._reserved()
        self.stats.cuts += 1
        self._close_listener()
        for connection in self._connections.values():
            connection.reset()
        if mode == "blackhole":
            # A listener whose queue is full leaves every further SYN unanswered.
            self._open_listener(0)
            self._filler = socket.socket(reserve.family, socket.SOCK_STREAM)
            self._filler.setblocking(False)
            self._filler.connect_ex(reserve.getsockname())

    def heal(self) -> None:
        """End every fault. Bytes that were held back go on; what was reset stays so."""
        self._reserved()
        self.stats.heals += 1
        self._faults = dict.fromkeys(DIRECTIONS, Faults())
        self._drop = None
        for connection in self._connections.values():
            for lane in connection.lanes:
                lane.stream.drop_at = lane.stream.truncate_at = None
        if self._filler is not None:
            self._close_listener()
        if self._listener is None:
            self._open_listener(_BACKLOG)
        self._wake()

    def delay(
        self, seconds: float, jitter: float = 0.0, *, direction: Directions = "both"
    ) -> None:
        """Hold every chunk back for `seconds`, give or take `jitter`; order is kept."""
        if not (0 <= seconds < math.inf and 0 <= jitter < math.inf):
            raise Mistake(f"a delay is a time, not {seconds} ± {jitter} s")
        self._change(direction, delay_s=seconds, jitter_s=jitter)

    def drop(
        self, probability: float, *, within_bytes: int = 65_536, direction: Directions = "both"
    ) -> None:
        """Reset each connection with this probability, after 1 to `within_bytes` more bytes.

        With `both` the bytes are counted in one direction or the other, chosen by seed.
        """
        _check_probability(probability)
        if within_bytes < 1:
            raise Mistake("a connection is dropped within 1 byte or more")
        directions(direction)
        self._drop = (probability, within_bytes, direction)
        for connection in self._connections.values():
            self._plan_drop(connection)
        self._wake()

    def stall(self, *, direction: Directions = "both") -> None:
        """Forward nothing, but accept and stay silent, until `heal()`: a hang."""
        self._change(direction, stalled=True)
        self.stats.stalls += 1

    def corrupt(
        self, probability: float = 0.0, *, every_bytes: int = 0, direction: Directions = "both"
    ) -> None:
        """Flip one bit of each byte with this probability, or of one byte in `every_bytes`."""
        _check_probability(probability)
        if every_bytes < 0 or (probability and every_bytes):
            raise Mistake("give either a probability or a number of bytes for corruption")
        self._change(direction, flip_probability=probability, flip_every_bytes=every_bytes)

    def throttle(self, bytes_per_s: float, *, direction: Directions = "both") -> None:
        """Let each connection pass at most so many bytes per second, each way."""
        if not bytes_per_s > 0:
            raise Mistake("a throttle lets some bytes pass: stall() lets none")
        self._change(direction, bytes_per_s=bytes_per_s)

    def truncate(self, after_bytes: int, *, direction: Directions = "both") -> None:
        """Let each connection pass `after_bytes` more bytes, then end it in good order.

        The receiver sees an ordinary end of the stream (FIN) in the middle of whatever was
        being said; the rest is thrown away.
        """
        if after_bytes < 0:
            raise Mistake("a stream is truncated after 0 bytes or more")
        for connection in self._connections.values():
            for lane in connection.lanes:
                if lane.stream.direction in directions(direction):
                    lane.stream.truncate_at = lane.stream.offset + after_bytes
        self._change(direction, truncate_after_bytes=after_bytes)

    def faults(self, direction: Direction) -> Faults:
        """What is wrong with a direction at the moment."""
        return self._faults[direction]

    def _change(self, which: Directions, **changes: Any) -> None:
        for direction in directions(which):
            self._faults[direction] = dataclasses.replace(self._faults[direction], **changes)
        self._wake()

    def _wake(self) -> None:
        for connection in self._connections.values():
            for lane in connection.lanes:
                lane.wake.set()

    def _plan_drop(self, connection: Connection) -> None:
        point = None
        if self._drop is not None:
            probability, within_bytes, which = self._drop
            point = drop_point(self.seed, connection.number, probability, within_bytes, which)
        for lane in connection.lanes:
            hit = point is not None and lane.stream.direction == point[0]
            lane.stream.drop_at = lane.stream.offset + point[1] if point and hit else None

    # ---- accepting -------------------------------------------------------------

    def _reserved(self) -> socket.socket:
        if self._reserve is None:
            raise Mistake("the proxy does not run: use `async with Proxy(...)`")
        return self._reserve

    def _open_listener(self, backlog: int) -> None:
        reserve = self._reserved()
        self._listener = _bound(reserve.family, reserve.getsockname())
        self._listener.listen(backlog)
        if backlog:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _close_listener(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        if self._filler is not None:
            self._filler.close()
            self._filler = None

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        if self._listener is None:
            return
        try:
            client, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                raise
            # Asking again at once would spin: descriptors are freed by others, later.
            loop.remove_reader(self._listener)
            loop.call_later(DEFAULTS.chaos_look_s, self._accept_again, self._listener)
            return
        client.setblocking(False)
        if len(self._connections) >= self._max_connections:
            self.stats.turned_away += 1
            close_socket(client, reset=True)
        else:
            self._serve(client)

    def _accept_again(self, listener: socket.socket) -> None:
        if listener is self._listener:
            asyncio.get_running_loop().add_reader(listener, self._accept)

    def _serve(self, client: socket.socket) -> None:
        number = self.stats.connections
        self.stats.connections += 1
        connection = Connection(
            number, client, seed=self.seed, stats=self.stats, faults=self.faults
        )
        for lane in connection.lanes:
            lane.stream.truncate_at = self._faults[lane.stream.direction].truncate_after_bytes
        self._plan_drop(connection)
        self._connections[number] = connection
        connection.start(self.target, lambda: self._connections.pop(number))


class ProxyThread:
    """A `Proxy` with an event loop of its own in a thread; use `with`.

    Takes what `Proxy` takes. `do` runs a function on the proxy and returns its result:
    `thread.do(lambda proxy: proxy.cut())`.
    """

    def __init__(self, target_host: str, target_port: int, **options: Any) -> None:
        self._proxy = Proxy(target_host, target_port, **options)
        self._thread: LoopThread | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Where clients connect to: host and port."""
        return self._proxy.address

    @property
    def stats(self) -> Stats:
        """A copy of the counters at this moment."""
        return self.do(lambda proxy: dataclasses.replace(proxy.stats))

    def do(self, action: Callable[[Proxy], T]) -> T:
        """Run `action` in the proxy's thread, and return what it returns."""

        async def call() -> T:
            return action(self._proxy)

        if self._thread is None:
            raise Mistake("the proxy does not run: use `with ProxyThread(...)`")
        return self._thread.run(call())

    def __enter__(self) -> Self:
        self._thread = LoopThread("chaos-proxy")
        try:
            self._thread.run(self._proxy.start())
        except BaseException:
            self._thread.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.run(self._proxy.close())
            thread.stop()


def _bound(family: int, address: Any) -> socket.socket:
    """A socket on this address, beside others of ours that do not listen."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock


def _check_probability(probability: float) -> None:
    if not 0.0 <= probability <= 1.0:
        raise Mistake(f"a probability lies between 0 and 1, not at {probability}")
