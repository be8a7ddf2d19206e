"""How long N participants take until all know their ranks: ours and others', turn by turn.

Participants live in at most `PROCESSES` processes, ours as coroutines, those of peers (whose
calls block) as threads. Every process is up, every connection open and every thread made before
the clock starts; it stops when the last participant of the last process knows its rank.
"""

import contextlib
import json
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from holdfast import proc

PROCESSES = 8
PREPARE_S = 120.0
ROOT = Path(__file__).parent.parent
Answer = dict[str, Any]


class Never(Exception):
    """Not all knew their ranks within the limit; or somebody never will."""


class Contender(NamedTuple):
    """One way to meet. `where` is a ledger's URL, or empty for a new port in every turn."""

    name: str
    kind: str
    python: str
    where: str = ""
    lease_s: float = 5.0

    @property
    def ours(self) -> bool:
        """Whether it is Holdfast's."""
        return bool(self.where)


class Process:
    """One process of participants."""

    def __init__(self, python: str, ours: bool, log: Path) -> None:
        module = "benchmarks.rendezvous_child" if ours else "benchmarks.rendezvous_peers"
        source = str(ROOT / "src")
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log.open("ab")
        self._child = proc.spawn(
            [python, "-c", _WITH_LOG.format(log=str(log), module=module)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"PYTHONPATH": source if ours else "", "PYTHONWARNINGS": "ignore"},
        )
        self._answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._child.process.stdout is not None
        for line in self._child.process.stdout:
            self._answers.put(json.loads(line))
        self._answers.put(None)

    def tell(self, order: dict[str, Any]) -> None:
        """Give it an order."""
        assert self._child.process.stdin is not None
        self._child.process.stdin.write(json.dumps(order).encode() + b"\n")
        self._child.process.stdin.flush()

    def answer(self, limit_s: float) -> Answer:
        """What it says to the last order."""
        try:
            found = self._answers.get(timeout=max(0.0, limit_s))
        except queue.Empty:
            raise Never("the time limit is over") from None
        if found is None:
            raise Never(f"a process of participants has died: see {self._log.name}")
        return found

    def close(self) -> None:
        """Kill it."""
        self._child.kill_group()
        self._log.close()


_WITH_LOG = """\
import os, runpy
fd = os.open({log!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.dup2(fd, 2)
runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
"""


class Crowd:
    """The processes that contenders of one environment share. Use `with`."""

    def __init__(self, python: str, *, ours: bool, log: Path) -> None:
        self._python, self._ours, self._log = python, ours, log
        self._all: list[Process] = []
        self._turns = 0

    def __enter__(self) -> "Crowd":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._all:
            process.close()
        self._all.clear()

    def _processes(self) -> list[Process]:
        if not self._all:
            self._all = [Process(self._python, self._ours, self._log) for _ in range(PROCESSES)]
        return self._all

    def turn(
        self,
        contender: Contender,
        nodes: int,
        limit_s: float,
        *,
        count: bool = False,
        profile: str = "",
    ) -> tuple[float, list[Answer]]:
        """Let them meet once; returns the seconds it took."""
        self._turns += 1
        first = 0
        held = proc.HeldPort()
        order = {
            "do": "prepare",
            "kind": contender.kind,
            "where": contender.where or f"127.0.0.1:{held.port}",
            "run": f"{contender.kind}-{nodes}-{self._turns}",
            "nodes": nodes,
            "lease_s": contender.lease_s,
            "count": count,
        }
        used = self._processes()[: min(PROCESSES, nodes)]
        for index, process in enumerate(used):
            here = nodes // len(used) + (index < nodes % len(used))
            named = profile if index == 0 else ""
            process.tell({**order, "first": first, "here": here, "profile": named})
            first += here
            if index == 0:
                process.answer(PREPARE_S)  # the host is there before others connect
        for process in used[1:]:
            process.answer(PREPARE_S)
        try:
            began = time.monotonic()
            answers = self._all_do(used, "go", began + limit_s)
        except Never:
            self.__exit__()  # what hangs in it would be in the way of others
            raise
        trouble = next((one["trouble"] for one in answers if one.get("trouble")), "")
        ranks = sorted(rank for one in answers for rank in one["ranks"])
        self._all_do(used, "end", time.monotonic() + PREPARE_S)
        if trouble:
            raise Never(trouble)
        if ranks != list(range(nodes)):
            raise Never(f"the ranks are not 0 to {nodes - 1}, each once")
        return max(one["at"] for one in answers) - began, answers

    def _all_do(self, used: Sequence[Process], what: str, deadline: float) -> list[Answer]:
        for process in used:
            process.tell({"do": what})
        return [process.answer(deadline - time.monotonic()) for process in used]


@contextlib.contextmanager
def crowds(peers_python: str, folder: Path) -> Iterator[dict[bool, Crowd]]:
    """Processes for ours and for peers, by `Contender.ours`."""
    with (
        Crowd(sys.executable, ours=True, log=folder / "ours.log") as ours,
        Crowd(peers_python, ours=False, log=folder / "peers.log") as peers,
    ):
        yield {True: ours, False: peers}


def meet(
    contenders: Sequence[Contender],
    by_kind: dict[bool, Crowd],
    sizes: Sequence[int],
    turns: int,
    limit_s: float,
) -> dict[str, dict[int, list[float]]]:
    """Seconds by contender and size; an empty list says "never"."""
    found: dict[str, dict[int, list[float]]] = {one.name: {} for one in contenders}
    for nodes in sizes:
        left = [one for one in contenders if [] not in found[one.name].values()]
        for turn in range(turns + 1):  # the first is only to warm up
            for one in list(left):
                try:
                    took, _ = by_kind[one.ours].turn(one, nodes, limit_s)
                except Never as error:
                    print(f"<!-- {one.name}, {nodes}: never: {error} -->", flush=True)
                    found[one.name][nodes] = []
                    left.remove(one)
                    continue
                if turn:
                    found[one.name].setdefault(nodes, []).append(took)
    return found


def messages(contender: Contender, crowd: Crowd, nodes: int) -> tuple[Counter[str], int]:
    """What the median participant asks of the ledger, and all it asks and hears at most.

    The closer is not one of them: it also hears of every other.
    """
    _, answers = crowd.turn(contender, nodes, 60.0, count=True)
    counters = [Counter(one) for answer in answers for one in answer["calls"]]
    counters.sort(key=Counter.total)
    return counters[len(counters) // 2], counters[-2].total()


def middle(times: Sequence[float]) -> float:
    """The median; none is for ever."""
    return statistics.median(times) if times else float("inf")
