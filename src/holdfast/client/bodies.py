"""Reads what somebody answered, and what went wrong instead: bounded, and telling no secrets."""

import zlib

import httpx

from holdfast.errors import HoldfastError, Mistake, TooLarge, Unavailable

__all__ = ["fault_of", "plain", "raw_of"]

_CODINGS = frozenset({"gzip", "x-gzip", "deflate"})
_ANY_HEADER = zlib.MAX_WBITS | 32
_OURS = (httpx.LocalProtocolError, httpx.UnsupportedProtocol, httpx.InvalidURL)
_CHARS = 200


async def raw_of(response: httpx.Response, limit: int) -> tuple[bytes, bool]:
    """The body as it was sent, up to `limit` bytes, and whether that is all; closes it."""
    parts, size, whole = [], 0, True
    assert isinstance(response.stream, httpx.AsyncByteStream)
    try:
        async for part in response.stream:
            parts.append(part)
            size += len(part)
            if size > limit:
                whole = False
                break
    finally:
        await response.aclose()
    return b"".join(parts)[:limit], whole


def plain(raw: bytes, coding: str, limit: int) -> bytes:
    """A body unpacked. Raises `TooLarge` beyond `limit`, `Unavailable` for nonsense.

    zlib stops at the limit by itself; other codings can be made to fill the memory with one
    step, and nobody has asked for them.
    """
    coding = coding.strip().lower()
    if coding in ("", "identity"):
        if len(raw) > limit:
            raise TooLarge(f"an answer of more than {limit} bytes")
        return raw
    if coding not in _CODINGS:
        raise Unavailable(f"an answer in a coding that was not asked for: {coding[:40]!r}")
    unpacking = zlib.decompressobj(_ANY_HEADER)
    try:
        body = unpacking.decompress(raw, limit + 1)
    except zlib.error:
        raise Unavailable("an answer that cannot be unpacked") from None
    if len(body) > limit:
        raise TooLarge(f"an answer of more than {limit} bytes")
    if not unpacking.eof:
        raise Unavailable("an answer that breaks off")
    return body


def fault_of(error: Exception, doing: str) -> HoldfastError:
    """Our error for one of httpx: a `Mistake` if the request could never have been sent.

    Only errors of the network are quoted. Others quote the header that they stumble over, and
    that may be the key; raise what this gives `from None`.
    """
    if isinstance(error, _OURS):
        return Mistake(f"{doing}: this cannot be sent ({type(error).__name__})")
    text = f"{doing}: {type(error).__name__}"
    if isinstance(error, httpx.NetworkError) and str(error):
        text += f": {str(error)[:_CHARS]}"
    return Unavailable(text)
