"""Messages as text, for models that read text.

A template has {role} and {content} in it; the opening is what the model goes on from. So a chat
template can be written down in the configuration.
"""

from collections.abc import Iterable

__all__ = ["MESSAGE", "OPENING", "as_text"]

MESSAGE = "{content}\n"
OPENING = ""


def as_text(messages: Iterable[tuple[str, str]], template: str, opening: str) -> str:
    """The messages, each a role and a content, one after the other."""
    parts = []
    for role, content in messages:
        # By hand: neither a brace in the template nor one in a role or content means anything.
        before, mark, after = template.partition("{content}")
        body = content if mark else ""
        parts.append(before.replace("{role}", role) + body + after.replace("{role}", role))
    return "".join(parts) + opening
