"""A whole run, simulated: sound, and broken on purpose."""

from holdfast.sim.protocols.run.broken import BROKEN
from holdfast.sim.protocols.run.model import RunProtocol

__all__ = ["BROKEN", "SOUND"]

SOUND = RunProtocol
