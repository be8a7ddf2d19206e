"""The heads of requests: what is accepted, and what is refused with which status. Pure.

llhttp (through httptools) reads the fields. In front of it and behind it stand checks of
our own, so that nothing ambiguous comes through: exactly one way to tell where the body
ends, one Host, one of each field that decides something, origin-form targets only.
"""

import functools
import re
from typing import Final
from urllib.parse import unquote_to_bytes

import msgspec

from holdfast.gateway.http.limits import Limits
from holdfast.gateway.http.llhttp import httptools
from holdfast.gateway.http.trouble import Rejected

__all__ = ["FieldReader", "Fields", "Head", "keep_alive", "parse_request", "plain", "unclean"]

Fields = tuple[tuple[bytes, bytes], ...]
"""Header fields in order: lower-case names, values without surrounding blanks."""

METHODS: Final = frozenset({b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS"})
SINGLE: Final = frozenset(
    {
        b"host",
        b"content-length",
        b"transfer-encoding",
        b"content-type",
        b"authorization",
        b"x-api-key",
        b"expect",
    }
)
"""Fields that decide something: two of them are two opinions."""

_LINE = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+) (\S+) HTTP/([0-9])\.([0-9])")
_PATH = re.compile(rb"/(?:[A-Za-z0-9\-._~!$&'()*+,;=:@/]|%[0-9A-Fa-f]{2})*")
_QUERY = re.compile(rb"(?:[!$&-;=?-~]|%[0-9A-Fa-f]{2})*")  # what browsers and httpx leave as it is
_HOST = re.compile(rb"(?:[A-Za-z0-9\-._~]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{0,5})?")
_LENGTH = re.compile(rb"[0-9]{1,18}")
_UNCLEAN = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|(?<!\r)\n|\r(?![\n])(?=.)", re.DOTALL)
_CONTROLS: Final = bytes(range(9)) + b"\x0b\x0c" + bytes(range(14, 32)) + b"\x7f"


class Head(msgspec.Struct, frozen=True):
    """The head of a request."""

    method: str
    target: str
    """Path and query as they came: valid, in origin form, without dot segments."""
    path: str
    """The path, with its percent-encoding."""
    query: str
    """What follows the question mark, or nothing."""
    headers: Fields
    length: int | None
    """The declared length of the body; None: chunked; 0: there is none."""
    minor: int
    """HTTP/1.0 or HTTP/1.1."""
    keep_alive: bool
    """Whether the caller wants its connection kept."""
    expects: bool
    """Whether the caller waits for `100 Continue` before it sends the body."""

    def get(self, name: bytes) -> bytes | None:
        """The value of a field (the first, where several are allowed)."""
        for one, value in self.headers:
            if one == name:
                return value
        return None


class FieldReader:
    """What httptools calls."""

    __slots__ = ("fields",)

    def __init__(self) -> None:
        self.fields: list[tuple[bytes, bytes]] = []

    def on_header(self, name: bytes, value: bytes) -> None:
        """A field has been read."""
        self.fields.append((name.lower(), value.rstrip(b" \t")))


def unclean(part: bytes | bytearray, start: int = 0) -> bool:
    """Whether the start of a head already holds what no head may: a control character, or
    a line that does not end with CRLF. (A CR at the very end may still be followed.)"""
    return _UNCLEAN.search(part, start) is not None


def plain(raw: bytes, fields: int) -> bool:
    """Whether a head is made of one line, so many fields and an empty line, each ended by
    CRLF, without control characters."""
    lines = raw.count(b"\r\n")
    return lines == fields + 2 == raw.count(b"\n") == raw.count(b"\r") and len(raw) == len(
        raw.translate(None, _CONTROLS)
    )


def parse_request(raw: bytes, limits: Limits) -> Head:
    """Read a whole head, with the empty line that ends it. Raises `Rejected`."""
    end = raw.find(b"\r\n")
    if end > limits.line_bytes:
        raise Rejected(414, "target_too_long", "the request line is too long")
    if len(raw) - end > limits.head_bytes:
        raise Rejected(431, "headers_too_large", "the header fields are too large")
    match = _LINE.fullmatch(raw, 0, end)
    if match is None:
        raise _bad("the request line is malformed")
    method, target, major, minor = match.groups()
    if major != b"1" or minor not in (b"0", b"1"):
        raise Rejected(505, "http_version", "only HTTP/1.1 and HTTP/1.0 are spoken here")
    if method not in METHODS:
        raise Rejected(405, "method_not_allowed", "this method is not allowed here")
    path, query = (_split_again if len(target) <= _USUAL_BYTES else _split)(target)
    fields = _fields(raw, limits)
    seen = _singles(fields, required_host=minor == b"1")
    length = _length(seen, minor, limits)
    expect = seen.get(b"expect")
    if expect is not None and expect.lower() != b"100-continue":
        raise Rejected(417, "expectation_failed", "this expectation cannot be met")
    return Head(
        method.decode(),
        target.decode(),
        path,
        query,
        fields,
        length,
        1 if minor == b"1" else 0,
        keep_alive(fields, default=minor == b"1"),
        expect is not None and minor == b"1" and length != 0,
    )


def _bad(message: str) -> Rejected:
    return Rejected(400, "bad_request", message)


def _split(target: bytes) -> tuple[str, str]:
    """Path and query of a target. Raises `Rejected`."""
    path, _, query = target.partition(b"?")
    if not _PATH.fullmatch(path) or not _QUERY.fullmatch(query):
        raise _bad("the request's target must be a path and a query, percent-encoded")
    plain = unquote_to_bytes(path) if b"%" in path else path
    if len(plain) != len(plain.translate(None, _CONTROLS + b"\t\r\n\\")):
        raise _bad("the path hides a control character or a backslash")
    if b"/." in plain and not {b".", b".."}.isdisjoint(plain.split(b"/")):
        raise _bad("the path has dot segments")
    return path.decode(), query.decode()


_USUAL_BYTES: Final = 128
_split_again = functools.lru_cache(maxsize=1024)(_split)  # the same few paths, all the time


def _fields(raw: bytes, limits: Limits) -> Fields:
    reader = FieldReader()
    try:
        httptools.HttpRequestParser(reader).feed_data(raw)
    except httptools.HttpParserUpgrade:
        pass  # an upgrade is an offer, and may be ignored
    except httptools.HttpParserError as error:
        raise _bad(f"the head is malformed: {error}") from None
    if len(reader.fields) > limits.fields:
        raise Rejected(431, "too_many_headers", "there are too many header fields")
    if not plain(raw, len(reader.fields)):
        raise _bad("the head has a folded line, a bare line end or a control character")
    return tuple(reader.fields)


def _singles(fields: Fields, *, required_host: bool) -> dict[bytes, bytes]:
    """The fields that may be there once, by name."""
    seen: dict[bytes, bytes] = {}
    for name, value in fields:
        if name in SINGLE:
            if name in seen:
                raise _bad(f"the field {name.decode()} is there twice")
            seen[name] = value
    host = seen.get(b"host")
    if host is None:
        if required_host:
            raise _bad("the Host field is missing")
    elif not _HOST.fullmatch(host):
        raise _bad("the Host field is malformed")
    return seen


def _length(seen: dict[bytes, bytes], minor: bytes, limits: Limits) -> int | None:
    """The one way in which the body's end is told."""
    declared, coding = seen.get(b"content-length"), seen.get(b"transfer-encoding")
    if coding is not None:
        if declared is not None:
            raise _bad("the request has both a length and a transfer coding")
        if minor == b"0":
            raise _bad("HTTP/1.0 has no transfer codings")
        if coding.lower() != b"chunked":
            raise _bad("the only transfer coding that is understood is chunked")
        return None
    if declared is None:
        return 0
    if not _LENGTH.fullmatch(declared):
        raise _bad("the length is malformed")
    length = int(declared)
    if length > limits.body_bytes:
        raise Rejected(413, "body_too_large", f"a body has at most {limits.body_bytes} bytes")
    return length


def keep_alive(fields: Fields, *, default: bool) -> bool:
    """Whether the other side wants its connection kept."""
    keep = default
    for name, value in fields:
        if name == b"connection":
            tokens = [token.strip() for token in value.lower().split(b",")]
            if b"close" in tokens:
                return False
            keep = keep or b"keep-alive" in tokens
    return keep
