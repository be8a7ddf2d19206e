"""A protocol with parts replaced from outside."""

from collections.abc import Callable
from typing import Any

from holdfast.sim.protocol import Protocol

__all__ = ["Make", "variant"]

Make = Callable[[], Protocol]


def variant(protocol: Callable[..., Protocol], mistake: object, **parts: Any) -> Make:
    """`protocol` with these parts; `mistake` is a part whose documentation says what is wrong."""

    def make() -> Protocol:
        return protocol(**parts)

    make.__doc__ = mistake if isinstance(mistake, str) else mistake.__doc__
    return make
