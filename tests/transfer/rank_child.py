"""A data-parallel rank that trains on a queue: `python rank_child.py JSON`.

Its checkpoint is a file with the last step in it. For every step it appends one line with the
keys and a sum of the values, before it may be killed.
"""

import json
import os
import sys
import time
from pathlib import Path

from torch.utils.data import DataLoader

from holdfast.transfer.queue.dataset import QueueDataset


def main() -> None:
    """Train until the last step is saved."""
    how = json.loads(sys.argv[1])
    folder, rank = Path(how["folder"]), how["rank"]
    saved = folder / "checkpoint"
    start = int(saved.read_text()) if saved.exists() else 0
    dataset = QueueDataset(
        how["store"],
        how["ledger"],
        "q",
        "train",
        batch_size=how["batch"],
        rank=rank,
        world_size=how["world"],
        start=start,
        lease_s=1.0,
    )
    print(json.dumps({"start": start}), flush=True)
    if start >= how["steps"]:
        dataset.saved(start)
        return
    for shard in DataLoader(dataset, batch_size=None):
        total = sum(int(one["x"].sum()) for one in shard.values)
        mark = {"attempt": how["attempt"], "step": shard.step}
        line = json.dumps({**mark, "keys": [one.key for one in shard.samples], "sum": total})
        with (folder / f"log-{rank}").open("a") as log:
            log.write(line + "\n")
        print(line, flush=True)
        time.sleep(how["pause_s"])
        if shard.step % 2 == 0 and rank == 0:
            # A checkpoint contains the work of all ranks.
            logs = [folder / f"log-{other}" for other in range(how["world"])]
            text = json.dumps(mark)[:-1] + ","
            while not all(log.exists() and text in log.read_text() for log in logs):
                time.sleep(0.01)
            fresh = folder / f"checkpoint.{os.getpid()}"
            fresh.write_text(str(shard.step))
            fresh.rename(saved)
            dataset.saved(shard.step)
        while shard.step % 2 == 0 and int(saved.read_text() if saved.exists() else 0) < shard.step:
            time.sleep(0.01)
        if shard.step == how["steps"]:
            break
    dataset.close()


if __name__ == "__main__":
    main()
