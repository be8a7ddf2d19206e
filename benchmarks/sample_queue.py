"""The figures of the queue: samples/s through put, claim and acknowledge, in batches of 1,000.

`python -m benchmarks.sample_queue [--repeats 5] [--batches 20] [sqlite] [etcd]`. One batch
after the other: the figure is all samples over all of the time, everything that is tidied up in
between included. Once with records alone, and once with a tensor of 256 bytes for each sample,
which is put into shared memory, fetched and proven. Ledgers and kinds take turns; each turn
begins with a new queue. "Of CPU" is the time that this process computed: on a busy machine
that says more than the clock.
"""

import argparse
import asyncio
import contextlib
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from holdfast import ledger, transfer
from holdfast.errors import NotFound
from holdfast.ledger import Ledger
from holdfast.servers import EtcdServer
from holdfast.transfer import Store
from holdfast.transfer.queue import Item, Queue, Sample
from holdfast.transfer.shm import remove

BATCH = 1000
WIDTH = 64
"""Of a sample's tensor of 32-bit numbers: 256 bytes."""
AIMS = {("sqlite", False): "≥ 100,000"}


class Turn(NamedTuple):
    """Seconds of one turn."""

    put: float = 0.0
    claim: float = 0.0
    fetch: float = 0.0
    acknowledge: float = 0.0
    whole: float = 0.0
    cpu: float = 0.0


@contextlib.contextmanager
def ledgers(kinds: Sequence[str], folder: Path) -> Iterator[dict[str, str]]:
    """The ledgers to measure, by name."""
    with contextlib.ExitStack() as stack:
        urls = {}
        if "sqlite" in kinds:
            urls["sqlite"] = f"sqlite:///{folder}/queue.db"
        if "etcd" in kinds:
            host, port = stack.enter_context(EtcdServer(folder / "etcd")).endpoint
            urls["etcd"] = f"etcd://{host}:{port}"
        yield urls


async def turn(led: Ledger, store: Store, batches: int, *, payload: bool) -> Turn:
    """One new queue, and so many batches through it; what came is what was put, in its order."""
    tasks = {"train": ["x"] if payload else []}
    values = torch.arange(batches * BATCH * WIDTH, dtype=torch.int32).view(batches, BATCH, WIDTH)
    made = [
        [
            Item(f"sample-{number}-{at}", {"x": values[number, at]} if payload else {})
            for at in range(BATCH)
        ]
        for number in range(batches)
    ]
    spent = [0.0] * 4
    came: list[tuple[dict[str, bool], Sequence[Sample], Sequence[dict[str, Any]]]] = []
    async with Queue(store, led, f"bench-{uuid.uuid4().hex[:8]}", tasks) as queue:
        began, cpu = time.perf_counter(), time.process_time()
        for items in made:
            marks = [time.perf_counter()]
            new = await queue.put(items)
            marks.append(time.perf_counter())
            batch = await queue.claim("train", BATCH)
            marks.append(time.perf_counter())
            found = await batch.fetch() if payload else []
            marks.append(time.perf_counter())
            await batch.acknowledge()
            marks.append(time.perf_counter())
            for at in range(4):
                spent[at] += marks[at + 1] - marks[at]
            came.append((new, batch.samples, found))
        whole, cpu = time.perf_counter() - began, time.process_time() - cpu
    for items, value, (new, samples, got) in zip(made, values, came, strict=True):
        assert all(new.values())
        assert [one.key for one in samples] == [one.key for one in items]
        assert not got or torch.equal(torch.stack([one["x"] for one in got]), value)
    return Turn(spent[0], spent[1], spent[2], spent[3], whole, cpu)


def show(name: str, turns: Sequence[Turn], count: int, aim: str) -> None:
    """A row of the table."""
    rates = [count / one.whole for one in turns]
    steps = [
        1e3 * statistics.median(step) * BATCH / count
        for step in zip(*(one[:4] for one in turns), strict=True)
    ]
    of_cpu = statistics.median(count / one.cpu for one in turns)
    cells = [
        f"{statistics.median(rates):,.0f}",
        f"{min(rates):,.0f} to {max(rates):,.0f}",
        f"{of_cpu:,.0f}",
        *(f"{step:.1f} ms" for step in steps),
    ]
    print(f"| {name} | {' | '.join(cells)} | {aim} |", flush=True)


async def measure(kinds: Sequence[str], repeats: int, batches: int) -> None:
    """Let all take turns, and print the table."""
    name = f"bench-{uuid.uuid4().hex[:8]}"
    found: dict[tuple[str, bool], list[Turn]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder,
        ledgers(kinds, Path(folder)) as urls,
    ):
        try:
            with transfer.connect(f"shm://{name}?budget=1G") as store:
                for number in range(repeats + 1):
                    for kind, url in urls.items():
                        for payload in (False, True):
                            async with ledger.open(url) as led:
                                took = await turn(led, store, batches, payload=payload)
                            if number:  # the first is only to warm up
                                found.setdefault((kind, payload), []).append(took)
        finally:
            with contextlib.suppress(NotFound):
                remove(name)
    print(
        f"\n| {batches} batches of {BATCH:,} | samples/s, median of {repeats} | lowest to highest "
        "| per s of CPU | put | claim | fetch | acknowledge | aim |"
    )
    print(f"|{' --- |' * 9}")
    for (kind, payload), turns in sorted(found.items(), key=lambda one: (one[0][0] != "sqlite",)):
        what = f"{kind}, {'a tensor of 256 B each' if payload else 'records alone'}"
        show(what, turns, batches * BATCH, AIMS.get((kind, payload), ""))


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("kinds", nargs="*", help="sqlite, etcd")
    options = parser.parse_args()
    kinds = options.kinds or ["sqlite", "etcd"]
    if unknown := set(kinds) - {"sqlite", "etcd"}:
        parser.error(f"there is no ledger {', '.join(sorted(unknown))}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave nothing in shared memory
    torch.set_num_threads(1)
    print(
        f"{os.cpu_count()} cores, Python {platform.python_version()}, "
        f"load {os.getloadavg()[0]:.1f}"
    )
    asyncio.run(measure(kinds, options.repeats, options.batches))
    print(f"\nload {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
