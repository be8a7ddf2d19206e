"""The page: one HTML text with its style and script inside, and nothing from anywhere else.

The same page is served live and kept as a report; a report carries its data. Its content
security policy names its own style and script by their hashes and allows nothing else, so
that text from events could not become code even if a mistake let it through. Pure but for
reading the three files it is made of.
"""

import base64
import functools
import hashlib
from pathlib import Path
from typing import Any

import msgspec

__all__ = ["page", "policy"]

_HERE = Path(__file__).parent
_DATA = "<!--data-->"
_POLICY = "<!--policy-->"


@functools.cache
def _parts() -> tuple[str, str, str]:
    html, style, script = (
        (_HERE / name).read_text("utf-8") for name in ("page.html", "page.css", "page.js")
    )
    return html, style, script


def policy(*, live: bool) -> str:
    """The content security policy; `frame-ancestors` counts only as a header."""
    _, style, script = _parts()
    reach = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
        f"connect-src {reach}; base-uri 'none'; form-action 'none'"
    )


def page(data: dict[str, Any] | None = None) -> str:
    """The live page, or with `data` the one that shows just this."""
    html, style, script = _parts()
    html = html.replace("/*style*/", style).replace("/*script*/", script)
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy(live=data is None)}">'
    html = html.replace(_POLICY, meta)
    if data is None:
        return html.replace(_DATA, "")
    # In a script element only "<" can end the text; JSON may write it as an escape.
    text = msgspec.json.encode(data).decode().replace("<", "\\u003c")
    return html.replace(_DATA, f'<script type="application/json" id="data">{text}</script>')


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
