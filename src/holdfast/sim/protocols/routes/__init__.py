"""Jobs, gateways and callers, simulated: sound, and broken on purpose."""

from holdfast.sim.protocols.routes.broken import BROKEN
from holdfast.sim.protocols.routes.model import RoutesProtocol

__all__ = ["BROKEN", "SOUND"]

SOUND = RoutesProtocol
