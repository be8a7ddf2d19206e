"""One connection through the proxy: two lanes of bytes, and the faults upon them.

Invariants: a lane holds at most `READ_AHEAD_BYTES`, so that back-pressure reaches the
sender (the kernel's own socket buffers come on top); bytes keep their order; an end in
good order on one side is passed on as such, and any other end is a reset on both sides.
Sockets are closed only when no task waits on them any more.
"""

import asyncio
import contextlib
import dataclasses
import math
import socket
import struct
from collections import deque
from collections.abc import Callable

from holdfast.chaos.stream import DIRECTIONS, Direction, Faults, Stream
from holdfast.timeouts import DEFAULTS

__all__ = ["READ_AHEAD_BYTES", "Connection", "Lane", "Stats", "close_socket"]

READ_AHEAD_BYTES = 256 * 1024
_CHUNK_BYTES = 64 * 1024
_CHUNKS_MAX = 1024
_THROTTLE_TICK_S = 0.02
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER of 0 s: close() sends RST


@dataclasses.dataclass(slots=True)
class Stats:
    """Counters of everything that a proxy has done."""

    connections: int = 0  # accepted
    turned_away: int = 0  # above the limit of connections
    target_failures: int = 0  # the server could not be reached
    resets: int = 0  # connections that ended by RST, whoever began it
    cuts: int = 0
    heals: int = 0
    stalls: int = 0
    delayed_chunks: int = 0
    throttled_chunks: int = 0
    dropped: int = 0
    truncated: int = 0
    discarded_bytes: int = 0
    flips_to_server: int = 0
    flips_to_client: int = 0
    bytes_to_server: int = 0
    bytes_to_client: int = 0

    @property
    def flips(self) -> int:
        """Bits flipped in either direction."""
        return self.flips_to_server + self.flips_to_client

    def sent(self, direction: Direction, size: int, flips: int) -> None:
        """Count bytes that were handed to the kernel."""
        if direction == "to_server":
            self.bytes_to_server += size
            self.flips_to_server += flips
        else:
            self.bytes_to_client += size
            self.flips_to_client += flips


class Dropped(Exception):
    """The stream has reached the byte at which it is to be dropped."""


class Connection:
    """A client, its connection to the server, and the two lanes between them.

    `faults` tells what is wrong with a direction at the moment it is asked.
    """

    def __init__(
        self,
        number: int,
        client: socket.socket,
        *,
        seed: int,
        stats: Stats,
        faults: Callable[[Direction], Faults],
    ) -> None:
        self.number = number
        self._client = client
        self._server: socket.socket | None = None
        self._stats = stats
        self._in_order = False
        self._task: asyncio.Task[None] | None = None
        self.lanes = tuple(
            Lane(Stream(seed, number, direction), stats, faults) for direction in DIRECTIONS
        )

    def start(self, target: tuple[str, int], at_end: Callable[[], object]) -> None:
        """Reach the server and forward, until either side ends it."""
        self._task = asyncio.create_task(self._serve(target))
        # Not a `finally` in the task: one that is cancelled before its first step has none.
        self._task.add_done_callback(lambda _: self._finish(at_end))

    def reset(self) -> None:
        """End it by RST on both sides, within a few turns of the loop."""
        if self._task is not None:
            self._task.cancel()

    async def ended(self) -> None:
        """Wait until both sockets are closed."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _serve(self, target: tuple[str, int]) -> None:
        to_server, to_client = self.lanes
        try:
            self._server = await self._reach(target)
            async with asyncio.TaskGroup() as group:
                to_server.start(group, self._client, self._server)
                to_client.start(group, self._server, self._client)
            self._in_order = True
        except* (OSError, Dropped):
            pass  # the other side learns of it by the reset

    async def _reach(self, target: tuple[str, int]) -> socket.socket:
        loop = asyncio.get_running_loop()
        sock: socket.socket | None = None
        try:
            async with asyncio.timeout(DEFAULTS.chaos_connect_s):
                found = await loop.getaddrinfo(*target, type=socket.SOCK_STREAM)
                family, kind, proto, _, address = found[0]
                sock = socket.socket(family, kind, proto)
                sock.setblocking(False)
                await loop.sock_connect(sock, address)
        except BaseException as error:
            if sock is not None:
                sock.close()
            self._stats.target_failures += isinstance(error, OSError)  # TimeoutError is one
            raise
        for end in (sock, self._client):  # small messages must not wait for each other
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def _finish(self, at_end: Callable[[], object]) -> None:
        self._stats.resets += not self._in_order
        for sock in (self._client, self._server):
            if sock is not None:
                close_socket(sock, reset=not self._in_order)
        at_end()


class Lane:
    """One direction of a connection: a reader, a bounded buffer, a writer."""

    def __init__(
        self, stream: Stream, stats: Stats, faults: Callable[[Direction], Faults]
    ) -> None:
        self.stream = stream
        self.wake = asyncio.Event()  # something that a wait below depends on has changed
        self._stats = stats
        self._faults_of = faults
        self._chunks: deque[tuple[float, memoryview]] = deque()  # (when to send, bytes)
        self.held_bytes = 0
        self._free_at = 0.0  # when the throttle lets the next bytes pass
        self._shut = False

    def start(self, group: asyncio.TaskGroup, source: socket.socket, sink: socket.socket) -> None:
        """Forward from `source` to `sink` in tasks of `group`."""
        group.create_task(self._read(source))
        group.create_task(self._write(sink))

    async def _read(self, source: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while not self._has_room():
                await self._wait(math.inf)
            data = await loop.sock_recv(source, _CHUNK_BYTES)
            delay_s = self.stream.delay_s(self._faults)
            self._stats.delayed_chunks += bool(delay_s and data)
            self._chunks.append((loop.time() + delay_s, memoryview(data)))
            self.held_bytes += len(data)
            self.wake.set()
            if not data:
                return

    async def _write(self, sink: socket.socket) -> None:
        while True:
            match self.stream.due():
                case "drop":
                    self._stats.dropped += 1
                    raise Dropped
                case "truncate" if not self._shut:
                    self._stats.truncated += 1
                    self._shut_down(sink)
            wait_s = self._hold_s()
            if wait_s > 0:
                await self._wait(wait_s)
                continue
            chunk = self._chunks[0][1]
            if not chunk:
                self._shut_down(sink)
                return
            if self._shut:
                self._stats.discarded_bytes += len(chunk)
                self._consume(len(chunk))
            else:
                await self._forward(sink, chunk)

    async def _forward(self, sink: socket.socket, chunk: memoryview) -> None:
        loop = asyncio.get_running_loop()
        faults = self._faults
        throttled = faults.bytes_per_s < math.inf
        pace = max(1.0, faults.bytes_per_s * _THROTTLE_TICK_S)
        piece = chunk[: int(min(len(chunk), self.stream.allowance(), pace))]
        if throttled:  # time that was not used is lost, but for one tick
            self._stats.throttled_chunks += 1
            start = max(self._free_at, loop.time() - _THROTTLE_TICK_S)
            self._free_at = start + len(piece) / faults.bytes_per_s
        data, flips = self.stream.flip(piece, faults)
        await loop.sock_sendall(sink, data)
        self._stats.sent(self.stream.direction, len(piece), flips)
        self.stream.offset += len(piece)
        self._consume(len(piece))

    @property
    def _faults(self) -> Faults:
        return self._faults_of(self.stream.direction)

    def _hold_s(self) -> float:
        """How long nothing may be sent; 0 or less when the first chunk may go now."""
        faults = self._faults
        if not self._chunks or faults.stalled:
            return math.inf
        send_at = 0.0
        if faults.delay_s or faults.jitter_s:
            send_at = self._chunks[0][0]
        if faults.bytes_per_s < math.inf:
            send_at = max(send_at, self._free_at)
        return send_at - asyncio.get_running_loop().time()

    def _has_room(self) -> bool:
        room_bytes = READ_AHEAD_BYTES - self.held_bytes
        return room_bytes >= _CHUNK_BYTES and len(self._chunks) < _CHUNKS_MAX

    def _consume(self, size: int) -> None:
        send_at, chunk = self._chunks.popleft()
        if size < len(chunk):
            self._chunks.appendleft((send_at, chunk[size:]))
        self.held_bytes -= size
        self.wake.set()

    def _shut_down(self, sink: socket.socket) -> None:
        if not self._shut:
            self._shut = True
            with contextlib.suppress(OSError):  # the other side may have gone already
                sink.shutdown(socket.SHUT_WR)

    async def _wait(self, limit_s: float) -> None:
        """Until something has changed, or the time is up."""
        self.wake.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s if limit_s < math.inf else None):
                await self.wake.wait()


def close_socket(sock: socket.socket, *, reset: bool) -> None:
    """Close in good order, or with a reset that the other side sees as an error."""
    if reset:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    sock.close()
