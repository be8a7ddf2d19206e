"""One request of one caller, and what can be done with it.

A handler reads the body, passes the request on (perhaps several times), or answers it. The
caller gets exactly one answer. After `Withheld`, `Refused` or `Lost` it has seen nothing, and
the request can be passed on again while `cannot_replay` is false.
"""

import asyncio
import email.utils
import functools
import time
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from holdfast.errors import Mistake, TooLarge, Unavailable
from holdfast.gateway.http.head import Fields, Head
from holdfast.gateway.http.intake import Intake
from holdfast.gateway.http.outcomes import Forwarded, Refused
from holdfast.gateway.http.passage import Passage, Relay
from holdfast.gateway.http.pool import Upstream
from holdfast.gateway.http.serialize import checked, reply_head, request_head
from holdfast.gateway.http.shares import Shares
from holdfast.gateway.http.trouble import CallerLeft

if TYPE_CHECKING:
    from holdfast.gateway.http.connection import Connection
    from holdfast.gateway.http.server import Server

__all__ = ["Exchange"]


def _always(_status: int, _headers: Fields) -> bool:
    return True


class Exchange:
    """See the module."""

    def __init__(
        self, connection: "Connection", head: Head, intake: Intake, server: "Server"
    ) -> None:
        self.head = head
        self.peer = connection.peer
        """The caller's address."""
        self._connection = connection
        self._intake = intake
        self._pool = server.pool
        self._server = server
        self._charged: list[tuple[Shares, str]] = []
        self._passage: Passage | None = None
        self._reading: asyncio.Future[None] | None = None
        self._limit = 0
        self._trouble: Exception | None = None
        self.answered = False
        """Whether an answer has begun: then there cannot be another one."""
        self.closes = False
        """Whether the connection ends with this answer."""

    @property
    def gone(self) -> bool:
        """Whether the caller has left: there is nobody to wait for."""
        return isinstance(self._trouble, CallerLeft)

    @property
    def cannot_replay(self) -> bool:
        """Whether too much of the body has passed for sending it again."""
        return not self._intake.whole

    @property
    def received_bytes(self) -> int:
        """How much of the body has arrived."""
        return self._intake.received_bytes

    def charge(self, owner: str, *, poll: bool = False) -> str:
        """Count the request, and its connection, as this owner's.

        Returns what the owner has too many of ("connections", "requests", "polls"), or "". The
        handler refuses the request then. Owners share each kind of place: see `shares.py`.
        """
        wanted = {"requests": self._server.owned_requests}
        if poll:
            wanted["polls"] = self._server.owned_polls
        over = "" if self._connection.charge(owner) else "connections"
        for name, shares in wanted.items() if not over else ():
            if not shares.take(owner):
                over = name
                break
            self._charged.append((shares, owner))
        if over:
            self._server.counts[f"owner_{over}"] += 1
        return over

    def discharge(self) -> None:
        """The request is done: its places are free again. From the connection."""
        for shares, owner in self._charged:
            shares.give(owner)
        self._charged.clear()

    async def body(self, limit: int) -> bytes:
        """The whole body. Raises `TooLarge` beyond `limit`."""
        self._check()
        intake = self._intake
        if not intake.whole:
            raise Mistake("the body has been passed on, and was too large to be kept")
        if max(self.head.length or 0, intake.received_bytes) > limit:
            raise TooLarge(f"the body is larger than {limit} bytes")
        if not intake.complete:
            intake.keep(limit)
            self._limit = limit
            self._reading = asyncio.get_running_loop().create_future()
            intake.sink = self
            self._connection.want_body()
            try:
                await self._reading
            finally:
                intake.sink = None
                self._reading = None
            if intake.received_bytes > limit:
                raise TooLarge(f"the body is larger than {limit} bytes")
        return intake.kept()

    def take(self, _piece: bytes) -> None:
        """The body piles up until it is complete, or too large. From the intake."""
        if self._intake.received_bytes > self._limit:
            self.finish()

    def finish(self) -> None:
        """There is nothing more to wait for. From the intake."""
        if self._reading is not None and not self._reading.done():
            self._reading.set_result(None)

    async def answer(
        self, status: int, headers: Iterable[tuple[bytes, bytes]] = (), body: bytes = b""
    ) -> None:
        """Answer the request. What is left of its body is read and dropped if that is
        little; otherwise the connection closes."""
        self._check()
        if not 200 <= status <= 599:
            raise Mistake(f"{status} is not the status of an answer")
        fields = checked(headers)
        if not any(name == b"date" for name, _ in fields):
            fields.append((b"date", _date(int(time.time()))))
        bodiless = status in (204, 304)
        close = self._connection.begin_answer(drains=True)
        head = reply_head(
            status,
            fields,
            length=None if bodiless else len(body),
            chunked=False,
            close=close,
            minor=self.head.minor,
        )
        silent = bodiless or self.head.method == "HEAD" or not body
        self._connection.write([head] if silent else [head, body])

    async def forward(
        self,
        upstream: Upstream,
        *,
        path: str | None = None,
        replace: Mapping[bytes, bytes] | None = None,
        remove: Collection[bytes] = (),
        relay: Relay = _always,
        hold_s: float = 0.0,
    ) -> Forwarded:
        """Pass the request on, and the answer back if `relay(status, headers)` says so.

        `path` is the target (path and query) that the upstream sees, as it came by default;
        `replace` sets fields of the request and `remove` takes some away. With `hold_s` a body
        that is too large to be replayed is held back until the upstream says that it
        wants it, or for so long: until then it can still be sent elsewhere.

        Raises `CallerLeft` when the caller leaves meanwhile, and `Rejected` when the rest of
        its body cannot be accepted; the upstream's connection is cut then.
        """
        self._check()
        if not self._intake.whole:
            raise Mistake("the body is too large to be sent again")
        write_head = functools.partial(
            request_head,
            self.head,
            self.head.target if path is None else _target(path),
            replace=replace or {},
            remove=remove,
            host=_host(upstream),
        )
        try:
            line = await self._pool.take(upstream)
        except Unavailable as error:
            return Refused(str(error))
        passage = Passage(
            self._connection, self.head, self._intake, line, write_head, relay, hold_s
        )
        try:
            self._check()
            if not line.open:
                return Refused("the connection to the upstream closed before it was used")
            self._passage = passage
            passage.start()
            return await passage.outcome
        finally:
            self._passage = None
            self._pool.give(line, upstream, reusable=passage.end())

    def fail(self, error: Exception) -> None:
        """The caller has left, or what it sends cannot be accepted. From the connection."""
        if self._trouble is None:
            self._trouble = error
        if self._passage is not None:
            self._passage.fail(error)
        if self._reading is not None and not self._reading.done():
            self._reading.set_exception(error)

    def abandon(self, reason: str) -> None:
        """Wait no longer for an answer that has not begun: `forward` gives `Lost`."""
        if self._passage is not None:
            self._passage.abandon(reason)

    def caller_takes(self, takes: bool) -> None:
        """Whether the caller reads its answer. From the connection."""
        if self._passage is not None:
            self._passage.caller_takes(takes)

    @property
    def wants_body(self) -> bool:
        """Whether somebody waits for more of the body."""
        return self._intake.sink is not None

    def _check(self) -> None:
        if self._trouble is not None:
            raise self._trouble
        if self.answered:
            raise Mistake("the request has been answered")


def _target(path: str) -> str:
    if not path.startswith("/") or not path.isascii() or not path.isprintable() or " " in path:
        raise Mistake(f"a target is a path, percent-encoded, not {path[:80]!r}")
    return path


def _host(upstream: Upstream) -> bytes:
    host, port = upstream
    return (f"[{host}]:{port}" if ":" in host else f"{host}:{port}").encode()


@functools.lru_cache(maxsize=1)
def _date(now: int) -> bytes:
    """The time as answers say it; the same bytes for a second."""
    return email.utils.formatdate(now, usegmt=True).encode()
