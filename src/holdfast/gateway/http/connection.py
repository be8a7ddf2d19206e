"""One caller's connection: requests one after the other, each with one answer.

What a caller sends ahead waits, bounded; the next request is looked at when the answer
before it has been written and the caller reads it. Bytes that are no request get an answer
that says so, and the connection closes. A caller that closes its side has left, also when
it only closed the half that it writes to (as with other proxies).
"""

import asyncio
import contextlib
import socket
import struct
from typing import TYPE_CHECKING, Final, Literal, cast

from holdfast.errors import Mistake, TooLarge
from holdfast.gateway.http.exchange import Exchange
from holdfast.gateway.http.head import Head, parse_request, unclean
from holdfast.gateway.http.intake import Intake
from holdfast.gateway.http.limits import Limits
from holdfast.gateway.http.pace import Pace
from holdfast.gateway.http.serialize import CONTINUE, reply_head
from holdfast.gateway.http.trouble import CallerLeft, Rejected, render_json

if TYPE_CHECKING:
    from holdfast.gateway.http.server import Server

__all__ = ["Connection"]

Reason = Literal["upstream", "backlog", "pipeline"]
_RESET: Final = struct.pack("ii", 1, 0)


class Connection(asyncio.Protocol):
    """See the module."""

    def __init__(self, server: "Server") -> None:
        self._server = server
        self.limits: Limits = server.limits
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self.peer = ""
        self._ahead = bytearray()  # a head that is not complete, or pipelined requests
        self._looked_at = 0
        self._blank = False  # an empty line before the head has been passed over
        self._exchange: Exchange | None = None
        self._intake: Intake | None = None
        self._task: asyncio.Task[None] | None = None
        self._held: set[Reason] = set()
        self._continued = False
        self._stopping = False
        self._ending = False  # an answer that closes has been written
        self._discarded_bytes = 0
        self._takes = True  # whether the caller reads
        self._written_bytes = 0
        self._reading_pace = Pace(self.limits)
        self._writing_pace = Pace(self.limits)
        self.since = self._loop.time()
        self.owner = ""
        """Whose connection it is, once a request on it has been charged to somebody."""
        self.deadline: float | None = None
        """When to close, unless something happens before."""

    # From the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A caller has come."""
        self._transport = transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self.peer = peer[0] if isinstance(peer, tuple) else ""
        transport.set_write_buffer_limits(high=self.limits.buffer_bytes)
        self.deadline = self._loop.time() + min(self.limits.head_s, self.limits.stranger_s)
        room = self._server.admit(self)
        if self._server.stopping:
            self.stop()
        elif self._server.connections > self.limits.connections * 9 // 8:
            self._server.counts["too_many_connections"] += 1
            transport.abort()  # too many even for being told so
        elif not room:
            self._refuse(Rejected(503, "too_many_connections", "there are too many connections"))

    def data_received(self, data: bytes) -> None:
        """A caller has sent something."""
        if self._ending:
            self._discarded_bytes += len(data)
            if self._discarded_bytes > self.limits.drain_bytes:
                self._close()
        elif self._intake is not None:
            self._read_body(self._intake, data)
        elif self._exchange is not None or not self._takes:
            self._ahead += data
            self.hold_reading("pipeline", len(self._ahead) > self.limits.waiting_bytes)
        else:
            self._read_head(data)

    def eof_received(self) -> None:
        """The caller has closed its side; the connection closes."""
        self._left()

    def connection_lost(self, _error: Exception | None) -> None:
        """The connection has ended."""
        self._transport = None
        self._server.forget(self)
        if self.owner:
            self._server.owned_connections.give(self.owner)
        self._left()

    def pause_writing(self) -> None:
        """The caller does not read."""
        self._takes = False
        self._writing_pace.rest()
        if self._exchange is not None:
            self._exchange.caller_takes(False)

    def resume_writing(self) -> None:
        """The caller reads again."""
        self._takes = True
        if self._exchange is not None:
            self._exchange.caller_takes(True)
        elif self._intake is None and not self._ending:
            self._next()

    # From the exchange.

    def write(self, parts: list[bytes]) -> None:
        """Send bytes of an answer."""
        if self._transport is not None and not self._transport.is_closing():
            self._written_bytes += sum(map(len, parts))
            self._transport.writelines(parts)

    def want_body(self) -> None:
        """Somebody wants the body now."""
        exchange = self._exchange
        if exchange is not None and exchange.head.expects and not self._continued:
            self._continued = True
            if not exchange.answered and not exchange.received_bytes:
                self.write([CONTINUE])
        self.hold_reading("backlog", False)

    def hold_reading(self, reason: Reason, hold: bool) -> None:
        """Stop reading from the caller, or go on when nobody else has a reason to stop."""
        before = bool(self._held)
        if hold:
            self._held.add(reason)
        else:
            self._held.discard(reason)
        if before != bool(self._held) and self._transport is not None:
            if self._held:
                self._transport.pause_reading()
            elif not self._transport.is_closing():
                self._transport.resume_reading()

    def begin_answer(self, *, drains: bool = False, close: bool = False) -> bool:
        """The head of an answer is about to be written; returns whether the connection closes
        after it. `drains`: a little that is left of the request's body may be read and dropped.
        `close`: it closes in any case."""
        assert self._exchange is not None
        self._exchange.answered = True
        self._exchange.closes = close or self._must_close(self._exchange, drains)
        return self._exchange.closes

    def _must_close(self, exchange: Exchange, drains: bool) -> bool:
        head, intake = exchange.head, self._intake
        if not head.keep_alive or self._stopping:
            return True
        if intake is None:
            return False
        if not drains or head.length is None or (head.expects and not self._continued):
            return True
        return head.length - intake.received_bytes > self.limits.drain_bytes

    def cut(self) -> None:
        """End the connection so that the caller cannot take a part for the whole."""
        if self._transport is not None:
            sock = self._transport.get_extra_info("socket")
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._transport.abort()

    def charge(self, owner: str) -> bool:
        """The connection is this owner's from now on; False: he has too many, and it closes."""
        if owner == self.owner or self._transport is None:  # one that has ended is not counted
            return True
        if not self._server.owned_connections.take(owner):
            self._stopping = True
            return False
        if self.owner:
            self._server.owned_connections.give(self.owner)
        self.owner = owner
        self._server.known(self)
        return True

    # From the server.

    def give_way(self) -> None:
        """Close: nothing is in work, and others need the room."""
        self._server.known(self)
        self.cut()

    @property
    def busy(self) -> bool:
        """Whether a request is in work."""
        return self._exchange is not None

    def stop(self) -> None:
        """Close when there is nothing in work."""
        self._stopping = True
        if self._exchange is None and not self._ending:
            self._close()

    async def abandon(self) -> None:
        """Close at once, whatever is in work."""
        self.cut()
        if (task := self._task) is not None:
            task.cancel()
            await asyncio.wait([task])

    def tick(self, now: float) -> None:
        """Look whether the caller is too slow."""
        if not self._takes:
            assert self._transport is not None
            out = self._written_bytes - self._transport.get_write_buffer_size()
            if self._writing_pace.too_slow(out, now):
                self._server.counts["slow_reader"] += 1
                self.cut()
                return
        exchange, intake = self._exchange, self._intake
        if exchange is not None and intake is not None and exchange.wants_body and not self._held:
            if self._reading_pace.too_slow(intake.received_bytes, now):
                self._spoil(Rejected(408, "body_too_slow", "the body arrives too slowly"))
        else:
            self._reading_pace.rest()
        if exchange is None and self.deadline is not None and now >= self.deadline:
            self._expire()

    # Reading.

    def _read_head(self, data: bytes) -> None:
        """Look for a whole head in what has come."""
        if self._ahead:
            self._ahead += data
            data = bytes(self._ahead) if b"\n" in data else b""
        if data.startswith(b"\r\n") and not self._blank:
            self._blank = True  # some clients send one more line after a body; two are no head
            data = data[2:]
            self._looked_at = 0
            self._ahead.clear()
        end = data.find(b"\r\n\r\n")
        if end >= 0:
            self._ahead.clear()
            self._looked_at = 0
            self._begin(data[: end + 4], data[end + 4 :])
            return
        if not self._ahead and data:
            self._ahead += data
            self.deadline = self._loop.time() + self.limits.head_s
        self._look_at_part()

    def _look_at_part(self) -> None:
        """Refuse what can no longer become a head."""
        part = self._ahead
        if unclean(part, max(0, self._looked_at - 1)):
            self._refuse(Rejected(400, "bad_request", "the head is malformed"))
        elif len(part) > self.limits.line_bytes and b"\r\n" not in part[: self.limits.line_bytes]:
            self._refuse(Rejected(414, "target_too_long", "the request line is too long"))
        elif len(part) > self.limits.line_bytes + self.limits.head_bytes:
            self._refuse(Rejected(431, "headers_too_large", "the header fields are too large"))
        else:
            self._looked_at = len(part)

    def _begin(self, raw: bytes, rest: bytes) -> None:
        """A whole head has come."""
        self._blank = False
        try:
            head = parse_request(raw, self.limits)
            if self._server.requests >= self.limits.requests:
                raise Rejected(503, "overloaded", "there are too many requests in work")
        except Rejected as error:
            self._refuse(error)
            return
        self._server.requests += 1
        self.deadline = None
        self._continued = False
        intake = Intake(head, self.limits)
        self._intake = None if intake.complete else intake
        exchange = Exchange(self, head, intake, self._server)
        self._exchange = exchange
        self._task = self._loop.create_task(self._serve(exchange, intake))
        if rest:
            self.data_received(rest)

    def _read_body(self, intake: Intake, data: bytes) -> None:
        try:
            rest = intake.receive(data)
        except Rejected as error:
            self._spoil(error)
            return
        if intake.complete:
            self._intake = None
            if self._exchange is None and self._takes:  # answered before: this was the drain
                self._next(rest)
            elif rest:
                self.data_received(rest)
        elif intake.backlog and self._exchange is not None:
            self.hold_reading("backlog", True)

    def _spoil(self, error: Rejected) -> None:
        """The body in work cannot be accepted: whoever waits for it hears why."""
        self._intake = None
        self._ending = True  # nothing behind it can be understood
        if self._exchange is None:
            self._close()
        else:
            self._exchange.fail(error)

    # Serving.

    async def _serve(self, exchange: Exchange, intake: Intake) -> None:
        try:
            await self._server.handler(exchange)
            if not exchange.answered:
                raise Mistake("the handler returned without an answer")
        except CallerLeft:
            self._server.counts["caller_left"] += 1
        except Rejected as error:
            self._reject(exchange, error)
        except TooLarge as error:
            self._reject(exchange, Rejected(413, "body_too_large", str(error)))
        except Exception as error:  # noqa: BLE001 - the boundary of the handler's task
            self._server.record(error, exchange)
            self._reject(exchange, Rejected(500, "internal", "the gateway failed"))
        except asyncio.CancelledError:
            self.cut()
            raise
        finally:
            self._finished(exchange, intake)

    def _reject(self, exchange: Exchange, error: Rejected) -> None:
        if exchange.answered:
            self.cut()
        else:
            self._answer_for_us(error, exchange.head)
            exchange.closes = True

    def _finished(self, exchange: Exchange, intake: Intake) -> None:
        """The handler is done with the request."""
        self._exchange = self._task = None
        exchange.discharge()
        self._server.requests -= 1
        if self._transport is None or self._transport.is_closing():
            return
        if exchange.closes or self._ending:
            self._linger() if self._intake is not None or self._ending else self._close()
        elif self._intake is not None:
            intake.discard()
            self.deadline = self._loop.time() + self.limits.head_s
            self.hold_reading("backlog", False)
        elif self._takes:
            self._next()

    def _next(self, data: bytes = b"") -> None:
        """Look for the next request."""
        if self._stopping:
            self._close()
            return
        rest_s = self.limits.idle_s if self.owner else self.limits.stranger_s
        self.deadline = self._loop.time() + rest_s
        if self._ahead or data:
            waiting, self._ahead = bytes(self._ahead) + data, bytearray()
            self._looked_at = 0
            self._read_head(waiting)
        too_much = self._exchange is not None and len(self._ahead) > self.limits.waiting_bytes
        self.hold_reading("pipeline", too_much)

    # Ending.

    def _refuse(self, error: Rejected) -> None:
        """What has come is no request: say so, and close."""
        self._answer_for_us(error, None)
        self._linger()

    def _answer_for_us(self, error: Rejected, head: Head | None) -> None:
        self._server.counts[error.code] += 1
        fields, body = render_json(error.status, error.code, str(error))
        start = reply_head(
            error.status, fields, length=len(body), chunked=False, close=True, minor=1
        )
        silent = head is not None and head.method == "HEAD"
        self.write([start] if silent else [start, body])

    def _expire(self) -> None:
        if self._ending:
            self.cut()
        elif self._intake is not None or not self._ahead:  # a slow drain, or an idle caller
            self._close()
        else:
            self._refuse(Rejected(408, "head_too_slow", "the head of the request is too slow"))

    def _linger(self) -> None:
        """Close, but read for a little while what the caller still sends: closing at once
        would reset the connection, and the caller might never see the answer."""
        self._ending = True
        self._ahead.clear()
        transport = self._transport
        if transport is None or not transport.can_write_eof():
            self._close()
            return
        self.deadline = self._loop.time() + self.limits.linger_s
        transport.write_eof()
        for reason in list(self._held):
            self.hold_reading(reason, False)

    def _close(self) -> None:
        """Close when what was written has been read, within a bound."""
        self._ending = True
        self.deadline = self._loop.time() + self.limits.pace_s
        if self._transport is not None:
            self._transport.close()

    def _left(self) -> None:
        if self._exchange is not None:
            self._exchange.fail(CallerLeft("the caller has closed its connection"))
