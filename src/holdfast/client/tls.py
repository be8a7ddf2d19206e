"""What httpx is given as `verify`: made once, because making it takes longer than a request."""

import functools
import ssl

import httpx

__all__ = ["verify"]


def verify(url: str, tls: ssl.SSLContext | bool) -> ssl.SSLContext | bool:
    """The caller's own context, one for all others, or none where there is no TLS."""
    if not url.startswith("https:"):
        return False
    return _usual() if tls is True else tls


@functools.cache
def _usual() -> ssl.SSLContext:
    return httpx.create_ssl_context()
