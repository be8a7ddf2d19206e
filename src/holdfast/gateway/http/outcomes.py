"""What can become of a request that was passed on to an upstream."""

import msgspec

from holdfast.gateway.http.head import Fields

__all__ = ["Forwarded", "Lost", "Refused", "Relayed", "Truncated", "Withheld"]


class Relayed(msgspec.Struct, frozen=True):
    """The whole answer went to the caller."""

    status: int
    bytes_out: int
    """Of the answer's body."""


class Truncated(msgspec.Struct, frozen=True):
    """The upstream was lost in the middle of its answer. The caller's connection was cut, so
    that the caller cannot take the part for the whole."""

    status: int
    bytes_out: int
    reason: str


class Withheld(msgspec.Struct, frozen=True):
    """There was an answer that the caller was not to see; it has seen nothing so far."""

    status: int
    headers: Fields
    body: bytes
    """The start of the answer's body, up to a bound."""


class Refused(msgspec.Struct, frozen=True):
    """Nothing of the request reached the upstream: it may be sent elsewhere."""

    reason: str


class Lost(msgspec.Struct, frozen=True):
    """The request was sent, perhaps not all of it, and there is no answer that could be
    understood: it may have taken effect. The caller has seen nothing so far."""

    reason: str


Forwarded = Relayed | Truncated | Withheld | Refused | Lost
