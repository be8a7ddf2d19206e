"""Every bound of the engine, with its default.

What one caller's connection may hold in memory follows from them: `Limits.memory_bytes`.
"""

from dataclasses import dataclass, fields

from holdfast.errors import Mistake

__all__ = ["Limits"]

READ_BYTES = 256 * 1024
"""The most that the event loop hands over at once (uvloop's size; asyncio's is the same)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on size, number and time. All are positive; `check` says which is not."""

    line_bytes: int = 8 * 1024
    """The request line. Beyond: 414."""
    head_bytes: int = 32 * 1024
    """All header fields together. Beyond: 431."""
    fields: int = 100
    """Header fields. Beyond: 431."""
    body_bytes: int = 1 << 30
    """A request's body. Beyond: 413, before a byte is read where the length is declared."""
    trailer_bytes: int = 8 * 1024
    """The trailer of a chunked body (it is read and dropped). Beyond: 400, or a lost answer."""
    replay_bytes: int = 1 << 20
    """How much of a body is kept, so that it can be sent again to another upstream."""
    withheld_bytes: int = 64 * 1024
    """How much of an answer's body is kept when the caller is not to see it."""
    buffer_bytes: int = 512 * 1024
    """What may wait to be written, per direction, before reading from the other side stops."""
    waiting_bytes: int = 64 * 1024
    """What may be read before anybody wants it: the start of a body, pipelined requests."""
    drain_bytes: int = 1 << 20
    """What is read of a body that nobody wanted, for the sake of the connection."""

    connections: int = 4096
    """Open connections of callers: strangers', and the rest, which owners share (`shares.py`)."""
    strangers: int = 512
    """Connections on which no request has been charged to an owner yet. Beyond: the oldest one
    that rests, and had `greeting_s` for a request, is closed."""
    requests: int = 2048
    """Requests in work, which owners share. Beyond: 503."""
    polls: int = 1536
    """Those of them that are held until there is something to say, shared as well: so an
    owner's polls leave room for its other requests."""
    upstream_connections: int = 256
    """Open connections to one upstream. Beyond: wait for one, up to `connect_s`."""

    head_s: float = 10.0
    """A request's head must arrive within this. Beyond: 408 and close."""
    idle_s: float = 75.0
    """How long a caller's connection may rest between requests."""
    greeting_s: float = 1.0
    """How long a stranger's connection is left alone when there are too many: callers that
    come all at once say one after the other who they are."""
    stranger_s: float = 5.0
    """How long a stranger's connection may rest, before its first request and after each."""
    pace_s: float = 30.0
    """Over so long a time a body must make progress, in both directions."""
    pace_bytes_per_s: int = 1024
    """The progress that it must make on average. Below: 408 and close."""
    linger_s: float = 2.0
    """How long what the caller still sends is read after the answer, before closing."""
    connect_s: float = 3.0
    """How long connecting to an upstream may take."""
    answer_s: float = 600.0
    """How long an upstream may neither take nor give a byte."""
    upstream_idle_s: float = 4.0
    """How long an upstream's connection is kept. Shorter than the 5 s after which common
    servers close theirs, so that a request hardly ever meets a closing connection."""

    def check(self) -> None:
        """Raise a `Mistake` that names the bounds that are not positive."""
        if self.strangers >= self.connections:
            raise Mistake("of the gateway's connections, strangers may have only a part")
        if bad := [field.name for field in fields(self) if not getattr(self, field.name) > 0]:
            raise Mistake(f"limits of the gateway must be positive: {', '.join(bad)}")

    @property
    def memory_bytes(self) -> int:
        """The most that one caller's connection, with its upstream's, makes us hold: what
        is kept for replay or withheld, both write buffers (each may be overrun by one
        read), and what waits: the head, the start of the body, pipelined requests."""
        writing = 2 * (self.buffer_bytes + READ_BYTES)
        waiting = self.line_bytes + self.head_bytes + 2 * (self.waiting_bytes + READ_BYTES)
        return self.replay_bytes + self.withheld_bytes + writing + waiting
