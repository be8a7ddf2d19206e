"""Connections to upstreams: kept while they are fresh, bounded in number.

Invariant: a line that is handed out was open a moment ago, with nothing said on it. What
happens to a request that was written to it is never hidden: nothing here sends again.
"""

import asyncio
import functools
from collections import deque

from holdfast.errors import Unavailable
from holdfast.gateway.http.limits import Limits
from holdfast.gateway.http.line import Line

__all__ = ["Pool", "Upstream"]

Upstream = tuple[str, int]
"""Host and port."""


class _Book:
    """What there is for one upstream."""

    __slots__ = ("idle", "open", "takers", "waiting")

    def __init__(self) -> None:
        self.takers = 0
        self.idle: list[Line] = []
        self.open = 0
        """Lines that stand or are being made."""
        self.waiting: deque[asyncio.Future[None]] = deque()


class Pool:
    """See the module. One per process is enough; it belongs to one event loop."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._books: dict[Upstream, _Book] = {}
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def open_lines(self) -> int:
        """How many connections to upstreams there are."""
        return sum(book.open for book in self._books.values())

    async def take(self, upstream: Upstream) -> Line:
        """A line to an upstream. Raises `Unavailable`: nothing has reached it then."""
        book = self._books.get(upstream)
        if book is None:
            book = self._books[upstream] = _Book()
        if (line := self._kept(book)) is not None:
            return line
        book.takers += 1
        try:
            async with asyncio.timeout(self._limits.connect_s):
                return await self._make(upstream, book)
        except TimeoutError:
            raise Unavailable(
                f"no connection to {upstream[0]}:{upstream[1]} within {self._limits.connect_s} s"
            ) from None
        except OSError as error:
            raise Unavailable(f"{upstream[0]}:{upstream[1]} cannot be reached: {error}") from None
        finally:
            book.takers -= 1
            self._tidy(upstream)

    def give(self, line: Line, upstream: Upstream, *, reusable: bool) -> None:
        """Hand a line back."""
        line.end()
        book = self._books.get(upstream)
        if not reusable or not line.open or not line.writable or self._closed or book is None:
            line.abort()
            return
        line.idle_since = asyncio.get_running_loop().time()
        book.idle.append(line)
        self._wake(book)
        if self._sweep is None:
            self._later()

    def close(self) -> None:
        """Close all idle lines; those in use are closed when they are handed back."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        for book in self._books.values():
            while book.idle:
                book.idle.pop().abort()

    def _kept(self, book: _Book) -> Line | None:
        """The idle line that was used last, if it is still fresh."""
        oldest = asyncio.get_running_loop().time() - self._limits.upstream_idle_s
        while book.idle:
            line = book.idle.pop()
            if line.idle_since > oldest and line.fresh():
                return line
            line.abort()
        return None

    async def _make(self, upstream: Upstream, book: _Book) -> Line:
        loop = asyncio.get_running_loop()
        while book.open >= self._limits.upstream_connections:
            turn = loop.create_future()
            book.waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._wake(book)  # it was our turn: it is somebody else's now
                raise
            finally:
                if turn in book.waiting:
                    book.waiting.remove(turn)
            if (kept := self._kept(book)) is not None:
                return kept
        book.open += 1
        counted = [True]
        line = Line(self._limits, functools.partial(self._ended, upstream, book, counted))
        try:
            await loop.create_connection(lambda: line, *upstream)
        except BaseException:
            line.abort()
            self._ended(upstream, book, counted, line)
            raise
        return line

    def _ended(self, upstream: Upstream, book: _Book, counted: list[bool], line: Line) -> None:
        """A line has closed, or was never made; counted once, whichever comes first."""
        if counted:
            counted.clear()
            book.open -= 1
            if line in book.idle:
                book.idle.remove(line)
            self._wake(book)
            self._tidy(upstream)

    def _wake(self, book: _Book) -> None:
        while book.waiting:
            turn = book.waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    def _tidy(self, upstream: Upstream) -> None:
        """Addresses come and go: keep none that has no lines."""
        book = self._books.get(upstream)
        if book is not None and not book.open and not book.takers:
            del self._books[upstream]

    def _later(self) -> None:
        wait_s = self._limits.upstream_idle_s / 2
        self._sweep = asyncio.get_running_loop().call_later(wait_s, self._close_old)

    def _close_old(self) -> None:
        self._sweep = None
        oldest = asyncio.get_running_loop().time() - self._limits.upstream_idle_s
        for book in list(self._books.values()):
            for line in [line for line in book.idle if line.idle_since <= oldest]:
                book.idle.remove(line)
                line.abort()
        if any(book.idle for book in self._books.values()):
            self._later()
