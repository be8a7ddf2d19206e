"""What a protocol brings to be simulated: its processes, its invariants, its end.

The processes run production shells on a simulated `Runtime`. Invariants look at what the
ledger recorded (`observe`, once per transaction) and at what the processes told (`check`,
after every step); they raise `Violation`.

A protocol with `disk = True` works on files too: `runtime.disk` of its processes (the
runtime is a `holdfast.sim.world.Node`) is the disk as each of them reaches it, `files` is
what is really there. With `store = True` there is a store of values: `runtime.values`. With
`net = True` processes call each other: `runtime.net`.
"""

import abc
from typing import TYPE_CHECKING, TypeVar

from holdfast.ledger import Batch
from holdfast.ledger.mvcc import Store
from holdfast.ledger.records import Record, decode
from holdfast.sim.files import SimFiles
from holdfast.transfer.memory import MemoryBackend

if TYPE_CHECKING:
    from holdfast.sim.world import Node, World

__all__ = ["Protocol", "Violation"]

R = TypeVar("R", bound=Record)


class Violation(Exception):
    """A promise was broken."""


class Protocol(abc.ABC):
    """One protocol in one simulated world. A new object is made for every schedule."""

    nodes: int = 5
    """How many processes take part."""
    steps: int = 300
    """After how many steps of all processes the faults end, unless the caller says otherwise."""
    disk: bool = False
    """Whether they use the disk: then power may be lost, and everything befalls them there."""
    store: bool = False
    """Whether they put values into a store: then calls to it are lost, late and repeated, too."""
    net: bool = False
    """Whether they call each other: then these calls are lost, late and repeated, too."""
    disk_bytes: int | None = None
    """How much fits on the disk; None: anything, as long as no fault fills it."""
    never: frozenset[tuple[str, str]] = frozenset()
    """Pairs of fault and step that cannot meet here although the step occurs: say why."""
    world: "World"
    """Where it is played, for invariants and schedules. Set by the world."""
    truth: Store
    """The ledger as it really is, for invariants only. Set by the world."""
    taken: set[int]
    """Leases that a fault has ended while their owners believe in them. Set by the world."""
    files: SimFiles
    """The files as they really are, for invariants only. Set by the world."""
    values: MemoryBackend
    """The store's values as they really are, for invariants only. Set by the world."""

    def prepare(self, seed: int) -> None:  # noqa: B027 -- most are alike in every schedule
        """Choose what differs from schedule to schedule (the number of nodes, rules)."""

    @abc.abstractmethod
    async def run(self, node: "Node", name: str, /) -> None:
        """One process, from its start; called again when it is restarted."""

    @abc.abstractmethod
    def observe(self, batch: Batch) -> None:
        """Look at what one transaction changed; raise `Violation` if it should not have."""

    def check(self) -> None:  # noqa: B027 -- not every protocol has more to look at
        """Look at everything else after a step."""

    def record_at(self, key: str, kind: type[R]) -> R | None:
        """A record as the ledger really has it, for invariants only."""
        entry = self.truth.get(key)
        return decode(kind, entry) if entry else None

    @abc.abstractmethod
    def settled(self) -> bool:
        """Whether everything that was to happen has happened.

        When all faults are over and every process runs again, this must come true; if it
        does not, that is a violation too.
        """
