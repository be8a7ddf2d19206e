"""The figures of the store: what a proven transfer costs beside the bare one.

`python -m benchmarks.transfer [--repeats 5] [NAME ...]`. Two processes, one that puts and one
that gets; all contenders take turns within one run, on the three workloads; medians. Every
value that was got is compared with what was put, outside of the clock.
"""

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.transfer_child import WORKLOADS
from holdfast import procs
from holdfast.errors import NotFound
from holdfast.servers import MooncakeHolder, MooncakeServer, RedisServer
from holdfast.transfer.shm import remove

CHILD = "benchmarks.transfer_child"


class Process:
    """A child that answers lines."""

    def __init__(self, kind: str, how: dict[str, Any]) -> None:
        parent = os.getpid()
        self._child = subprocess.Popen(
            [sys.executable, "-m", CHILD, kind, json.dumps(how)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: procs.die_with_parent(parent),
        )
        assert self._child.stdout is not None
        while (line := self._child.stdout.readline().strip()) != "ready":
            if not line and self._child.poll() is not None:
                raise SystemExit(f"{kind} did not start")

    def ask(self, do: str, workload: str, told: Any = None) -> Any:
        """Tell it to do something, and wait for the answer."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(f"{do} {workload} {json.dumps(told)}\n")
        self._child.stdin.flush()
        while not (line := self._child.stdout.readline()).startswith("{"):
            if not line:
                raise SystemExit(f"a child ended while it should {do} {workload}")
        return json.loads(line)

    def close(self) -> None:
        """End it."""
        self._child.kill()
        self._child.wait()


@contextlib.contextmanager
def contenders(folder: Path) -> Iterator[dict[str, tuple[str, dict[str, Any]]]]:
    """Everything that takes part, with the servers that it needs."""
    name = f"bench-{uuid.uuid4().hex[:8]}"
    memory = Path("/dev/shm") / name  # the peers' own shared memory ends with its first user
    memory.write_bytes(bytes(1 << 30))  # warm
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(
            RedisServer(folder / "redis", args=("--appendonly", "no", "--save", ""))
        )
        master = stack.enter_context(MooncakeServer(folder / "mooncake"))
        stack.enter_context(MooncakeHolder(folder / "holder", master, nbytes=3 << 30))
        shm = {"url": f"shm://{name}?budget=6G"}
        mooncake = {"url": f"{master.url}&segment=0", "metadata": master.metadata}
        try:
            yield {
                "memory": ("memory", {"path": str(memory)}),
                "shm": ("holdfast", shm),
                "shm, rows": ("rows", shm),
                "shm, get_into": ("into", shm),
                "redis bare": ("redis", {"host": redis.host, "port": redis.port}),
                "redis": ("holdfast", {"url": f"redis://{redis.host}:{redis.port}"}),
                "mooncake bare": ("mooncake", {**mooncake, "port": master.port}),
                "mooncake": ("holdfast", mooncake),
            }
        finally:
            memory.unlink()
            with contextlib.suppress(NotFound):  # nobody who uses it took part
                remove(name)


def measure(kind: str, how: dict[str, Any], workload: str, repeats: int) -> tuple[float, float]:
    """Median seconds of putting and of getting, after one turn that is not counted."""
    putting, getting = Process(kind, how), Process(kind, how)
    try:
        puts, gets = [], []
        for turn in range(repeats + 1):
            put = putting.ask("put", workload)
            got = getting.ask("get", workload, put["told"])
            if not got["right"]:
                raise SystemExit(f"{kind}: wrong values")
            if turn:
                puts.append(put["s"])
                gets.append(got["s"])
            putting.ask("clear", workload)
        return statistics.median(puts), statistics.median(gets)
    finally:
        putting.close()
        getting.close()


def figure(workload: str, seconds: float) -> str:
    """GB/s, or keys/s for small values."""
    count, size = WORKLOADS[workload]
    if size < 1024:
        return f"{count / seconds / 1000:.0f} k/s"
    return f"{count * size / seconds / 1e9:.2f} GB/s"


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("names", nargs="*", help="only these contenders")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, load {load:.1f}")
    heading = " | ".join(f"{n:,} × {size}: put | get" for size, (n, _) in WORKLOADS.items())
    print(f"\n| | {heading} |\n|{' --- |' * (1 + 2 * len(WORKLOADS))}")
    with tempfile.TemporaryDirectory() as folder, contenders(Path(folder)) as all_of_them:
        for name, (kind, how) in all_of_them.items():
            if options.names and name not in options.names:
                continue
            cells = []
            for workload in WORKLOADS:
                put, got = measure(kind, how, workload, options.repeats)
                cells += [figure(workload, put), figure(workload, got)]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)
    print(f"\nload {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
