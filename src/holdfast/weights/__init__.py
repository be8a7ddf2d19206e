"""Weights: publish, pin, load, acknowledge, sweep.

    async with Publisher(root, ledger, "policy") as publisher:
        await publisher.publish(step, model.state_dict())

    async with Subscriber(root, ledger, "policy", "replica-0") as subscriber:
        async with subscriber.pin() as pin:
            pin.load_into(model.state_dict())
            await subscriber.acknowledge(pin.number)

A version that can be seen is complete and verified; it is never deleted while a live
consumer may load it; its number is never used again. `publisher.py`, `subscriber.py` and
`sweep.py` say how; `policy.py` decides what may go.
"""

import importlib
from typing import TYPE_CHECKING, Any

from holdfast.errors import MissingPackage

try:
    import numpy as _numpy
    import xxhash as _xxhash
except ImportError as _error:
    raise MissingPackage(
        f"{_error.name} is not installed: pip install 'holdfast-rl[weights]'"
    ) from _error

from holdfast.weights.pin import Pin
from holdfast.weights.policy import Retention, deletable
from holdfast.weights.publisher import Publisher
from holdfast.weights.records import Swept, Version
from holdfast.weights.subscriber import Subscriber
from holdfast.weights.sync import open_publisher, open_subscriber
from holdfast.weights.writing import Ticket, write_part

if TYPE_CHECKING:
    from holdfast.contrib.fleets.fleet import Fleet, FleetPolicy
    from holdfast.contrib.fleets.replica import Engine, ModuleEngine, Replica

del _numpy, _xxhash

__all__ = [
    "Engine",
    "Fleet",
    "FleetPolicy",
    "ModuleEngine",
    "Pin",
    "Publisher",
    "Replica",
    "Retention",
    "Subscriber",
    "Swept",
    "Ticket",
    "Version",
    "deletable",
    "open_publisher",
    "open_subscriber",
    "write_part",
]

_FLEETS = {
    "Engine": "replica",
    "Fleet": "fleet",
    "FleetPolicy": "fleet",
    "ModuleEngine": "replica",
    "Replica": "replica",
}


def __getattr__(name: str) -> Any:
    """What belongs to fleets is imported when it is asked for."""
    if name not in _FLEETS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"holdfast.contrib.fleets.{_FLEETS[name]}"), name)
