"""A protocol with parts replaced from outside."""

from collections.abc import Callable
from typing import Any

from holdfast.sim.protocol import Protocol

__all__ = ["Make", "variant"]

Make = Callable[[], Protocol]


def variant(protocol: Callable[..., Protocol], mistake: object = None, **parts: Any) -> Make:
    """`protocol` with these parts; the documentation of `mistake` says what is wrong.

    Where nothing else is given, the mistake is the one part that is replaced.
    """
    if mistake is None:
        (mistake,) = parts.values()

    def make() -> Protocol:
        return protocol(**parts)

    make.__doc__ = mistake if isinstance(mistake, str) else mistake.__doc__
    return make
