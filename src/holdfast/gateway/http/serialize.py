"""Heads as bytes: everything that leaves the gateway is written here, from parsed parts. Pure.

Invariants: fields that belong to one connection (RFC 9110, 7.6.1) are not passed on; the
framing is our own, said in exactly one way; no value that we are given can end a line.
"""

import http
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from holdfast.errors import Mistake
from holdfast.gateway.http.head import SINGLE, Fields, Head

__all__ = [
    "CONTINUE",
    "LAST_CHUNK",
    "checked",
    "chunk",
    "end_to_end",
    "reply_head",
    "request_head",
]

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK: Final = b"0\r\n\r\n"

_HOP: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"http2-settings",
        b"content-length",  # written anew
        b"expect",
    }
)
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_REASONS: Final = {status.value: status.phrase for status in http.HTTPStatus}
_LINES: Final = {
    status: f"HTTP/1.1 {status} {_REASONS.get(status, '')}\r\n".encode()
    for status in range(100, 1000)
}
_VIA: Final = (b"via", b"1.1 holdfast")


def end_to_end(fields: Fields) -> list[tuple[bytes, bytes]]:
    """The fields that are for the other end, not for this connection."""
    drop: Collection[bytes] = _HOP
    for name, value in fields:
        if name == b"connection":
            named = {token.strip() for token in value.lower().split(b",")}
            drop = (named - SINGLE).union(drop)  # nobody can talk us out of Host
    return [field for field in fields if field[0] not in drop and field[0][:6] != b"proxy-"]


def request_head(
    head: Head,
    target: str,
    *,
    replace: Mapping[bytes, bytes],
    remove: Collection[bytes],
    length: int | None,
    expect: bool,
    host: bytes,
) -> bytes:
    """A request for an upstream. `length` None: the body is sent in chunks. `host` is for a
    caller that named none.

    A caller's field is also dropped when it only looks like one that is replaced or removed
    (`x_name` for `x-name`): some servers do not tell them apart.
    """
    lines = [f"{head.method} {target} HTTP/1.1".encode("ascii")]
    if b"host" not in replace and head.get(b"host") is None:
        lines.append(b"host: %s" % host)
    for name, value in end_to_end(head.headers):
        like = name.replace(b"_", b"-") if b"_" in name else name
        if like not in replace and like not in remove:
            lines.append(b"%s: %s" % (name, value))
    lines += [b"%s: %s" % _checked(field) for field in replace.items()]
    lines.append(b"%s: %s" % _VIA)
    if length is None:
        lines.append(b"transfer-encoding: chunked")
    elif length or head.method not in ("GET", "HEAD", "OPTIONS", "DELETE"):
        lines.append(b"content-length: %d" % length)
    if expect:
        lines.append(b"expect: 100-continue")
    lines.append(b"\r\n")
    return b"\r\n".join(lines)


def reply_head(
    status: int,
    fields: Iterable[tuple[bytes, bytes]],
    *,
    length: int | None,
    chunked: bool,
    close: bool,
    minor: int,
) -> bytes:
    """An answer for a caller. `length` None and not chunked: nothing is said about it."""
    parts = [_LINES[status]]
    parts += [b"%s: %s\r\n" % field for field in fields]
    if chunked:
        parts.append(b"transfer-encoding: chunked\r\n")
    elif length is not None:
        parts.append(b"content-length: %d\r\n" % length)
    if close:
        parts.append(b"connection: close\r\n")
    elif minor == 0:
        parts.append(b"connection: keep-alive\r\n")
    parts.append(b"\r\n")
    return b"".join(parts)


def chunk(piece: bytes) -> list[bytes]:
    """A piece as one chunk. Never empty: an empty chunk would be the last."""
    assert piece
    return [b"%x\r\n" % len(piece), piece, b"\r\n"]


def checked(fields: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Fields that we were given to write, or a `Mistake`."""
    return [_checked(field) for field in fields]


def _checked(field: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
    name, value = field
    if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
        raise Mistake(f"a header field cannot be written: {name!r}")
    if name in _HOP:
        raise Mistake(f"the field {name!r} is written by the gateway itself")
    return field
