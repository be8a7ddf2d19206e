"""The protocols of `holdfast.sim` with one mistake each: the simulator must catch every one.

    make sim                                             the sound protocols, then all of these
    PYTHONPATH=tests python -m broken                    all of these
    PYTHONPATH=tests python -m broken election-broken    one of them, until it breaks

A variant is the sound protocol with one part replaced from outside. That it is caught shows that
the simulation looks at what the part is there for.
"""

from importlib import import_module

from broken.variant import Make
from holdfast.errors import Mistake
from holdfast.sim import protocols

__all__ = ["about", "find", "names"]


def _variants(protocol: str) -> dict[str, Make]:
    variants: dict[str, Make] = import_module(f"broken.{protocol}").BROKEN
    return variants


def names(protocol: str) -> list[str]:
    """The broken variants of a protocol."""
    return [
        f"{protocol}-broken-{variant}" if variant else f"{protocol}-broken"
        for variant in _variants(protocol)
    ]


def about(name: str) -> str:
    """What is wrong with a variant: the first line of its documentation."""
    return (find(name).__doc__ or "").strip().partition("\n")[0]


def find(name: str) -> Make:
    """A variant, or a sound protocol, as something that makes a new one per schedule."""
    protocol, dash, variant = name.partition("-broken")
    if not dash:
        return protocols.find(name)
    protocols.find(protocol)
    variants = _variants(protocol)
    if variant.removeprefix("-") not in variants:
        raise Mistake(f"there is no variant {name!r}: there are {', '.join(names(protocol))}")
    return variants[variant.removeprefix("-")]
