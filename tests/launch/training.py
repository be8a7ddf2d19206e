"""A training loop on gloo: sums over ranks, commits within its cycle, resumes from there.

Run by `holdfast launch`, or by `torchrun` with our rendezvous. Every rank commits its own record
per step, rank 0 also the step, so a new cycle goes on from there. Arguments: steps, seconds per
step, and a file that ends it early when it is there.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from holdfast import cycle, progress
from holdfast.errors import Fenced
from holdfast.proc import die_with_parent


def main() -> None:
    if os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True":
        die_with_parent(os.getppid())  # torchrun's agent, if it is killed, leaves its workers
    steps, pace_s = int(sys.argv[1]), float(sys.argv[2])
    enough = Path(sys.argv[3]) if len(sys.argv) > 3 else None
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    done = cycle.committed("step") or 0
    total = cycle.committed("total") or 0
    print(f"rank {rank}/{world} cycle {cycle.number()} from step {done}", flush=True)
    record: dict[str, object] = {"cycle": cycle.number(), "pid": os.getpid()}
    record |= {"agent": os.getppid(), "port": os.environ["MASTER_PORT"]}
    for step in range(done, steps):
        last = rank == 0 and enough is not None and enough.exists()
        value = torch.tensor([float(step + 1), float(last)])
        dist.all_reduce(value)
        total += round(value[0].item()) // world
        progress.beat(step)
        time.sleep(pace_s)
        cycle.commit({f"rank_{rank}": {**record, "step": step}})
        dist.barrier()
        if rank == 0:
            cycle.commit({"step": step + 1, "total": total})
        if value[1].item():
            break
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except Fenced as error:
        sys.exit(f"fenced: {error}")
