"""Several nodes on one machine: real `torchrun` processes with torch's own agent."""

import sys
from collections.abc import Mapping, Sequence

from holdfast import ledger, proc
from holdfast.rendezvous.records import Keys
from launch.cluster import SCRIPT, Nodes


class Cluster(Nodes):
    """The nodes of one run: n0, n1, …"""

    def start(
        self,
        *program: str,
        workers: int = 1,
        conf: str = "last_call_timeout=0.2",
        flags: Sequence[str] = (),
        prefix: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> proc.Child:
        """Start one more node; `prefix` comes before the command."""
        number = len(self.all)
        argv = [*prefix, sys.executable, "-m", "torch.distributed.run"]
        argv += ["--rdzv-backend", "holdfast", "--rdzv-endpoint", self.url]
        argv += ["--rdzv-id", self.run, "--nnodes", self.nnodes, "--rdzv-conf", conf]
        argv += ["--nproc-per-node", str(workers), "--local-addr", f"127.0.2.{number + 1}"]
        argv += ["--max-restarts", "5", *self.flags, *flags, *program]
        return self.spawn(f"n{number}", argv, env)

    def train(self, steps: int, *, lease_s: float = 10.0, workers: int = 1) -> proc.Child:
        """Start one more node that trains."""
        conf = f"last_call_timeout=0.2,lease={lease_s}"
        return self.start(SCRIPT, str(steps), "0.1", conf=conf, workers=workers)

    def gathered(self, count: int) -> bool:
        """Whether a cycle runs, and so many nodes are there, spares included."""
        with ledger.open_sync(self.url) as opened:
            nodes = opened.range(Keys(self.run).nodes).entries
        return len(nodes) == count and self.cycle().state == "running"
