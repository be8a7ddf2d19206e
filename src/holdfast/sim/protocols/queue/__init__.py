"""The queue: promises 3 and 4."""

from holdfast.sim.protocols.queue.broken import BROKEN
from holdfast.sim.protocols.queue.sound import QueueProtocol

SOUND = QueueProtocol

__all__ = ["BROKEN", "SOUND"]
