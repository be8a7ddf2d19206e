"""A producer or a consumer of a queue: `python queue_child.py JSON`, for tests that kill it.

A consumer appends a line for every sample after its acknowledgement was reported; the file is
the witness that nothing is reported twice. Values say whose they are.
"""

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.errors import BatchFailed, Fenced, Retriable, TimedOut, UnknownOutcome
from holdfast.transfer.queue import Item, SyncQueue, open_queue

TASKS = {"train": ["x", "r"], "log": ["x"]}


def value(key: str, field: str) -> np.ndarray[Any, Any]:
    """What belongs under this key and field: 4 KiB that nobody else has."""
    seed = int.from_bytes(f"{key}/{field}".encode()[-8:].rjust(8, b"0"), "little")
    return np.random.default_rng(seed).integers(0, 2**31, 512)


def produce(queue: SyncQueue, how: dict[str, Any], luck: random.Random) -> None:
    """Put all samples of this producer; started again, all of them again."""
    keys = [f"{how['name']}-{at}" for at in range(how["samples"])]
    while keys:
        some, keys = keys[: (n := luck.randint(1, 8))], keys[n:]
        queue.put([Item(key, {"x": value(key, "x")}) for key in some])
        queue.put_fields({key: {"r": value(key, "r")} for key in some})


def consume(queue: SyncQueue, how: dict[str, Any], luck: random.Random) -> None:
    """Claim, fetch, compare, acknowledge, tell; until nothing comes any more."""
    log = Path(how["folder"]) / f"acked-{how['name']}"
    while True:
        task = luck.choice(list(TASKS))
        try:
            with queue.claim(task, luck.randint(1, 16), least=1, timeout_s=0.5) as batch:
                for sample, values in zip(batch.samples, batch.fetch(TASKS[task]), strict=True):
                    for field, found in values.items():
                        if not np.array_equal(found, value(sample.key, field)):
                            raise SystemExit(f"WRONG VALUE of {sample.key}/{field}")
                time.sleep(luck.choice((0.0, 0.0, 0.01)))
                batch.acknowledge()
                lines = "".join(f"{task} {key}\n" for key in batch.keys)
                fd = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
                os.write(fd, lines.encode())
                os.close(fd)
        except (TimedOut, Fenced, UnknownOutcome):
            continue
        except (BatchFailed, Retriable):
            time.sleep(0.1)


def main() -> None:
    """Work until done, or killed."""
    how = json.loads(sys.argv[1])
    luck = random.Random(f"{how['seed']} {how['name']} {how['life']}")
    while True:
        try:
            with open_queue(
                how["store"], how["ledger"], "q", TASKS, member=how["name"], lease_s=1.0
            ) as queue:
                (produce if how["role"] == "produce" else consume)(queue, how, luck)
                return
        except (Retriable, BatchFailed, UnknownOutcome):
            time.sleep(0.2)


if __name__ == "__main__":
    main()
