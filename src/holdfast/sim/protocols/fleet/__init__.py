"""The fleet protocol: sound, and with one rule left out at a time."""

from holdfast.sim.protocols.fleet.broken import BROKEN
from holdfast.sim.protocols.fleet.sound import FleetProtocol

__all__ = ["BROKEN", "SOUND"]

SOUND = FleetProtocol
