"""The figures of the weights: what Holdfast costs beside the bare calls that it replaces.

`python -m benchmarks.weights [--bytes 512M] [--repeats 7] [--folder DIR] [PART ...]`. All are
ratios of medians within one run: the same bytes, the same file system, one torch thread, bare
and Holdfast taking turns. DIR should be on the kind of disk that matters to you; everything
in it is removed again.
"""

import argparse
import asyncio
import contextlib
import functools
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.weights_child import CHANNEL, bare_load, places, shard_paths
from holdfast import ledger, proc
from holdfast.contrib.fleets.fleet import Fleet
from holdfast.ledger import Ledger
from holdfast.tensors import sources
from holdfast.weights import Publisher, Retention, Subscriber
from holdfast.weights.policy import Acknowledgement, Needs, OnDisk, Pin, deletable, holds
from holdfast.weights.shards import plan

HIDDEN, INNER, RANK = 1024, 4096, 16
PROJECTIONS = {
    **{f"self_attn.{one}_proj": (HIDDEN, HIDDEN) for one in "qkvo"},
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
LAYER_BYTES = 2 * sum(rows * columns for rows, columns in PROJECTIONS.values())
CHILD = "benchmarks.weights_child"
PROCESSES = 8
REPLICAS = 3
ALL = Retention(keep_last=1000)
State = dict[str, torch.Tensor]


# ---- what is published -------------------------------------------------------------------


def model(size: int) -> State:
    """A language model's tensors in bfloat16, about this many bytes."""
    state = {}
    for layer in range(max(1, size // LAYER_BYTES)):
        for name, shape in PROJECTIONS.items():
            state[f"model.layers.{layer}.{name}.weight"] = _random(*shape)
        state[f"model.layers.{layer}.input_layernorm.weight"] = _random(HIDDEN)
    return state


def lora(base: State) -> State:
    """Low-rank matrices for every projection."""
    state = {}
    for name, tensor in base.items():
        if tensor.dim() == 2:
            stem = name.removesuffix(".weight")
            state[f"{stem}.lora_A.weight"] = _random(RANK, tensor.shape[1])
            state[f"{stem}.lora_B.weight"] = _random(tensor.shape[0], RANK)
    return state


def _random(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16).view(torch.bfloat16)


def train(state: State) -> None:
    """Change every tensor, so that nothing can be shared with the version before."""
    for tensor in state.values():
        tensor.view(torch.int16).add_(1)


def size_of(state: State) -> int:
    return sum(tensor.nbytes for tensor in state.values())


# ---- measuring ---------------------------------------------------------------------------


async def timed(act: Callable[[], Any]) -> float:
    """Seconds of a call or a coroutine; what others left to be written is written before."""
    os.sync()
    began = time.perf_counter()
    result = act()
    if asyncio.iscoroutine(result):
        await result
    return time.perf_counter() - began


def row(
    name: str, bare: Sequence[float], ours: Sequence[float], aim: str, unit: str = "s"
) -> None:
    """One line: medians, their ratio, and the ratios of the turns as a measure of the noise."""
    turns = [b / a for a, b in zip(bare, ours, strict=True)]
    middle = statistics.median(ours) / statistics.median(bare)
    print(
        f"| {name} | {statistics.median(bare):.3f} {unit} | {statistics.median(ours):.3f} {unit} "
        f"| {middle:.2f} | {min(turns):.2f} to {max(turns):.2f} | {aim} |",
        flush=True,
    )


def plain(name: str, values: Sequence[float], unit: str, aim: str, digits: int = 1) -> None:
    print(
        f"| {name} | {statistics.median(values):,.{digits}f} {unit} | "
        f"{min(values):,.{digits}f} to {max(values):,.{digits}f} | {aim} |",
        flush=True,
    )


def ratios(title: str, repeats: int, first: str = "bare", second: str = "Holdfast") -> None:
    print(
        f"\n| {title} | {first} | {second} | ratio of medians of {repeats} | lowest to highest "
        "| aim |\n| --- | --- | --- | --- | --- | --- |"
    )


def figures(title: str, repeats: int) -> None:
    print(
        f"\n| {title} | median of {repeats} | lowest to highest | aim |\n| --- | --- | --- | --- |"
    )


@contextlib.asynccontextmanager
async def channel(
    folder: Path, retention: Retention
) -> AsyncIterator[tuple[Publisher, Ledger, str]]:
    """A new channel with a ledger beside it; removed at the end."""
    root = Path(tempfile.mkdtemp(dir=folder))
    try:
        async with (
            ledger.open(url_of(root)) as led,
            Publisher(root, led, CHANNEL, retention) as publisher,
        ):
            yield publisher, led, str(root)
    finally:
        shutil.rmtree(root)


def url_of(root: str | Path) -> str:
    return f"sqlite:///{root}/ledger.db"


# ---- publishing --------------------------------------------------------------------------


async def publishing(folder: Path, size: int, repeats: int) -> None:
    state = model(size)
    ratios(f"publish {size_of(state) >> 20} MiB", repeats)
    one, many, ours = [], [], []
    for turn in range(repeats + 1):  # the first is only to warm up
        train(state)
        steps = [
            lambda: _bare_publish(folder, [state]),
            lambda: _bare_publish(folder, _shards(state)),
            lambda: _publish(folder, state),
        ]
        taken = {index: await steps[index]() for index in _turns(3, turn)}
        if turn:
            one.append(taken[0])
            many.append(taken[1])
            ours.append(taken[2])
    row("against `save_file` and fsync, one file", one, ours, "≤ 1.3")
    row("against `save_file` and fsync, the same shards", many, ours, "≤ 1.3")


def _turns(count: int, turn: int) -> list[int]:
    """Everybody comes first, second, … equally often."""
    order = list(range(count))
    return order[turn % count :] + order[: turn % count]


async def _bare_publish(folder: Path, shards: Sequence[State]) -> float:
    with tempfile.TemporaryDirectory(dir=folder) as inside:
        return await timed(lambda: _save(Path(inside), shards))


def _save(folder: Path, shards: Sequence[State]) -> None:
    for number, shard in enumerate(shards):
        path = folder / f"{number}.safetensors"
        save_file(shard, path, {"format": "pt"})
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _shards(state: State) -> list[State]:
    """The state divided as Holdfast divides it."""
    return [{name: state[name] for name in shard.names} for shard in plan(sources(state))]


async def _publish(folder: Path, state: State) -> float:
    async with channel(folder, ALL) as (publisher, _, _):
        return await timed(lambda: publisher.publish(0, state))


# ---- loading -----------------------------------------------------------------------------


async def loading(folder: Path, size: int, repeats: int) -> None:
    state = model(size)
    ratios(f"load {size_of(state) >> 20} MiB into tensors, page cache warm", repeats)
    async with channel(folder, ALL) as (publisher, led, root):
        await publisher.publish(0, state)
        async with Subscriber(root, led, CHANNEL, "loader") as subscriber:
            async with subscriber.pin() as pin:
                target = places(pin)
            paths = shard_paths(root, 0)
            bare, ours, mapped = [], [], []
            for turn in range(repeats + 1):
                steps: list[Callable[[], Any]] = [
                    lambda: bare_load(paths, target),
                    lambda: _load(subscriber, target),
                    lambda: _load(subscriber, None),
                ]
                taken = {index: await timed(steps[index]) for index in _turns(3, turn)}
                if turn:
                    bare.append(taken[0])
                    ours.append(taken[1])
                    mapped.append(taken[2])
            assert all(torch.equal(_bits(state[name]), _bits(target[name])) for name in state)
    row("pin, verify, `load_into` against `load_file` and `copy_`", bare, ours, "≤ 1.3")
    row("pin and verify alone, nothing copied, against the same", bare, mapped, "")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16)


async def _load(subscriber: Subscriber, target: State | None) -> None:
    async with subscriber.pin() as pin:
        if target is not None:
            pin.load_into(target)


# ---- many processes ----------------------------------------------------------------------


class Kid:
    """A child that answers lines."""

    def __init__(self, child: proc.Child) -> None:
        assert child.process.stdin is not None
        assert child.process.stdout is not None
        self._in, self._out = child.process.stdin, child.process.stdout

    def tell(self, command: str) -> None:
        self._in.write(f"{command}\n".encode())
        self._in.flush()

    def hear(self) -> Any:
        line = self._out.readline()
        assert line, "a child has ended"
        return json.loads(line)


@contextlib.contextmanager
def children(kind: str, count: int, root: str) -> Iterator[list[Kid]]:
    with contextlib.ExitStack() as stack:
        kids = []
        for index in range(count):
            child = proc.spawn(
                [sys.executable, "-m", CHILD, kind, root, url_of(root), f"{kind}-{index}"],
                env={
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            kids.append(Kid(stack.enter_context(child)))
        for kid in kids:
            kid.hear()
        yield kids


def _all(kids: Sequence[Kid], command: str) -> list[Any]:
    for kid in kids:
        kid.tell(command)
    return [kid.hear() for kid in kids]


async def sharing(folder: Path, size: int, repeats: int) -> None:
    state = model(size)
    total = size_of(state)
    async with channel(folder, ALL) as (publisher, _, root):
        await publisher.publish(0, state)
        with children("loader", PROCESSES, root) as kids:
            found: dict[tuple[str, int], list[list[dict[str, float]]]] = {}
            for turn in range(repeats + 1):
                for command in ("bare", "load"):
                    for count in (1, PROCESSES):
                        answers = _all(kids[:count], command)
                        if turn:
                            found.setdefault((command, count), []).append(answers)
            many = f"{PROCESSES} processes"
            ratios(f"{total >> 20} MiB loaded by {many} at once", repeats, "one process", "each")
            for command, what in (("bare", "bare"), ("load", "Holdfast")):
                for unit, words in (("wall", "time"), ("cpu", "CPU time")):
                    one, each = (
                        [statistics.median(one[unit] for one in answers) for answers in turns]
                        for turns in (found[command, 1], found[command, PROCESSES])
                    )
                    aim = "≤ 1.5 where cores allow" if command == "load" else ""
                    row(f"{what}, {words} per process", one, each, aim)
            _all(kids, "hold")
            looks = _all(kids, "look")
            _all(kids, "drop")
    print(f"\n| memory of {many} that hold all of it without a copy | × its size | aim |")
    print("| --- | --- | --- |")
    for key, words, aim in (
        ("Rss", "mapped, counted for each process alone (RSS)", ""),
        ("Pss", "really taken, by all together (PSS)", "1"),
        ("Private_Dirty", "private copies of pages", "0"),
    ):
        print(f"| {words} | {sum(look[key] for look in looks) / total:.2f} | {aim} |")


# ---- a small change ----------------------------------------------------------------------


async def small_change(folder: Path, size: int, repeats: int) -> None:
    base = model(size)
    adapter = lora(base)
    state = base | adapter
    part = 100 * size_of(adapter) / size_of(state)
    full_s, small_s, full, small, full_io, small_io = [], [], [], [], [], []
    for _turn in range(repeats):
        async with channel(folder, ALL) as (publisher, _, root):
            before = _written()
            full_s.append(await timed(lambda: publisher.publish(0, state)))
            full_io.append(_written() - before)
            train(adapter)
            before = _written()
            small_s.append(await timed(lambda: publisher.publish(1, state)))
            small_io.append(_written() - before)
            first, second = (_inodes(Path(root), version) for version in (0, 1))
            full.append(sum(first.values()))
            small.append(sum(bytes for inode, bytes in second.items() if inode not in first))
    title = f"a change of {part:.1f} % (LoRA, rank {RANK}) of {size_of(state) >> 20} MiB"
    ratios(title, repeats, "whole model", "change only")
    mib = float(1 << 20)
    aim = "≤ 0.05"
    row("bytes of new files", [n / mib for n in full], [n / mib for n in small], aim, "MiB")
    row("bytes to the disk", [n / mib for n in full_io], [n / mib for n in small_io], aim, "MiB")
    row("time", full_s, small_s, "")


def _written() -> int:
    """What this process has sent to the disk, by the kernel's count."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["write_bytes"])


def _inodes(root: Path, version: int) -> dict[int, int]:
    inside = root / CHANNEL / f"step_{version}"
    return {path.stat().st_ino: path.stat().st_size for path in inside.iterdir()}


# ---- deciding ----------------------------------------------------------------------------


async def deciding(folder: Path, size: int, repeats: int) -> None:  # noqa: ARG001
    versions, pins, acknowledgements = crowd(10_000, 1_000)
    everything = sum({i: n for one in versions for i, n in one.files.items()}.values())
    decide = functools.partial(deletable, versions, pins, acknowledgements)
    kinds = {
        "no budget": Retention(keep_last=100),
        "all kept, budget of half": Retention(keep_last=20_000, max_bytes=everything // 2),
    }
    figures("decide a sweep of 10,000 versions and 1,000 consumers", repeats)
    for name, policy in kinds.items():
        taken = [await timed(lambda: decide(policy, 0.0)) for _ in range(repeats)]  # noqa: B023
        plain(name, [1e3 * one for one in taken], "ms", "≤ 50")
    who = functools.partial(holds, versions, pins, acknowledgements)
    taken = [await timed(lambda: who(0.0)) for _ in range(repeats)]
    plain("and tell who holds what", [1e3 * one for one in taken], "ms", "")


def crowd(count: int, consumers: int) -> tuple[list[OnDisk], list[Pin], list[Acknowledgement]]:
    """Versions of twelve files, eight of them shared with the one before; consumers lag."""
    dice = random.Random(1)
    versions = []
    files: dict[int, int] = {}
    for number in range(count):
        kept = dict(list(files.items())[:8] if number % 50 else ())
        new = range(12 * number, 12 * number + 12 - len(kept))
        files = kept | dict.fromkeys(new, 1 << 20)
        versions.append(OnDisk(number, files))
    pins, acknowledgements = [], []
    for index in range(consumers):
        at = count - 1 - min(count - 1, int(dice.expovariate(1 / 500)))
        pins.append(Pin(f"consumer-{index}", at))
        needs: Needs = "every" if index % 10 == 0 else "latest"
        acknowledgements.append(Acknowledgement(f"consumer-{index}", at, needs, at))
    return versions, pins, acknowledgements


# ---- a fleet -----------------------------------------------------------------------------


async def fleet(folder: Path, size: int, repeats: int) -> None:
    state = model(size)
    updates, held = [], []
    async with channel(folder, Retention(keep_last=1)) as (publisher, led, root):
        await publisher.publish(0, state)
        with children("replica", REPLICAS, root) as kids:
            async with Fleet(led, CHANNEL) as owner:
                await owner.update(0)
                for version in range(1, repeats + 1):
                    train(state)
                    await publisher.publish(version, state)
                    await asyncio.to_thread(_all, kids, "look")
                    updates.append(await timed(lambda: owner.update(version)))  # noqa: B023
                    looks = await asyncio.to_thread(_all, kids, "look")
                    held.append(max(look["held"] for look in looks))
    figures(f"{REPLICAS} replica processes, {size_of(state) >> 20} MiB", repeats)
    plain("from `update` to the last acknowledgement", updates, "s", "", 2)
    plain("the longest that a caller was held", held, "s", "", 2)


# ---- all of it ---------------------------------------------------------------------------

PARTS = {
    "publish": publishing,
    "load": loading,
    "share": sharing,
    "change": small_change,
    "decide": deciding,
    "fleet": fleet,
}


def _bytes(text: str) -> int:
    units = {"K": 10, "M": 20, "G": 30}
    return int(text.rstrip("KMG")) << units.get(text[-1], 0)


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--bytes", type=_bytes, default="512M", help="size of the model")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=None, help="where to write")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    torch.manual_seed(1)
    print(
        f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}, "
        f"load {os.getloadavg()[0]:.1f}"
    )
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=options.folder) as folder:
        for part in options.parts or PARTS:
            await PARTS[part](Path(folder), options.bytes, options.repeats)
            print(f"\nload {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    asyncio.run(main())
