"""One connection to a Redis server: requests out, answers in, in the Redis protocol (RESP2).

Written for large values: what is sent goes to the kernel from where it lies, and what is
received is written once, into memory that belongs to the caller. A general client copies
several times on both ways.

Invariants: every wait has an end (`timeout_s`, and more for as many bytes as move);
whatever is not an answer to what was asked raises `Lost`, after which the connection must
be closed, because nobody knows any more where the next answer begins. A `Wire` is used by
one thread at a time.
"""

import contextlib
import select
import socket
import ssl
import struct
import time
from collections.abc import Iterable, Sequence

import msgspec

from holdfast.errors import Denied, Unavailable
from holdfast.transfer.frame import Buffer

__all__ = ["Address", "Answer", "Lost", "Refused", "Wire", "Word", "command"]

MOST_BULK_BYTES = 512 << 20
"""Redis has no longer strings: whoever announces one is not Redis, or was misheard."""

_MOST_ITEMS = 1 << 24
_READ_BYTES = 256 << 10
_LINE_BYTES = 64 << 10
_LARGE_BYTES = 16 << 10
_SENT_AT_ONCE = 512
_MOST_NESTED = 4
_SLOWEST_BYTES_PER_S = 4e6
"""Slower than that is as good as broken."""


class Lost(Exception):
    """The connection broke, fell silent, or said what nobody asked for."""


class Refused(Exception):
    """An answer: the server's error. `code` is its first word."""

    @property
    def code(self) -> str:
        """What kind of error, as Redis names it: OOM, WRONGTYPE, ..."""
        return str(self).partition(" ")[0]


Answer = bytes | bytearray | int | None | Refused | list["Answer"]
"""Text is bytes, a value is a bytearray, nothing is None."""


class Address(msgspec.Struct, frozen=True):
    """Where a server is and who we are to it."""

    host: str
    port: int
    user: str = ""
    password: str = ""
    db: int = 0
    tls: bool = False
    ca: str = ""
    """A file with the certificates to trust, instead of the system's."""


Word = Buffer | str | int | list[Buffer]
"""Of a request; one that lies in several pieces is a list of them."""


def command(*words: Word) -> list[Buffer]:
    """A request. Large words are not copied."""
    out: list[Buffer] = [b"*%d\r\n" % len(words)]
    for word in words:
        pieces = word if isinstance(word, list) else [word]
        data = [str(one).encode() if isinstance(one, str | int) else one for one in pieces]
        out += [b"$%d\r\n" % sum(map(len, data)), *data, b"\r\n"]
    return out


class Wire:
    """A connection that has said who it is."""

    def __init__(self, address: Address, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._until = time.monotonic() + timeout_s
        self._buffer = bytearray(_READ_BYTES)
        self._view = memoryview(self._buffer)
        self._low = self._high = 0
        self.identity = ("", "")
        """What the server calls this connection: its number and our address."""
        try:
            self._socket = _connect(address, timeout_s)
        except (OSError, ssl.SSLError) as error:
            raise Unavailable(f"no Redis at {address.host}:{address.port}: {error}") from error
        try:
            self._introduce(address)
        except BaseException:
            self.close()
            raise

    def _introduce(self, address: Address) -> None:
        requests = [command("CLIENT", "INFO")]
        if address.db:
            requests.insert(0, command("SELECT", address.db))
        if address.password:
            who = (address.user, address.password) if address.user else (address.password,)
            requests.insert(0, command("AUTH", *who))
        try:
            answers = self.ask(requests)
        except Lost as error:
            raise Unavailable(
                f"Redis at {address.host}:{address.port} did not greet us: {error}"
            ) from error
        for answer in answers:
            if isinstance(answer, Refused):
                raise refusal(answer, f"{address.host}:{address.port}")
        told = answers[-1]
        words = told.decode(errors="replace").split() if isinstance(told, bytearray) else []
        fields = dict(word.split("=", 1) for word in words if "=" in word)
        self.identity = (fields.get("id", ""), fields.get("addr", ""))
        if not self.identity[0].isdigit() or ":" not in self.identity[1]:
            raise Unavailable(f"Redis at {address.host}:{address.port} did not say who we are")

    def close(self) -> None:
        """Hang up. What has not reached the server yet never will."""
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with contextlib.suppress(OSError):
            self._socket.close()

    def quiet(self) -> bool:
        """Whether an idle connection is still usable: nothing is said on it, not even goodbye."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return self._low == self._high and not poll.poll(0)

    # Asking

    def ask(self, requests: Sequence[Sequence[Buffer]]) -> list[Answer]:
        """Send requests and read as many answers."""
        self.send(part for request in requests for part in request)
        return [self.read() for _ in requests]

    def send(self, parts: Iterable[Buffer]) -> None:
        """Send bytes. The time for the answers begins now."""
        self._until = time.monotonic() + self._timeout_s
        try:
            waiting: list[Buffer] = []
            small = bytearray()
            for part in parts:
                if len(part) < _LARGE_BYTES:
                    small += part
                    continue
                waiting += [bytes(small), part]
                small.clear()
                if len(waiting) >= _SENT_AT_ONCE:
                    self._send_all(waiting)
                    waiting = []
            self._send_all([*waiting, small])
        except OSError as error:
            raise Lost(_why(error)) from error

    def _send_all(self, parts: list[Buffer]) -> None:
        left = [memoryview(part) for part in parts if part]
        self._allow(sum(map(len, left)))
        if isinstance(self._socket, ssl.SSLSocket):
            for part in left:
                self._limit()
                self._socket.sendall(part)
            return
        while left:
            self._limit()
            sent = self._socket.sendmsg(left)
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if sent:
                left[0] = left[0][sent:]

    # Reading

    def read(self, nested: int = 0) -> Answer:
        """One answer."""
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return Refused(rest.decode(errors="replace"))
        if kind == b":":
            return _number(rest)
        if kind == b"$":
            return self._value(line)
        if kind == b"*" and nested < _MOST_NESTED:
            count = _size(rest, _MOST_ITEMS)
            return None if count is None else [self.read(nested + 1) for _ in range(count)]
        raise Lost(f"an answer begins with {kind!r}")

    def read_values(self, count: int) -> list[bytearray | None] | Refused:
        """An answer with exactly so many values, such as that of MGET."""
        line = self._line()
        if line[:1] == b"-":
            return Refused(line[1:].decode(errors="replace"))
        if line != b"*%d" % count:
            raise Lost(f"{line[:40]!r} does not begin an answer with {count} values")
        return [self._value(self._line()) for _ in range(count)]

    def _value(self, line: bytes) -> bytearray | None:
        if line[:1] != b"$":
            raise Lost(f"{line[:40]!r} does not begin a value")
        size = _size(line[1:], MOST_BULK_BYTES)
        return None if size is None else self._bulk(size)

    def read_into(self, place: memoryview) -> Refused | None:
        """An answer that is one value of exactly this size, written where it belongs."""
        line = self._line()
        if line[:1] == b"-":
            return Refused(line[1:].decode(errors="replace"))
        if line == b"$-1":
            return Refused("GONE there is no such part any more")
        if line != b"$%d" % len(place):
            raise Lost(f"{line[:40]!r} does not begin a value of {len(place)} bytes")
        self._take(place)
        return None

    def _line(self) -> bytes:
        while True:
            end = self._buffer.find(b"\r\n", self._low, self._high)
            if end >= 0:
                line = bytes(self._view[self._low : end])
                self._low = end + 2
                return line
            if self._high - self._low > _LINE_BYTES:
                raise Lost("an answer without end")
            self._fill()

    def _bulk(self, size: int) -> bytearray:
        low, end = self._low, self._low + size
        if end + 2 <= self._high:
            if self._buffer[end : end + 2] != b"\r\n":
                raise Lost("a value does not end where it should")
            self._low = end + 2
            return self._buffer[low:end]
        try:
            value = bytearray(size)
        except MemoryError:
            raise Lost(f"no memory for a value of {size} bytes") from None
        self._take(memoryview(value))
        return value

    def _take(self, place: memoryview) -> None:
        self._allow(len(place))
        done = min(len(place), self._high - self._low)
        place[:done] = self._view[self._low : self._low + done]
        self._low += done
        try:
            while done < len(place):
                self._limit()
                got = self._socket.recv_into(place[done:])
                if not got:
                    raise Lost("the server hung up in the middle of a value")
                done += got
        except OSError as error:
            raise Lost(_why(error)) from error
        while self._high - self._low < 2:
            self._fill()
        if self._buffer[self._low : self._low + 2] != b"\r\n":
            raise Lost("a value does not end where it should")
        self._low += 2

    def _fill(self) -> None:
        if self._low == self._high:
            self._low = self._high = 0
        elif self._high == len(self._buffer):
            rest = bytes(self._view[self._low : self._high])
            self._view[: len(rest)] = rest
            self._low, self._high = 0, len(rest)
        try:
            self._limit()
            got = self._socket.recv_into(self._view[self._high :])
        except OSError as error:
            raise Lost(_why(error)) from error
        if not got:
            raise Lost("the server hung up")
        self._allow(got)
        self._high += got

    def _allow(self, size: int) -> None:
        self._until += size / _SLOWEST_BYTES_PER_S

    def _limit(self) -> None:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)


def refusal(answer: Refused, what: str) -> Exception:
    """An error of the server as one of ours."""
    if answer.code in ("NOAUTH", "WRONGPASS", "NOPERM") or "AUTH" in str(answer):
        return Denied(f"{what}: Redis does not let us: {answer}")
    return Unavailable(f"{what}: Redis refused: {answer}")


def _connect(address: Address, timeout_s: float) -> socket.socket:
    plain = socket.create_connection((address.host, address.port), timeout=timeout_s)
    try:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if not address.tls:
            return plain
        context = ssl.create_default_context(cafile=address.ca or None)
        return context.wrap_socket(plain, server_hostname=address.host)
    except BaseException:
        plain.close()
        raise


def _why(error: OSError) -> str:
    return "no answer in time" if isinstance(error, TimeoutError) else str(error)


def _number(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        raise Lost(f"{text[:40]!r} is not a number") from None


def _size(text: bytes, most: int) -> int | None:
    if text == b"-1":
        return None
    size = _number(text)
    if not 0 <= size <= most:
        raise Lost(f"{size} is not a size")
    return size
