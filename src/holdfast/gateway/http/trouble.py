"""What can be wrong with a caller, as errors.

`Rejected` carries the status that the caller gets; `CallerLeft` means that nobody is there
to get one. A handler lets both pass: the server knows what to do.
"""

from holdfast.errors import Gone, Mistake

__all__ = ["CallerLeft", "Rejected"]


class Rejected(Mistake):
    """The caller's message cannot be accepted: answer with `status`, and close."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class CallerLeft(Gone):
    """The caller closed its connection before it had its whole answer."""
