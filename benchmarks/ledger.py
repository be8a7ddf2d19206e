"""The ledger's figures: transactions/s, time from commit to watch, cost of idle watchers.

`python -m benchmarks.ledger [sqlite] [etcd]`. Every figure is the median of several
rounds; clients are real processes. The machine's noise is shown as the spread.
"""

import asyncio
import contextlib
import functools
import math
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Barrier as BarrierType
from pathlib import Path
from typing import Any

import psutil

from holdfast import ledger
from holdfast.ledger import Put
from holdfast.servers import EtcdServer

ROUNDS = 3
_fork = multiprocessing.get_context("fork")

Barrier = BarrierType


def _in_processes(count: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `work(index, barrier, *args)` in processes of their own; returns what they return."""
    barrier = _fork.Barrier(count)
    answers: Any = _fork.SimpleQueue()

    def run(index: int) -> None:
        answers.put(asyncio.run(work(index, barrier, *args)))

    children = [_fork.Process(target=run, args=(index,), daemon=True) for index in range(count)]
    for child in children:
        child.start()
    results = [answers.get() for _ in children]
    for child in children:
        child.join()
    return results


async def _transactions(
    index: int, barrier: Barrier, url: str, seconds: float, tasks: int
) -> tuple[int, float]:
    """Single-key transactions, one after the other in each of `tasks` tasks."""
    async with ledger.open(url) as led:
        barrier.wait()
        began = time.perf_counter()
        end = began + seconds

        async def loop(task: int) -> int:
            done = 0
            while time.perf_counter() < end:
                key = f"/bench/{index}/{task}/{done % 100}"
                await led.txn([], [Put(key, b"x" * 100)])
                done += 1
            return done

        counts = await asyncio.gather(*(loop(task) for task in range(tasks)))
        return sum(counts), time.perf_counter() - began


def transactions_per_s(url: str, processes: int, tasks: int, seconds: float) -> float:
    results = _in_processes(processes, _transactions, url, seconds, tasks)
    return float(sum(count for count, _ in results) / max(took for _, took in results))


async def _latency(index: int, barrier: Barrier, url: str, count: int) -> list[float]:
    """Process 0 writes the time, process 1 watches; both read the same monotonic clock."""
    async with ledger.open(url) as led:
        if index == 1:
            begin = (await led.range("/bench/")).revision + 1
            async with led.watch("/bench/latency", start=begin) as watch:
                barrier.wait()
                delays = []
                async for batch in watch:
                    entry = batch.events[0].entry
                    assert entry is not None
                    delays.append(time.monotonic() - float(entry.value))
                    if len(delays) == count:
                        return delays
        barrier.wait()
        for _ in range(count):
            await asyncio.sleep(0.003)
            # The clock starts before the transaction: the figure includes the commit itself.
            await led.txn([], [Put("/bench/latency", repr(time.monotonic()).encode())])
        return []


def latency_ms(url: str, count: int = 1000) -> tuple[float, float]:
    parts = _in_processes(2, _latency, url, count)
    delays: list[float] = sorted(delay for part in parts for delay in part)
    return delays[len(delays) // 2] * 1e3, delays[int(len(delays) * 0.99)] * 1e3


async def _idle(index: int, barrier: Barrier, url: str, seconds: float) -> float:
    """CPU seconds per second of one process that only watches (and of nothing else)."""
    async with ledger.open(url) as led:
        begin = (await led.range("/bench/")).revision + 1
        async with led.watch(f"/bench/idle/{index}", start=begin) as watch:
            waiting = asyncio.ensure_future(anext(watch))
            await asyncio.sleep(0.5)
            await asyncio.to_thread(barrier.wait)
            before, began = psutil.Process().cpu_times(), time.perf_counter()
            await asyncio.sleep(seconds)
            after, took = psutil.Process().cpu_times(), time.perf_counter() - began
            waiting.cancel()
            return float((after.user + after.system - before.user - before.system) / took)


def idle_percent(url: str, watchers: int = 20, seconds: float = 10.0) -> float:
    return 100.0 * math.fsum(_in_processes(watchers, _idle, url, seconds))


def _row(name: str, unit: str, values: list[float]) -> None:
    middle = statistics.median(values)
    print(
        f"| {name} | {middle:,.1f} {unit} | {min(values):,.1f} to {max(values):,.1f} |", flush=True
    )


@contextlib.contextmanager
def _target(kind: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        if kind == "etcd":
            with EtcdServer(Path(folder)) as server:
                host, port = server.endpoint
                yield f"etcd://{host}:{port}"
        else:
            yield f"sqlite:///{folder}/bench.db{'?sync=full' if kind == 'sqlite-full' else ''}"


def main(kinds: list[str]) -> None:
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    print(
        f"{os.cpu_count()} cores, {cpu}, Python {platform.python_version()}, "
        f"{time.strftime('%Y-%m-%d')}, load {os.getloadavg()[0]:.1f}\n"
    )
    for kind in kinds:
        print(f"| {kind} | median of {ROUNDS} | lowest to highest |\n| --- | --- | --- |")
        with _target(kind) as url:
            for processes, tasks in ((1, 1), (1, 32), (8, 1), (8, 8)):
                name = (
                    f"{processes} process{'es' if processes > 1 else ''}, {tasks} in flight each"
                )
                measure = functools.partial(transactions_per_s, url, processes, tasks, 3.0)
                _row(name, "txn/s", [measure() for _ in range(ROUNDS)])
            if kind != "sqlite-full":
                pairs = [latency_ms(url) for _ in range(ROUNDS)]
                _row("write to another process's watch, p50", "ms", [p50 for p50, _ in pairs])
                _row("write to another process's watch, p99", "ms", [p99 for _, p99 in pairs])
                idle = [idle_percent(url) for _ in range(ROUNDS)]
                _row("20 idle watchers, all together", "% of a core", idle)
        print()


if __name__ == "__main__":
    main(sys.argv[1:] or ["sqlite", "sqlite-full", "etcd"])
