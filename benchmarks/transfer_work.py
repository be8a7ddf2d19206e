"""What every contender of `transfer.py` does, and how its two processes are spoken to.

A child says "ready" and then answers each line of JSON that it is told: `put` a workload,
`get` it (with what the putting child answered), `clear` it. The answer is one line of JSON with
the seconds that it took. What has to be prepared for a call is prepared before its clock, and
every value that was got is compared with what was put, after the clock.

All children read the values that they put from one file in shared memory: they are warm, and
there only once.
"""

import abc
import contextlib
import functools
import json
import mmap
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

SOURCE_BYTES = 1 << 30


@dataclass(frozen=True)
class Workload:
    """So many values of so many bytes."""

    count: int
    size: int


WORKLOADS = {
    "64 KiB": Workload(1000, 64 << 10),
    "16 MiB": Workload(64, 16 << 20),
    "256 B": Workload(100_000, 256),
}
SMALL = "256 B"
"""The workload that is counted in keys, and cut short for those who would take minutes."""


def make_source(path: Path) -> None:
    """Write what all workloads are the beginning of."""
    with path.open("wb") as file:
        for at in range(0, SOURCE_BYTES // 4, 1 << 24):
            np.arange(at, at + (1 << 24), dtype=np.int32).tofile(file)


class Task:
    """A workload as one contender sees it."""

    def __init__(self, keys: list[str], values: torch.Tensor) -> None:
        self.keys = keys
        self.values = values
        """A row for each key."""
        self.size = values[0].nbytes

    @functools.cached_property
    def named(self) -> dict[str, torch.Tensor]:
        """A tensor for each key: what is put, unless all rows are put as one."""
        return dict(zip(self.keys, self.values.unbind(), strict=True))


class Source:
    """The values of all workloads, in memory that all children share."""

    def __init__(self, path: str) -> None:
        with Path(path).open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._all = torch.frombuffer(self._map, dtype=torch.int32)
        self._tasks: dict[tuple[str, int], Task] = {}

    def task(self, name: str, most: int) -> Task:
        """A workload with at most so many keys; the same object each time."""
        workload = WORKLOADS[name]
        count, width = min(most, workload.count), workload.size // 4
        if (name, count) not in self._tasks:
            keys = [f"bench/{name.replace(' ', '')}/{at:06d}" for at in range(count)]
            self._tasks[name, count] = Task(keys, self._all[: count * width].view(count, width))
        return self._tasks[name, count]


class Contender(abc.ABC):
    """Something that moves values from one process to another."""

    def __init__(self, how: dict[str, Any]) -> None:
        self.how = how
        self.about: dict[str, Any] = {}
        """What the parent is told when this is ready."""

    @abc.abstractmethod
    def put(self, task: Task) -> Any:
        """Put all rows."""

    @abc.abstractmethod
    def get(self, task: Task, ready: Any) -> Any:
        """Get all rows."""

    def tell(self, put: Any) -> Any:
        """What the getting process must know of a put, as JSON. Not timed."""
        del put
        return None

    def prepare(self, task: Task, told: Any) -> Any:
        """What is at hand when a get begins. Not timed."""
        del task
        return told

    def rows(self, found: Any) -> Any:
        """What was got, as one tensor or as a list of rows in their order. Not timed."""
        return found

    def release(self) -> None:  # noqa: B027 -- most contenders give memory away
        """Let go of what was got. Not timed."""

    def clear(self, task: Task) -> None:  # noqa: B027 -- bare memory has nothing to clear
        """Make room again. Not timed."""


def same(found: Any, values: torch.Tensor) -> bool:
    """Whether these are the rows that were put."""
    if isinstance(found, torch.Tensor):
        return torch.equal(found, values)
    return len(found) == len(values) and all(
        np.array_equal(np.asarray(one), two)
        for one, two in zip(found, values.numpy(), strict=True)
    )


def _put(contender: Contender, task: Task, _: Any) -> dict[str, Any]:
    assert task.named  # made before the clock
    began = time.perf_counter()
    put = contender.put(task)
    taken = time.perf_counter() - began
    return {"s": taken, "told": contender.tell(put)}


def _get(contender: Contender, task: Task, told: Any) -> dict[str, Any]:
    ready = contender.prepare(task, told)
    began = time.perf_counter()
    found = contender.get(task, ready)
    taken = time.perf_counter() - began
    try:
        return {"s": taken, "right": same(contender.rows(found), task.values)}
    finally:
        del found, ready
        contender.release()


def _clear(contender: Contender, task: Task, _: Any) -> dict[str, Any]:
    contender.clear(task)
    return {}


def _digest(_: Contender, task: Task, __: Any) -> dict[str, Any]:
    """Seconds of nothing but the checksums: of a head of 128 bytes and of each value."""
    from xxhash import xxh3_64_intdigest as digest

    head, views = bytes(128), [memoryview(row).cast("B") for row in task.values.numpy()]
    began = time.perf_counter()
    for view in views:
        digest(view, digest(head))
    return {"s": time.perf_counter() - began}


DO: dict[str, Callable[[Contender, Task, Any], dict[str, Any]]] = {
    "put": _put,
    "get": _get,
    "clear": _clear,
    "digest": _digest,
}


def serve(kinds: dict[str, type[Contender]]) -> None:
    """Be a child: `KIND SOURCE LOG JSON`. Answers until its input ends."""
    kind, source_path, log, how = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    with Path(log).open("ab") as file:  # what libraries print is no answer
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    source = Source(source_path)
    contender = kinds[kind](json.loads(how))
    print(json.dumps({"ready": True, **contender.about}), file=answers, flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        for line in sys.stdin:
            asked = json.loads(line)
            task = source.task(asked["workload"], asked["most"])
            try:
                answer = DO[asked["do"]](contender, task, asked["told"])
            except Exception as error:  # noqa: BLE001 -- told to the parent, which decides
                answer = {"error": f"{type(error).__name__}: {error}"[:200]}
            print(json.dumps(answer), file=answers, flush=True)
