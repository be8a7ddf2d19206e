"""The protocols that can be simulated, sound and deliberately broken, by name."""

from collections.abc import Callable
from importlib import import_module

from holdfast.errors import Mistake
from holdfast.sim.protocol import Protocol

__all__ = ["about", "broken_names", "find", "names"]

# name -> (module below this one, what the protocol shows)
_SOUND = {
    "election": "leader election with fencing tokens (the ledger's own small protocol)",
    "fleet": "replicas go from version to version together",
    "operations": "trainers die and overlap, clients repeat and reorder: promise 2",
    "queue": "put, claim, fetch, acknowledge: promises 3 and 4",
    "rendezvous": "nodes meet, hold ranks, are replaced, leave together: promise 5",
    "routes": "jobs move, gateways lag, callers are told the truth: promise 1",
    "run": "everything together, orchestrators die and overlap: promises 2 to 4 and 7",
    "weights": "publish, pin, load, acknowledge, sweep: promise 6",
}


def names() -> dict[str, str]:
    """The sound protocols and what they show."""
    return dict(_SOUND)


def _variants(name: str) -> dict[str, Callable[[], Protocol]]:
    module = import_module(f"holdfast.sim.protocols.{name}")
    variants: dict[str, Callable[[], Protocol]] = module.BROKEN
    return variants


def broken_names(name: str) -> list[str]:
    """The broken variants of a protocol; the simulator must catch every one."""
    return [
        f"{name}-broken" if variant == "" else f"{name}-broken-{variant}"
        for variant in _variants(name)
    ]


def about(name: str) -> str:
    """What is wrong with a broken variant: the first line of its documentation."""
    make = find(name)
    return (make.__doc__ or "").strip().partition("\n")[0]


def find(name: str) -> Callable[[], Protocol]:
    """The protocol called `name`, as something that makes a new one per schedule."""
    base, dash, variant = name.partition("-broken")
    if base not in _SOUND:
        raise Mistake(f"there is no protocol {name!r}: there are {', '.join(_SOUND)}")
    if not dash:
        sound: Callable[[], Protocol] = import_module(f"holdfast.sim.protocols.{base}").SOUND
        return sound
    variants = _variants(base)
    if variant.removeprefix("-") not in variants:
        raise Mistake(f"there is no variant {name!r}: there are {', '.join(broken_names(base))}")
    return variants[variant.removeprefix("-")]
