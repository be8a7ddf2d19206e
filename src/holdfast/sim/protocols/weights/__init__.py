"""The weights protocol: sound, and with one rule left out at a time."""

from holdfast.sim.protocols.weights.broken import BROKEN
from holdfast.sim.protocols.weights.sound import WeightsProtocol

__all__ = ["BROKEN", "SOUND"]

SOUND = WeightsProtocol
