"""Why Mooncake would not start: its own answer is a number that means anything.

What usually is wrong is looked at once more: the metadata server, the memory to be lent, the
protocol. Mooncake's log on stderr has the rest.
"""

import os
from collections.abc import Mapping
from http import HTTPStatus
from urllib.parse import urlsplit

from holdfast.errors import Unavailable
from holdfast.fetch import fetch
from holdfast.text import parse_bytes, size

__all__ = ["why_refused"]

_NO_KEY = b"metadata not found"
"""What a metadata server says of a key that it does not have, with a 404."""


def why_refused(options: Mapping[str, str], limit_s: float) -> str:
    """What seems to be the cause, for people; options as in the URL."""
    found = _metadata(options["metadata"], limit_s) or _segment(options.get("segment", "0"))
    protocol = options.get("protocol", "tcp")
    if not found and protocol != "tcp":
        found = f"this Mooncake, or this machine, may not have protocol={protocol}"
    more = "see the lines of Mooncake's own log on stderr (&log=INFO has all of them)"
    return f"{found}; or {more}" if found else more


def _metadata(url: str, limit_s: float) -> str:
    if urlsplit(url).scheme != "http":
        return ""  # etcd, redis or none at all
    try:
        status, body = fetch("GET", f"{url}?key=holdfast", timeout_s=limit_s)
    except Unavailable as error:
        return f"its metadata server at {url} does not answer ({error})"
    if status == HTTPStatus.OK or _NO_KEY in body:
        return ""
    said = body[:100].decode(errors="replace").strip()
    return f"{url} is no metadata server: it answers {status} ({said})"


def _segment(text: str) -> str:
    wanted = parse_bytes(text)
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if wanted <= there:
        return ""
    return f"segment={text} is more memory than this machine has ({size(there)})"
