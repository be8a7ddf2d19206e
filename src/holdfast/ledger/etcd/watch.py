"""Follows an etcd cluster: one HTTP stream, begun again wherever it breaks.

Invariants: every revision from `start` on comes out once, whole and in order, over any
number of streams and servers; where the history is gone, `Compacted` is raised instead.
A cancelled `__anext__` loses nothing: the next one goes on where it was.

The stream is read only while somebody waits in `__anext__`: there is no task and no
queue, and a slow reader is slowed down by TCP. A silent stream is normal, so after
`silence_s` of silence the same server is asked for a sign of life; without one the watch
moves to the next server. If it says that there are newer revisions and the stream still
says nothing, the stream is opened again: a single connection may die without a word.
"""

import asyncio
from collections import deque
from collections.abc import Callable

import aiohttp
import msgspec

from holdfast.errors import Denied, HoldfastError, Mistake, Unavailable
from holdfast.ledger.base import Watch
from holdfast.ledger.etcd import wire
from holdfast.ledger.etcd.http import PACE, Client
from holdfast.ledger.etcd.trouble import Endpoint, Lost, Refused
from holdfast.ledger.mvcc import compacted_error
from holdfast.ledger.types import Batch, prefix_end
from holdfast.retry import Pauses

__all__ = ["EtcdWatch"]

_DENIED = frozenset({"token", "forbidden", "login"})


class EtcdWatch(Watch):
    """A watch on etcd.

    Closing it ends the iteration, also for somebody who waits; closing its ledger makes
    `__anext__` raise `Mistake`.
    """

    def __init__(
        self,
        client: Client,
        prefix: str,
        start: int,
        silence_s: float,
        ended: Callable[["EtcdWatch"], None],
    ) -> None:
        self._client = client
        self._prefix = prefix
        self._silence_s = silence_s
        self._ended = ended
        self._batches = wire.Batches(start)
        self._ready: deque[Batch] = deque()
        self._frames = wire.Frames()
        self._stream: aiohttp.ClientResponse | None = None
        self._token = ""
        self._doubt = 0  # the server's revision when its silence was last asked about
        self._cursor: int | None = None
        self._pauses = Pauses(pace=PACE)
        self._broken = False
        self._denials = 0
        self._closed = False
        self._final: HoldfastError | None = None
        self._waiting: asyncio.Timeout | None = None

    async def __anext__(self) -> Batch:
        """Wait for the next batch. Raises `Compacted`, `Denied`, `StopAsyncIteration`."""
        if self._waiting is not None:
            raise Mistake(f"somebody else already waits for this watch of {self._prefix}")
        try:
            # Never runs out by itself: `aclose` lets it, to wake whoever waits here.
            async with asyncio.timeout(None) as self._waiting:
                while not self._ready and not self._closed:
                    if self._final is not None:
                        raise self._final
                    await self._step()
        except TimeoutError:
            if not self._closed:
                raise
        finally:
            self._waiting = None
        if self._closed:
            raise StopAsyncIteration if self._final is None else self._final
        return self._ready.popleft()

    async def aclose(self) -> None:
        """Stop watching and drop the connection."""
        self.end(None)

    def end(self, reason: HoldfastError | None) -> None:
        """Stop watching; from now on `__anext__` raises `reason`, or just ends."""
        if self._closed:
            return
        self._closed = True
        self._final = reason
        self._drop()
        self._ended(self)
        if self._waiting is not None:
            self._waiting.reschedule(asyncio.get_running_loop().time())

    # ---- the stream --------------------------------------------------------------

    async def _step(self) -> None:
        """Do one thing that brings the next batch nearer."""
        try:
            if self._stream is None:
                await self._connect()
            else:
                await self._read(self._stream)
        except wire.Fault as fault:
            self._break(fault)
        except (Refused, Lost, Unavailable, aiohttp.ClientError, OSError, msgspec.MsgspecError):
            self._break(None)

    async def _connect(self) -> None:
        if self._broken:
            await self._pauses.wait()
            self._broken = False
        if self._cursor is None:
            self._cursor = self._client.preferred()
        key, end = self._prefix.encode(), prefix_end(self._prefix).encode()
        request = wire.watch_json(key, end, self._batches.first)
        self._stream, self._token = await self._client.stream(
            self._endpoint(self._cursor), "/v3/watch", request
        )

    async def _read(self, stream: aiohttp.ClientResponse) -> None:
        assert self._cursor is not None
        try:
            async with asyncio.timeout(self._silence_s / (2 if self._doubt else 1)):
                chunk = await stream.content.readany()
        except TimeoutError:
            if self._doubt >= self._batches.first:
                # The server went on and this stream told nothing. Perhaps that was not for
                # us; perhaps only this connection is dead. A new stream tells.
                self._drop()
                return
            until = asyncio.get_running_loop().time() + self._client.attempt_s
            self._doubt = await self._client.probe(self._endpoint(self._cursor), until)
            return
        self._doubt = 0
        if not chunk:
            raise Lost("ended the watch")
        for line in self._frames.feed(chunk):
            self._take(wire.decode(line, wire.WatchFrame))

    def _take(self, frame: wire.WatchFrame) -> None:
        if frame.error is not None:
            raise wire.stream_fault(frame.error)
        answer = frame.result
        if answer is None:
            raise Lost("said something that is no watch frame")
        if answer.compact_revision:
            self._final = compacted_error(self._batches.first, answer.compact_revision)
            self._drop()
            return
        if answer.canceled:
            raise wire.Fault(wire.verdict_of(0, answer.cancel_reason), answer.cancel_reason)
        if answer.created:
            self._pauses.reset()
            self._denials = 0
        self._ready.extend(self._batches.add(answer))

    # ---- its end -----------------------------------------------------------------

    def _break(self, fault: wire.Fault | None) -> None:
        """Note that the stream ended, and choose where the next one begins."""
        self._drop()
        self._broken = True
        assert self._cursor is not None
        if fault is not None and fault.verdict in _DENIED:
            # Some versions call a login that ran out a missing permission.
            self._client.forget_token(self._token)
            self._denials += 1
            if self._denials > 1:
                self._final = Denied(f"etcd does not let us watch {self._prefix}: {fault.message}")
            return
        self._client.failed(self._endpoint(self._cursor))
        self._cursor = (self._cursor + 1) % len(self._client.endpoints)

    def _drop(self) -> None:
        stream, self._stream = self._stream, None
        self._doubt = 0
        self._frames = wire.Frames()
        self._batches.restart()
        if stream is not None:
            stream.close()

    def _endpoint(self, position: int) -> Endpoint:
        return self._client.endpoints[position]
