"""Both disks, each with a way to run calls on it, so that one suite can test them."""

import abc
import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from holdfast.ledger import Batch, Runtime
from holdfast.sim.protocol import Protocol
from holdfast.sim.world import Node, World
from holdfast.weights.disk import Disk
from holdfast.weights.local import LocalDisk

T = TypeVar("T")


class Bench(abc.ABC):
    """A disk, a folder on it that is there and empty, and an event loop that fits."""

    disk: Disk
    root: str

    @abc.abstractmethod
    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something to its end."""

    def close(self) -> None:  # noqa: B027 -- not every bench holds something
        """Let go of it."""

    def path(self, *names: str) -> str:
        """A path below the root."""
        return "/".join([self.root, *names])


class LocalBench(Bench):
    def __init__(self, folder: Path) -> None:
        self.disk = LocalDisk()
        self.root = str(folder)
        self._runner = asyncio.Runner()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def close(self) -> None:
        self._runner.close()


class Idle(Protocol):
    nodes = 0
    disk = True

    async def run(self, runtime: Runtime, name: str) -> None:
        """Nothing."""

    def observe(self, batch: Batch) -> None:
        """Nothing."""

    def settled(self) -> bool:
        return True


class SimBench(Bench):
    """One process of a world without faults."""

    def __init__(self, seed: int = 1) -> None:
        self.world = World(Idle(), seed, faults=[])
        self.node = Node(self.world, "n0", 1)
        self.disk = self.node.disk
        self.root = "/disk"
        self.run(self.disk.make(self.root))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        loop = self.world.loop
        task = self.node.context.run(loop.create_task, work)
        loop.run(task.done, 1e9)
        return task.result()


async def tree(disk: Disk, path: str) -> dict[str, bytes | None]:
    """Everything below a path; None stands for a folder."""
    found: dict[str, bytes | None] = {}
    async with await disk.folder(path) as folder:
        for item in await folder.items():
            if item.is_folder:
                found[item.name] = None
                below = await tree(disk, f"{path}/{item.name}")
                found.update({f"{item.name}/{name}": data for name, data in below.items()})
            else:
                found[item.name] = await folder.read(item.name, 1 << 20)
    return found
