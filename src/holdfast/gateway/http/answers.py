"""The heads of an upstream's answers. Pure.

An answer that cannot be understood without doubt is `Malformed`: it is as good as none.
"""

import re

import msgspec

from holdfast.gateway.http.framing import Chunked, Decoder, Lengthed, Malformed, UntilClose
from holdfast.gateway.http.head import FieldReader, Fields, keep_alive, plain
from holdfast.gateway.http.limits import Limits
from holdfast.gateway.http.llhttp import httptools

__all__ = ["Answer", "parse_answer"]

_LENGTH = re.compile(rb"[0-9]{1,18}")
_BODILESS = frozenset({204, 304})


class Answer(msgspec.Struct, frozen=True):
    """The head of an answer."""

    status: int
    headers: Fields
    declared: int | None
    """The length that is said, also where no body follows."""
    length: int | None
    """The length of the body that follows; None: chunked, or until the connection closes."""
    chunked: bool
    keep_alive: bool
    """Whether the connection can be used again after the body."""

    def decoder(self, limits: Limits) -> Decoder:
        """What tells where the body ends."""
        if self.chunked:
            return Chunked(limits.trailer_bytes)
        return UntilClose() if self.length is None else Lengthed(self.length)


def parse_answer(raw: bytes, method: str) -> Answer:
    """Read a whole head, with the empty line that ends it. Raises `Malformed`."""
    reader = FieldReader()
    parser = httptools.HttpResponseParser(reader)
    try:
        parser.feed_data(raw)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
        raise Malformed(f"the answer's head is malformed: {error}") from None
    fields = tuple(reader.fields)
    if not plain(raw, len(fields)):
        raise Malformed("the answer's head has a folded line or a control character")
    status = parser.get_status_code()
    if not 100 <= status <= 999:
        raise Malformed(f"the answer's status is {status}")
    version = parser.get_http_version()
    if version not in ("1.1", "1.0"):
        raise Malformed(f"the answer's version is {version}")
    declared = [value for name, value in fields if name == b"content-length"]
    codings = [value for name, value in fields if name == b"transfer-encoding"]
    keep = keep_alive(fields, default=version == "1.1")
    if (codings and (declared or version == "1.0")) or len(declared) > 1 or len(codings) > 1:
        raise Malformed("the answer says in two ways where it ends")
    if declared and not _LENGTH.fullmatch(declared[0]):
        raise Malformed("the answer's length is malformed")
    length = int(declared[0]) if declared else None
    if status < 200 or status in _BODILESS or method == "HEAD":
        return Answer(status, fields, length, 0, False, keep)
    if codings and codings[0].lower() != b"chunked":
        raise Malformed("the answer's transfer coding is not understood")
    return Answer(
        status, fields, length, length, bool(codings), keep and bool(declared or codings)
    )
