"""Where a body ends, as bytes arrive. Pure.

A decoder takes bytes in whatever pieces they come and gives the body's bytes; what follows
the body stays in `rest`. Invariant: how the bytes were cut into pieces does not matter.

Chunked bodies are read strictly, because a tolerant reader is one half of request
smuggling: lines end with CRLF, sizes are plain hexadecimal digits, extensions are printable
and dropped, and the trailer is made of well-formed fields, and dropped too.
"""

import re
from typing import Final, Protocol

from holdfast.errors import Corrupt

__all__ = ["Chunked", "Decoder", "Lengthed", "Malformed", "UntilClose"]

SIZE_LINE_BYTES: Final = 256
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;[\t\x20-\x7e]*)?")
_FIELD = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*")


class Malformed(Corrupt):
    """The bytes are not a chunked body."""


class Decoder(Protocol):
    """What tells a body's bytes from what follows."""

    done: bool
    rest: bytes

    def feed(self, data: bytes) -> bytes:
        """Take bytes; return those of the body, in one piece: many small ones would cost
        many times their size."""


class Lengthed:
    """A body of a declared length."""

    __slots__ = ("_missing", "done", "rest")

    def __init__(self, length: int) -> None:
        self._missing = length
        self.done = length == 0
        self.rest = b""

    def feed(self, data: bytes) -> bytes:
        """Take bytes; return those of the body."""
        if len(data) < self._missing:
            self._missing -= len(data)
            return data
        self.done = True
        self.rest = data[self._missing :]
        body = data[: self._missing] if self.rest else data
        self._missing = 0
        return body


class UntilClose:
    """A body that ends when the connection does."""

    __slots__ = ("done", "rest")

    def __init__(self) -> None:
        self.done = False
        self.rest = b""

    def feed(self, data: bytes) -> bytes:
        """Take bytes; all of them are the body's."""
        return data


class Chunked:
    """A chunked body."""

    __slots__ = ("_in_trailer", "_missing", "_partial", "_trailer_bytes", "done", "rest")

    def __init__(self, trailer_bytes: int) -> None:
        self._missing = 0  # of the present chunk, with the CRLF after it
        self._in_trailer = False
        self._trailer_bytes = trailer_bytes
        self._partial = b""  # the start of a line
        self.done = False
        self.rest = b""

    def feed(self, data: bytes) -> bytes:
        """Take bytes; return those of the body. Raises `Malformed`."""
        if self._missing - 2 > len(data):  # the common case: all of it is inside a chunk
            self._missing -= len(data)
            return data
        pieces: list[bytes] = []
        at = 0
        while at < len(data) and not self.done:
            at = self._chunk(data, at, pieces) if self._missing else self._line(data, at)
        if self.done:
            self.rest = data[at:]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _chunk(self, data: bytes, at: int, pieces: list[bytes]) -> int:
        """Take what belongs to the present chunk and the CRLF that must follow it."""
        if self._missing > 2:
            piece = data[at : at + self._missing - 2]
            pieces.append(piece)
            self._missing -= len(piece)
            at += len(piece)
        while at < len(data) and self._missing:
            if data[at] != b"\n\r"[self._missing - 1]:
                raise Malformed("a chunk is not followed by CRLF")
            self._missing -= 1
            at += 1
        return at

    def _line(self, data: bytes, at: int) -> int:
        """Take a line: the size of a chunk, or a field of the trailer."""
        end = data.find(b"\n", at)
        most = self._trailer_bytes if self._in_trailer else SIZE_LINE_BYTES
        stop = len(data) if end < 0 else end + 1
        if len(self._partial) + stop - at > most:
            raise Malformed("a chunk's size line or the trailer is too long")
        self._partial += data[at:stop]
        if end >= 0:
            line, self._partial = self._partial, b""
            if not line.endswith(b"\r\n"):
                raise Malformed("a line of a chunked body does not end with CRLF")
            self._take_line(line[:-2])
        return stop

    def _take_line(self, line: bytes) -> None:
        if self._in_trailer:
            self._trailer_bytes -= len(line) + 2
            if not line:
                self.done = True
            elif not _FIELD.fullmatch(line):
                raise Malformed("the trailer of a chunked body is malformed")
        elif (match := _SIZE.fullmatch(line)) is None:
            raise Malformed("the size of a chunk is malformed")
        elif size := int(match[1], 16):
            self._missing = size + 2
        else:
            self._in_trailer = True
