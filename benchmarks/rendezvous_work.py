"""What the workers of `rendezvous_recover.py` run, by any launcher: one all-reduce after another.

`rendezvous_work.py FOLDER`. Each worker appends to a file of its own in FOLDER, a line of JSON
for each thing that happens: `began` (its code runs), `group` (the process group stands), `reduced`
(its first all-reduce), `ended` (its last line). When there is a file FOLDER/enough, all end.
"""

import json
import os
import sys
import time
from pathlib import Path

BEGAN = time.time()

import torch  # noqa: E402 -- the first line of the user's code is what counts
import torch.distributed as dist  # noqa: E402

PACE_S = 0.02


def main() -> None:
    """Run until it is enough."""
    folder = Path(sys.argv[1])
    log = (folder / f"worker-{os.getpid()}.jsonl").open("a", buffering=1)

    def tell(what: str, at: float | None = None) -> None:
        place = {"rank": int(os.environ["RANK"]), "world": int(os.environ["WORLD_SIZE"])}
        line = {"what": what, "at": at or time.time(), "pid": os.getpid(), **place}
        log.write(json.dumps(line) + "\n")

    tell("began", BEGAN)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    tell("group")
    first = True
    while True:
        last = dist.get_rank() == 0 and (folder / "enough").exists()
        value = torch.tensor([1.0, float(last)])
        dist.all_reduce(value)
        if first:
            tell("reduced")
            first = False
        if value[1].item():
            break
        time.sleep(PACE_S)
    dist.destroy_process_group()
    tell("ended")


if __name__ == "__main__":
    main()
