"""What a user would run under torchrun: torch alone, a sum over all ranks, a checkpoint file.

Arguments: folder, steps, seconds per step and, if wanted, a world size: a smaller world stops
half-way and waits to be replaced. Every rank writes what it saw, one line per step, so
that a test can tell who did what and when. The only thing that a user would not write is the
first line of `main`: a test leaves no process behind, whatever it kills.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from holdfast.proc import die_with_parent


def main() -> None:
    die_with_parent(os.getppid())
    folder, steps, pace_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    wanted = int(sys.argv[4]) if len(sys.argv) > 4 else 1
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    checkpoint = folder / "checkpoint.json"
    state = json.loads(checkpoint.read_text()) if checkpoint.exists() else {"step": 0, "sum": 0}
    start = torch.tensor([state["step"], state["sum"]])
    dist.broadcast(start, 0)  # the others may have looked a moment earlier or later
    done, total = (int(value) for value in start)
    with (folder / f"steps.{os.getpid()}.jsonl").open("a") as log:
        for step in range(done, steps):
            if world < wanted and step >= steps // 2:
                time.sleep(600)
            value = torch.tensor([step + 1])
            dist.all_reduce(value)
            total += int(value) // world
            line = {
                "step": step,
                "rank": rank,
                "world": world,
                "node": int(os.environ["GROUP_RANK"]),
                "pid": os.getpid(),
                "agent": os.getppid(),
                "cycle": os.environ.get("HOLDFAST_CYCLE", ""),
                "port": os.environ["MASTER_PORT"],
                "at": time.time(),
            }
            log.write(json.dumps(line) + "\n")
            log.flush()
            time.sleep(pace_s)
            if rank == 0:
                fresh = folder / f"checkpoint.{os.getpid()}"
                fresh.write_text(json.dumps({"step": step + 1, "sum": total}))
                fresh.replace(checkpoint)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
