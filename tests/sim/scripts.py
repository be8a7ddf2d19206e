"""Small protocols for tests of the simulator itself: processes that all run one function."""

from collections import Counter
from collections.abc import Awaitable, Callable

from holdfast.ledger import Batch
from holdfast.sim.faults import Fault
from holdfast.sim.protocol import Protocol
from holdfast.sim.world import Node, World

Work = Callable[["Script", Node, str], Awaitable[None]]


class Script(Protocol):
    """Every process does `work`; it has settled when each has come to the end of it."""

    disk = True

    def __init__(self, work: Work, nodes: int = 1) -> None:
        self._work = work
        self.nodes = nodes
        self.notes: list[object] = []
        self.changes: list[Batch] = []
        self.lives: Counter[str] = Counter()
        self.finished: set[str] = set()

    async def run(self, node: Node, name: str) -> None:
        self.lives[name] += 1
        await self._work(self, node, name)
        self.finished.add(name)

    def observe(self, batch: Batch) -> None:
        self.changes.append(batch)

    def settled(self) -> bool:
        return len(self.finished) == self.nodes


def play(work: Work, *faults: Fault, nodes: int = 1, seed: int = 5) -> Script:
    """Play it with exactly these faults; nothing may be wrong with it."""
    script = Script(work, nodes)
    violation = World(script, seed, faults=list(faults), trace=True).play()
    assert violation is None, violation
    return script
