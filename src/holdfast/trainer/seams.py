"""What the trainer's core needs of the world beside the ledger: computing, and keeping weights.

The same core runs over torch and files, and in the simulator over a counter.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from holdfast.trainer.ops import ForwardBackward, Lora, Op, OptimStep, Outcome, Sample

__all__ = ["Compute", "Kept", "Snapshot", "Vault"]


@dataclass(frozen=True)
class Snapshot:
    """A state that no longer changes: tensors by name, a few facts, files to go with it."""

    tensors: Mapping[str, Any]
    facts: Mapping[str, Any]
    files: Mapping[str, bytes]


@dataclass(frozen=True)
class Kept:
    """A snapshot that lasts."""

    version: int
    hash: str
    bytes: int


class Compute(Protocol):
    """Models in memory. Whatever raises `Mistake` has had no effect.

    Any other error means that the state in memory may be half changed: the process must end.
    """

    @property
    def in_step(self) -> bool:
        """Whether all who compute are where they were; False: the process must end."""

    def check(self, base: str, op: Op) -> None:
        """Refuse (`Mistake`) what cannot be carried out on a model of this base."""

    async def create(self, model: str, base: str, lora: Lora | None) -> None:
        """Begin a model, as the base has it."""

    async def load(self, model: str, snapshot: Snapshot, *, optimizer: bool) -> None:
        """Take over a saved state. Without `optimizer`, the optimizer begins anew."""

    async def restore(self, model: str, base: str, lora: Lora | None, snapshot: Snapshot) -> None:
        """Begin a model with everything as it was captured, gradients too."""

    async def apply(self, model: str, number: int, op: ForwardBackward | OptimStep) -> Outcome:
        """Carry out one operation."""

    async def capture(self, model: str) -> Snapshot:
        """Everything, as it is now: weights, optimizer, gradients."""

    async def export(self, model: str) -> Snapshot:
        """The weights alone, as samplers load them."""

    async def drop(self, model: str) -> None:
        """Forget a model, if it is there."""

    def has_sampler(self, key: str) -> bool:
        """Whether these weights are ready for sampling."""

    async def open_sampler(
        self, key: str, base: str, lora: Lora | None, snapshot: Snapshot | None
    ) -> None:
        """Make weights ready for sampling; None: the base's own."""

    async def sample(self, key: str, line: str, number: int, op: Sample) -> Outcome:
        """Continue a prompt."""


class Vault(Protocol):
    """Where snapshots last. A channel keeps its newest `keep` versions.

    Keeping something is an effect: it compares what the journal's writes compare.
    """

    async def newest(self, channel: str) -> int | None:
        """The newest version of a channel."""

    async def save(self, channel: str, version: int, snapshot: Snapshot, keep: int) -> Kept:
        """Keep a snapshot. What was kept under this version before stays as it is."""

    async def load(self, channel: str, version: int) -> Snapshot:
        """What was kept; `Gone` or `NotFound` if it is not."""

    async def drop(self, channel: str, version: int) -> None:
        """Keep this version, and older ones of its channel, no longer: files and record."""
