"""The body of one request, as it arrives from the caller.

What arrives before anybody wants it waits (little of it: then `backlog` tells the
connection to stop reading). Whoever wants it puts a `Sink` in place. What has passed is
kept, up to a bound, so that it can be sent again; `whole` says whether it still can.
"""

from typing import Protocol

from holdfast.gateway.http.framing import Chunked, Decoder, Lengthed, Malformed
from holdfast.gateway.http.head import Head
from holdfast.gateway.http.limits import Limits
from holdfast.gateway.http.trouble import Rejected

__all__ = ["Intake", "Sink"]


class Sink(Protocol):
    """Where a body goes."""

    def take(self, piece: bytes) -> None:
        """Some bytes of the body."""

    def finish(self) -> None:
        """That was all of it."""


class Intake:
    """See the module."""

    def __init__(self, head: Head, limits: Limits) -> None:
        self._limits = limits
        self._decoder: Decoder = (
            Chunked(limits.trailer_bytes) if head.length is None else Lengthed(head.length)
        )
        self._keep_bytes = limits.replay_bytes
        self._kept = bytearray()
        self.received_bytes = 0
        self.complete = self._decoder.done
        self.sink: Sink | None = None
        self.whole = True

    @property
    def kept_bytes(self) -> int:
        """How much is kept."""
        return len(self._kept)

    @property
    def backlog(self) -> bool:
        """Whether enough waits for somebody to want it."""
        return self.sink is None and self.kept_bytes >= self._limits.waiting_bytes

    def keep(self, limit: int) -> None:
        """Keep more than usual: the body is wanted in one piece."""
        self._keep_bytes = max(self._keep_bytes, limit)

    def kept(self) -> bytes:
        """What has passed so far, from the first byte; only while `whole`."""
        assert self.whole
        return bytes(self._kept)

    def receive(self, data: bytes) -> bytes:
        """Take bytes from the caller; return those behind the body. Raises `Rejected`."""
        try:
            piece = self._decoder.feed(data)
        except Malformed as error:
            raise Rejected(400, "bad_request", str(error)) from None
        self.received_bytes += len(piece)
        if self.received_bytes > self._limits.body_bytes:
            most = self._limits.body_bytes
            raise Rejected(413, "body_too_large", f"a body has at most {most} bytes")
        self._retain(piece)
        self.complete = self._decoder.done
        if self.sink is not None:
            if piece:
                self.sink.take(piece)
            if self.complete:
                self.sink.finish()
        return self._decoder.rest

    def discard(self) -> None:
        """Nobody wants it any more."""
        self.sink = None
        self.whole = False
        self._kept = bytearray()

    def _retain(self, piece: bytes) -> None:
        if not self.whole:
            return
        if self.sink is None or len(self._kept) + len(piece) <= self._keep_bytes:
            self._kept += piece
        else:
            sink = self.sink
            self.discard()
            self.sink = sink
