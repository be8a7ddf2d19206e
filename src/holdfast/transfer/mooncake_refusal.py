"""Why Mooncake would not start: its own answer is a number that means anything.

What usually is wrong is looked at once more: the metadata server, the memory to be lent, the
protocol. Mooncake's log on stderr has the rest.
"""

import http.client
import os
from collections.abc import Mapping
from contextlib import closing
from urllib.parse import urlsplit

from holdfast.text import parse_bytes, size

__all__ = ["why_refused"]

_ASK_S = 5.0
_NO_KEY = "metadata not found"
"""What a metadata server says of a key that it does not have, with a 404."""


def why_refused(options: Mapping[str, str]) -> str:
    """What seems to be the cause, for people; options as in the URL."""
    found = _metadata(options["metadata"]) or _segment(options.get("segment", "0"))
    protocol = options.get("protocol", "tcp")
    if not found and protocol != "tcp":
        found = f"this Mooncake, or this machine, may not have protocol={protocol}"
    more = "see the lines of Mooncake's own log on stderr (&log=INFO has all of them)"
    return f"{found}; or {more}" if found else more


def _metadata(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme != "http":
        return ""  # etcd, redis or none at all
    try:
        with closing(http.client.HTTPConnection(parts.netloc, timeout=_ASK_S)) as connection:
            connection.request("GET", f"{parts.path}?key=holdfast")
            answer = connection.getresponse()
            body = answer.read(1000).decode(errors="replace").strip()
    except (OSError, http.client.HTTPException, ValueError) as error:
        return f"its metadata server at {url} does not answer ({error})"
    if answer.status == http.client.OK or _NO_KEY in body:
        return ""
    return f"{url} is no metadata server: it answers {answer.status} ({body[:100]})"


def _segment(text: str) -> str:
    wanted = parse_bytes(text)
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if wanted <= there:
        return ""
    return f"segment={text} is more memory than this machine has ({size(there)})"
