"""One connection to an upstream.

It carries one request at a time. The `Passage` that uses it is told what comes back; when
nobody does, anything that comes back means that the connection is not to be used again.
"""

import asyncio
import select
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, cast

from holdfast.gateway.http.answers import parse_answer
from holdfast.gateway.http.framing import Decoder, Malformed, UntilClose
from holdfast.gateway.http.limits import Limits

if TYPE_CHECKING:
    from holdfast.gateway.http.passage import Passage

__all__ = ["Line"]

_INTERIM_ANSWERS: Final = 16


class Line(asyncio.Protocol):
    """See the module. `closed` is called once, when the connection has ended."""

    def __init__(self, limits: Limits, closed: Callable[["Line"], None]) -> None:
        self._limits = limits
        self._closed = closed
        self._transport: asyncio.Transport | None = None
        self._poll = select.poll()
        self._user: Passage | None = None
        self._method = ""
        self._decoder: Decoder | None = None
        self._head = b""
        self._interim = 0
        self._loop = asyncio.get_running_loop()
        self.active_at = 0.0
        """When the upstream last took or gave a byte."""
        self.writable = True
        self.clean = True
        """Whether everything that came belonged to an answer, and was understood."""
        self.idle_since = 0.0

    @property
    def open(self) -> bool:
        """Whether the connection stands, as far as is known here."""
        return self._transport is not None and not self._transport.is_closing()

    def fresh(self) -> bool:
        """Whether the upstream has neither closed an idle line nor said anything on it. Asks
        the kernel: the event loop may not have come to it yet."""
        return self.open and not self._poll.poll(0)

    def begin(self, user: "Passage", method: str) -> None:
        """A request is about to be written."""
        self._user, self._method = user, method
        self._decoder, self._head, self._interim = None, b"", 0
        self.active_at = self._loop.time()

    def end(self) -> None:
        """The user wants to hear nothing more."""
        self._user = None

    def write(self, parts: list[bytes]) -> None:
        """Send bytes of a request."""
        if self._transport is not None and not self._transport.is_closing():
            if self.writable:
                self.active_at = self._loop.time()
            self._transport.writelines(parts)

    def pause(self, paused: bool) -> None:
        """Stop or go on reading: the caller does not, or does again, take more."""
        if self.open:
            assert self._transport is not None
            if paused:
                self._transport.pause_reading()
            else:
                self.active_at = self._loop.time()
                self._transport.resume_reading()

    def abort(self) -> None:
        """Cut the connection: what was sent only in part must not look whole."""
        self.clean = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """From the event loop."""
        self._transport = transport = cast(asyncio.Transport, transport)
        transport.set_write_buffer_limits(high=self._limits.buffer_bytes)
        fd = transport.get_extra_info("socket").fileno()
        self._poll.register(fd, select.POLLIN | select.POLLRDHUP)

    def data_received(self, data: bytes) -> None:
        """From the event loop."""
        user = self._user
        if user is None:
            self.abort()
            return
        self.active_at = self._loop.time()
        try:
            if self._decoder is None:
                self._read_head(user, data)
            elif self._decoder.done:
                self.clean = False
            else:
                self._read_body(user, self._decoder, data)
        except Malformed as error:
            self._lose(str(error))
        else:
            user.on_flush()

    def eof_received(self) -> None:
        """From the event loop. The connection closes."""
        self._ended("the upstream closed the connection")

    def connection_lost(self, error: Exception | None) -> None:
        """From the event loop."""
        if error is None:
            self._ended("the connection to the upstream ended")
        else:
            self._lose(f"the connection to the upstream broke: {error}")
        self._transport = None
        self._closed(self)

    def pause_writing(self) -> None:
        """From the event loop."""
        self.writable = False
        if self._user is not None:
            self._user.on_writable(False)

    def resume_writing(self) -> None:
        """From the event loop."""
        self.writable = True
        self.active_at = self._loop.time()
        if self._user is not None:
            self._user.on_writable(True)

    def _read_head(self, user: "Passage", data: bytes) -> None:
        self._head += data
        while True:
            end = self._head.find(b"\r\n\r\n") + 4
            if end < 4 or end > self._limits.line_bytes + self._limits.head_bytes:
                if len(self._head) > self._limits.line_bytes + self._limits.head_bytes:
                    raise Malformed("the answer's head is too large")
                return
            answer = parse_answer(self._head[:end], self._method)
            self._head = self._head[end:]
            if answer.status >= 200:
                self._decoder = decoder = answer.decoder(self._limits)
                user.on_answer(answer)
                rest, self._head = self._head, b""
                if decoder.done:
                    self._finish(user, rest)
                elif rest:
                    self._read_body(user, decoder, rest)
                return
            self._interim += 1
            if answer.status == 101 or self._interim > _INTERIM_ANSWERS:
                raise Malformed("the upstream changes the protocol, or says nothing final")
            if answer.status == 100:
                user.on_continue()

    def _read_body(self, user: "Passage", decoder: Decoder, data: bytes) -> None:
        piece = decoder.feed(data)
        if piece:
            user.on_piece(piece)
        if decoder.done:
            self._finish(user, decoder.rest)

    def _finish(self, user: "Passage", rest: bytes) -> None:
        if rest:
            self.clean = False  # more than was asked for: do not ask again
        user.on_end()

    def _ended(self, reason: str) -> None:
        """The upstream has closed: some answers end that way."""
        user = self._user
        if user is not None and isinstance(self._decoder, UntilClose):
            self._user = None
            user.on_end()
            user.on_flush()
        else:
            self._lose(reason)

    def _lose(self, reason: str) -> None:
        user, self._user = self._user, None
        self.abort()
        if user is not None:
            user.on_lost(reason)
