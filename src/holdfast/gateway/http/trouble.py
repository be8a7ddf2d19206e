"""What can be wrong with a caller, as errors.

`Rejected` carries the status that the caller gets; `CallerLeft` means that nobody is there
to get one. A handler lets both pass: the server knows what to do.
"""

import msgspec

from holdfast.errors import Gone, Mistake

__all__ = ["CallerLeft", "Rejected", "render_json"]


class Rejected(Mistake):
    """The caller's message cannot be accepted: answer with `status`, and close."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class CallerLeft(Gone):
    """The caller closed its connection before it had its whole answer."""


def render_json(status: int, code: str, message: str) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """A refusal by the engine itself, as header fields and a body of JSON."""
    fields = [(b"content-type", b"application/json")]
    if status == 503:
        fields.append((b"retry-after", b"1"))
    if status == 405:
        fields.append((b"allow", b"GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"))
    return fields, msgspec.json.encode({"error": {"code": code, "message": message}})
