"""Several nodes on one machine: real `torchrun` processes with torch's own agent."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from holdfast import ledger, proc
from holdfast.ledger.records import decode
from holdfast.rendezvous.records import Cycle, Keys

SCRIPT = Path(__file__).with_name("training.py")


class Cluster:
    """The nodes of one run. Use `with`: whatever is left is killed."""

    def __init__(self, folder: Path, url: str, *, nnodes: str, backend: str = "holdfast") -> None:
        self.folder, self.url, self.nnodes, self.backend = folder, url, nnodes, backend
        self.run = "r"
        self.nodes: list[proc.Child] = []

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.kill_group()

    def start(
        self,
        *program: str,
        workers: int = 2,
        conf: str = "last_call_timeout=0.2",
        flags: Sequence[str] = (),
        prefix: Sequence[str] = (),
        interface: str = "lo",
    ) -> proc.Child:
        """Start one more node; `prefix` comes before the command."""
        number = len(self.nodes)
        argv = [*prefix, sys.executable, "-m", "torch.distributed.run"]
        argv += ["--rdzv-backend", self.backend, "--rdzv-endpoint", self.url]
        argv += ["--rdzv-id", self.run, "--nnodes", self.nnodes, "--rdzv-conf", conf]
        argv += ["--nproc-per-node", str(workers), "--local-addr", f"127.0.2.{number + 1}"]
        argv += ["--max-restarts", "5"]
        log = self.folder / f"node{number}.log"
        env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface}
        node = proc.spawn([*argv, *flags, *program], name=f"node{number}", log=log, env=env)
        self.nodes.append(node)
        return node

    def train(self, steps: int, pace_s: float = 0.1, world: int = 1, **more: Any) -> proc.Child:
        """Start one more node that trains."""
        args = (self.folder, steps, pace_s, world)
        return self.start(str(SCRIPT), *map(str, args), **more)

    def lines(self) -> list[dict[str, Any]]:
        """What workers have seen, in order."""
        found = []
        for path in self.folder.glob("steps.*.jsonl"):
            found += [
                json.loads(line) for line in path.read_text().splitlines() if line[-1] == "}"
            ]
        return sorted(found, key=lambda line: line["at"])

    def seen(self, **wanted: object) -> list[dict[str, Any]]:
        """The lines that say so."""
        return [
            line
            for line in self.lines()
            if all(line[name] == value for name, value in wanted.items())
        ]

    def after(self, moment: float, **wanted: object) -> list[dict[str, Any]]:
        """The lines that say so, later than a moment."""
        return [line for line in self.seen(**wanted) if line["at"] > moment]

    def kill(self, pid: int) -> float:
        """SIGKILL a process; returns when."""
        moment = time.time()
        os.kill(pid, signal.SIGKILL)
        return moment

    def until(self, what: str, test: Callable[[], object], timeout_s: float = 30.0) -> Any:
        """Wait for something; tells what the nodes said when it does not come."""
        limit = time.monotonic() + timeout_s
        while not (found := test()):
            if time.monotonic() > limit:
                raise AssertionError(f"no {what} within {timeout_s} s\n{self.story()}")
            time.sleep(0.05)
        return found

    def codes(self, *nodes: proc.Child, timeout_s: float = 30.0) -> list[int]:
        """The exit codes of nodes, once they have ended."""
        self.until("end", lambda: not any(node.alive() for node in nodes), timeout_s)
        return [node.wait(0.0) for node in nodes]

    def cycle(self) -> Cycle:
        """The run's record."""
        with ledger.open_sync(self.url) as opened:
            entry = opened.get(Keys(self.run).cycle)
        assert entry is not None
        return decode(Cycle, entry)

    def gathered(self, count: int) -> bool:
        """Whether a cycle runs, and so many nodes are there, spares included."""
        with ledger.open_sync(self.url) as opened:
            nodes = opened.range(Keys(self.run).nodes).entries
        return len(nodes) == count and self.cycle().state == "running"

    def committed(self) -> dict[str, Any]:
        """What workers have committed through `holdfast.cycle`."""
        prefix = f"/runs/{self.run}/commits/"
        with ledger.open_sync(self.url) as opened:
            entries = opened.range(prefix).entries
        return {entry.key.removeprefix(prefix): json.loads(entry.value) for entry in entries}

    def checkpoint(self) -> dict[str, int]:
        """What the training has come to."""
        found: dict[str, int] = json.loads((self.folder / "checkpoint.json").read_text())
        return found

    def story(self) -> str:
        """What every node has said."""
        texts = []
        for node in self.nodes:
            assert node.log is not None
            texts.append(f"--- {node.name} ---\n{node.log.read_text(errors='replace')[-4000:]}")
        return "\n".join(texts)
