"""One HTTP request from code that blocks: commands, and probes of servers. httpx does it.

httpx is imported by the first request, not before: a command that asks nobody starts faster, and
needs no such package. Each request has a connection of its own, knows no proxies and follows no
redirects. What asks often, or without blocking, keeps a client of httpx itself.
"""

import ssl
from collections.abc import Mapping

from holdfast.errors import MissingPackage, Unavailable

__all__ = ["fetch"]


def fetch(
    method: str,
    url: str,
    *,
    timeout_s: float,
    headers: Mapping[str, str] | None = None,
    body: bytes | None = None,
    tls: ssl.SSLContext | None = None,
) -> tuple[int, bytes]:
    """Status and body of the answer. Raises `Unavailable` when there is none, and says why."""
    try:
        import httpx
    except ImportError:
        raise MissingPackage("httpx is not installed: pip install 'holdfast-rl[client]'") from None
    verify = ssl.create_default_context() if tls is None and url.startswith("https:") else tls
    try:
        with httpx.Client(verify=verify or False, timeout=timeout_s, trust_env=False) as client:
            answer = client.request(method, url, headers=headers, content=body)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = str(error) or type(error).__name__
        raise Unavailable(f"{url} does not answer: {reason}") from None
    return answer.status_code, answer.content
