"""The rendezvous, simulated: sound, and broken on purpose."""

from holdfast.sim.protocols.rendezvous.broken import BROKEN
from holdfast.sim.protocols.rendezvous.model import RendezvousProtocol

__all__ = ["BROKEN", "SOUND"]

SOUND = RendezvousProtocol
