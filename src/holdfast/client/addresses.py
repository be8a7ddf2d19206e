"""What may be an address or a key, the proxies on the way, and which certificates are trusted.

Every connection is verified, wherever it leads; also those that begin without TLS: a redirect may
lead from http:// to https://.

Keys and passwords are never quoted, not even those that are refused: what is raised here ends
up in logs.
"""

import functools
import ssl
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx

from holdfast.errors import Mistake

__all__ = ["check_key", "check_url", "proxy_of", "verify"]


def check_url(url: str) -> str:
    """Refuse what is not the plain URL of a server; without the slash at its end."""
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if not sound or not url.isascii() or not url.isprintable() or " " in url:
        raise Mistake("this is not the URL of a gateway: http:// or https://, host, port, path")
    if "@" in parts.netloc:
        raise Mistake("the URL of a gateway has no user and no password: give the api_key")
    if {"?", "#"} & {*url}:
        raise Mistake("the URL of a gateway has no query and no fragment: they would get lost")
    return url.rstrip("/")


def check_key(key: str) -> str:
    """Refuse what cannot stand in a header, such as a key with the line end of its file."""
    if not key.isascii() or not key.isprintable() or key != key.strip():
        raise Mistake(
            "the API key has blanks or line ends around it, or characters that no key has: "
            "was it read from a file? strip() it"
        )
    return key


def proxy_of(url: str) -> str | None:
    """The proxy that the environment names for a URL, as httpx itself would read it."""
    parts, named = urlsplit(url), getproxies()
    proxy = named.get(parts.scheme) or named.get("all")
    if not proxy or proxy_bypass(parts.netloc):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def verify(tls: ssl.SSLContext | None) -> ssl.SSLContext:
    """The caller's own context, or one for all others: making it takes longer than a request."""
    return _usual() if tls is None else tls


@functools.cache
def _usual() -> ssl.SSLContext:
    return httpx.create_ssl_context()
