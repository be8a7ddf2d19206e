"""The protocols that can be simulated, by name.

Each is a model of production's own shells at work. Variants with one mistake each, which the
simulator must catch, live with the tests (`tests/broken`).
"""

from collections.abc import Callable
from importlib import import_module

from holdfast.errors import Mistake
from holdfast.sim.protocol import Protocol

__all__ = ["find", "names"]

# name -> (class below this package, what the protocol shows)
_SOUND = {
    "election": (
        "election.ElectionProtocol",
        "leader election with fencing tokens (the ledger's own small protocol)",
    ),
    "fleet": ("fleet.FleetProtocol", "replicas go from version to version together"),
    "operations": (
        "operations.model.OperationsProtocol",
        "trainers die and overlap, clients repeat and reorder: promise 2",
    ),
    "queue": ("queue.QueueProtocol", "put, claim, fetch, acknowledge: promises 3 and 4"),
    "rendezvous": (
        "rendezvous.model.RendezvousProtocol",
        "nodes meet, hold ranks, are replaced, leave together: promise 5",
    ),
    "routes": (
        "routes.model.RoutesProtocol",
        "jobs move, gateways lag, callers are told the truth: promise 1",
    ),
    "run": (
        "run.model.RunProtocol",
        "everything together, orchestrators die and overlap: promises 2 to 4 and 7",
    ),
    "weights": (
        "weights.WeightsProtocol",
        "publish, pin, load, acknowledge, sweep: promise 6",
    ),
}


def names() -> dict[str, str]:
    """The protocols and what they show."""
    return {name: about for name, (_, about) in _SOUND.items()}


def find(name: str) -> Callable[[], Protocol]:
    """The protocol called `name`, as something that makes a new one per schedule."""
    if name not in _SOUND:
        raise Mistake(f"there is no protocol {name!r}: there are {', '.join(_SOUND)}")
    module, _, kind = _SOUND[name][0].rpartition(".")
    made: Callable[[], Protocol] = getattr(import_module(f"{__name__}.{module}"), kind)
    return made
