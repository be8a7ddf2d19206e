"""Training operations, simulated: sound, and broken on purpose."""

from holdfast.sim.protocols.operations.broken import BROKEN
from holdfast.sim.protocols.operations.model import OperationsProtocol

__all__ = ["BROKEN", "SOUND"]

SOUND = OperationsProtocol
