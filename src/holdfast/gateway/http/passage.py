"""One attempt to pass a request on to an upstream, and the answer back.

The request's body goes straight from the caller's connection to the upstream's line, and
the answer's body straight back, without waking the task that waits for the outcome. When
one side does not take more, the other side is not read. So what is in memory is bounded by
the two write buffers and what is kept for replay.

Invariants: every message is framed by us; a message of which only a part could be sent is
cut off, never ended; what the outcome says about the upstream is true whatever happened
after it: `Refused` is not decided here, because by now bytes are being written.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from holdfast.gateway.http.answers import Answer
from holdfast.gateway.http.head import Fields, Head
from holdfast.gateway.http.intake import Intake
from holdfast.gateway.http.line import Line
from holdfast.gateway.http.outcomes import Forwarded, Lost, Relayed, Truncated, Withheld
from holdfast.gateway.http.serialize import LAST_CHUNK, chunk, end_to_end, reply_head

if TYPE_CHECKING:
    from holdfast.gateway.http.connection import Connection

__all__ = ["Passage", "Relay"]

Relay = Callable[[int, Fields], bool]
"""Asked when the head of an answer is there: whether the caller is to get it."""
WriteHead = Callable[..., bytes]
"""`serialize.request_head` with all that is known before the body is looked at."""


class Passage:
    """See the module. `outcome` is what the exchange waits for."""

    def __init__(
        self,
        connection: "Connection",
        head: Head,
        intake: Intake,
        line: Line,
        write_head: WriteHead,
        relay: Relay,
        hold_s: float,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._connection = connection
        self._head = head
        self._intake = intake
        self._line = line
        self._write_head, self._relay, self._hold_s = write_head, relay, hold_s
        self._answer_s = connection.limits.answer_s
        self.outcome: asyncio.Future[Forwarded] = self._loop.create_future()
        self._chunked = False  # the request's body
        self._holding = False
        self._sent_all = False
        self._answer: Answer | None = None
        self._mode: Literal["wait", "relay", "withhold"] = "wait"
        self._chunks_out = False  # the answer's body
        self._outgoing: list[bytes] = []
        self._withheld = b""
        self._bytes_out = 0
        self._ended = False
        self._caller_takes = True
        self._hold_timer: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Write the request, as much of it as is there."""
        intake = self._intake
        length = intake.kept_bytes if intake.complete else self._head.length
        self._chunked = length is None
        self._holding = (
            self._hold_s > 0
            and not intake.complete
            and (length is None or length > self._connection.limits.replay_bytes)
        )
        head = self._write_head(length=length, expect=self._holding)
        self._line.begin(self, self._head.method)
        self._timer = self._loop.call_later(self._answer_s, self._look)
        if self._holding:
            self._line.write([head])
            self._hold_timer = self._loop.call_later(self._hold_s, self.on_continue)
        else:
            self._open(head)

    def end(self) -> bool:
        """Let go of both sides; return whether the line can be used again."""
        for timer in (self._timer, self._hold_timer):
            if timer is not None:
                timer.cancel()
        if self._intake.sink is self:
            self._intake.sink = None
        self._line.end()
        self._connection.hold_reading("upstream", False)
        if not self._caller_takes:
            self._line.pause(False)
        if not self.outcome.cancel() and not self.outcome.cancelled():
            self.outcome.exception()  # somebody has looked: it may be that nobody waits any more
        kept = self._answer is not None and self._answer.keep_alive
        return kept and self._ended and self._sent_all and self._line.clean

    def fail(self, error: Exception) -> None:
        """The caller has left, or what it sends cannot be accepted."""
        if not self.outcome.done():
            self.outcome.set_exception(error)

    def abandon(self, reason: str) -> None:
        """Wait no longer for an answer that has not begun."""
        if self._mode == "wait" and not self.outcome.done():
            self._line.abort()
            self.on_lost(reason)

    def caller_takes(self, takes: bool) -> None:
        """Whether the caller takes more of the answer at present."""
        if takes != self._caller_takes:
            self._caller_takes = takes
            self._line.pause(not takes)

    # The request's body comes in.

    def take(self, piece: bytes) -> None:
        """Some bytes of the body."""
        self._line.write(chunk(piece) if self._chunked else [piece])

    def finish(self) -> None:
        """That was all of it."""
        if self._chunked:
            self._line.write([LAST_CHUNK])
        self._sent_all = True

    # The upstream says something.

    def on_continue(self) -> None:
        """The upstream wants the body, or has let the time pass in which it could say so."""
        if self._holding:
            self._holding = False
            if self._hold_timer is not None:
                self._hold_timer.cancel()
            self._open(b"")

    def on_answer(self, answer: Answer) -> None:
        """The head of the answer."""
        self._answer = answer
        self._holding = False
        try:
            relayed = self._relay(answer.status, answer.headers)
        except Exception as error:  # noqa: BLE001 - raised where the outcome is awaited
            self._mode = "withhold"
            self.fail(error)
            return
        if relayed:
            self._mode = "relay"
            self._outgoing.append(self._reply_head(answer))
        else:
            self._mode = "withhold"
            self._intake.sink = None

    def on_piece(self, piece: bytes) -> None:
        """Some bytes of the answer's body."""
        if self._mode == "relay":
            self._bytes_out += len(piece)
            self._outgoing += chunk(piece) if self._chunks_out else [piece]
        elif not self.outcome.done():
            limit = self._connection.limits.withheld_bytes
            self._withheld += piece[: limit - len(self._withheld)]
            if len(self._withheld) == limit:
                self._settle()

    def on_end(self) -> None:
        """The answer is complete."""
        self._ended = True
        if self._chunks_out:
            self._outgoing.append(LAST_CHUNK)
        self._settle()

    def on_flush(self) -> None:
        """Pass on what has come."""
        if self._outgoing:
            parts, self._outgoing = self._outgoing, []
            self._connection.write(parts)

    def on_lost(self, reason: str) -> None:
        """There will be no (more) answer."""
        if self.outcome.done():
            return
        if self._mode == "wait":
            self.outcome.set_result(Lost(reason))
        elif self._mode == "withhold":
            self._settle()
        else:
            assert self._answer is not None
            self.outcome.set_result(Truncated(self._answer.status, self._bytes_out, reason))
            self._connection.cut()

    def on_writable(self, writable: bool) -> None:
        """Whether the upstream takes more of the body at present."""
        self._connection.hold_reading("upstream", not writable)

    def _open(self, head: bytes) -> None:
        """Send what there is of the body, and let the rest come."""
        parts = [head] if head else []
        if kept := self._intake.kept():
            parts += chunk(kept) if self._chunked else [kept]
        if parts:
            self._line.write(parts)
        if self._intake.complete:
            self.finish()
        else:
            self._intake.sink = self
            self._connection.want_body()

    def _reply_head(self, answer: Answer) -> bytes:
        head = self._head
        length = answer.length
        self._chunks_out = length is None and head.minor == 1
        if head.method == "HEAD" or answer.status == 304:
            length = answer.declared
        elif answer.status == 204:
            length = None
        # The only way in which HTTP/1.0 can be told where an answer of unknown length ends.
        ends = answer.length is None and head.minor == 0
        close = self._connection.begin_answer(close=ends)
        return reply_head(
            answer.status,
            end_to_end(answer.headers),
            length=length,
            chunked=self._chunks_out,
            close=close,
            minor=head.minor,
        )

    def _settle(self) -> None:
        if self.outcome.done():
            return
        assert self._answer is not None
        if self._mode == "relay":
            self.on_flush()
            self.outcome.set_result(Relayed(self._answer.status, self._bytes_out))
        else:
            answer = self._answer
            self.outcome.set_result(Withheld(answer.status, answer.headers, self._withheld))

    def _look(self) -> None:
        """Whether the upstream has been silent for too long: while it was its turn."""
        now = self._loop.time()
        caller_s_turn = not self._caller_takes or (
            not self._sent_all and not self._holding and self._line.writable
        )
        left_s = self._answer_s - (now - self._line.active_at)
        if caller_s_turn or left_s > 0:
            wait_s = self._answer_s if caller_s_turn else left_s
            self._timer = self._loop.call_later(wait_s, self._look)
        else:
            self._line.abort()
            self.on_lost(f"the upstream was silent for {self._answer_s:g} s")
