"""Connections to upstreams: kept while they are fresh, bounded in number.

Invariants: a line that is handed out was open a moment ago, with nothing said on it. What
happens to a request that was written to it is never hidden: nothing here sends again. A new line
is made only when none is idle, so a bound on the lines in use bounds the open ones.
"""

import asyncio
import functools

from holdfast.errors import Unavailable
from holdfast.gateway.http.limits import Limits
from holdfast.gateway.http.line import Line

__all__ = ["Pool", "Upstream"]

Upstream = tuple[str, int]
"""Host and port."""


class _Book:
    """What there is for one upstream."""

    __slots__ = ("idle", "lines", "places", "users")

    def __init__(self, places: int) -> None:
        self.users = 0
        """Requests that have a line, or wait for one."""
        self.idle: list[Line] = []
        self.lines: set[Line] = set()
        """Those that stand or are being made."""
        self.places = asyncio.Semaphore(places)
        """For lines in use."""


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
        return sum(len(book.lines) for book in self._books.values())

    async def take(self, upstream: Upstream) -> Line:
        """A line to an upstream. Raises `Unavailable`: nothing has reached it then."""
        book = self._books.get(upstream)
        if book is None:
            book = self._books[upstream] = _Book(self._limits.upstream_connections)
        book.users += 1
        if not book.places.locked() and (line := self._kept(book)) is not None:
            await book.places.acquire()  # nobody waits for a place: this takes no time
            return line
        try:
            async with asyncio.timeout(self._limits.connect_s):
                return await self._make(upstream, book)
        except BaseException as error:
            book.users -= 1
            self._tidy(upstream)
            if isinstance(error, OSError):  # or the time is over
                raise self._unavailable(upstream, error) from None
            raise

    def _unavailable(self, upstream: Upstream, error: OSError) -> Unavailable:
        where = f"{upstream[0]}:{upstream[1]}"
        if isinstance(error, TimeoutError):
            return Unavailable(f"no connection to {where} within {self._limits.connect_s} s")
        return Unavailable(f"{where} cannot be reached: {error}")

    def give(self, line: Line, upstream: Upstream, *, reusable: bool) -> None:
        """Hand a line back."""
        line.end()
        book = self._books[upstream]
        book.users -= 1
        book.places.release()
        if not reusable or not line.open or not line.writable or self._closed:
            line.abort()
            self._tidy(upstream)
            return
        line.idle_since = asyncio.get_running_loop().time()
        book.idle.append(line)
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
        """Wait for a place; then a line that somebody has handed back meanwhile, or a new one."""
        await book.places.acquire()
        if (kept := self._kept(book)) is not None:
            return kept
        line = Line(self._limits, functools.partial(self._ended, upstream, book))
        book.lines.add(line)
        try:
            await asyncio.get_running_loop().create_connection(lambda: line, *upstream)
        except BaseException:
            line.abort()
            self._ended(upstream, book, line)
            book.places.release()
            raise
        return line

    def _ended(self, upstream: Upstream, book: _Book, line: Line) -> None:
        """A line has closed, or was never made."""
        book.lines.discard(line)
        if line in book.idle:
            book.idle.remove(line)
        self._tidy(upstream)

    def _tidy(self, upstream: Upstream) -> None:
        """Addresses come and go: keep none that has no lines."""
        book = self._books.get(upstream)
        if book is not None and not book.lines and not book.users:
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
