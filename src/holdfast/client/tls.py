"""Which certificates are trusted. Every connection is verified, wherever it leads.

Also those that begin without TLS: a redirect may lead from http:// to https://.
"""

import functools
import ssl

import httpx

__all__ = ["verify"]


def verify(tls: ssl.SSLContext | None) -> ssl.SSLContext:
    """The caller's own context, or one for all others: making it takes longer than a request."""
    return _usual() if tls is None else tls


@functools.cache
def _usual() -> ssl.SSLContext:
    return httpx.create_ssl_context()
