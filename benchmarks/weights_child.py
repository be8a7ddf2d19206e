"""The child processes of `weights.py`: `python -m benchmarks.weights_child KIND ROOT URL NAME`.

A child says "ready" and then answers every line it is told with one line of JSON.

    loader    bare: load the newest version's files with safetensors, into tensors it has
              load: pin, verify, load into the same tensors
              hold: pin without a copy and keep it; look: what the mappings take; drop it
    replica   look: how long the longest wait of its caller was since it last said so
"""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

from holdfast import ledger
from holdfast.contrib.fleets.replica import ModuleEngine, Replica
from holdfast.weights import Pin, Subscriber
from holdfast.weights.layout import Layout
from holdfast.weights.sync import SyncPin, SyncSubscriber, open_subscriber

CHANNEL = "policy"
State = Mapping[str, torch.Tensor]


def shard_paths(root: str | Path, version: int) -> list[Path]:
    """The files of a version that hold tensors."""
    return sorted(Path(Layout(str(root), CHANNEL).version(version)).glob("*.safetensors"))


def bare_load(paths: list[Path], target: State) -> None:
    """What a reader does that trusts the files."""
    with torch.no_grad():
        for path in paths:
            for name, tensor in load_file(path).items():
                target[name].copy_(tensor)


def places(pin: Pin | SyncPin) -> dict[str, torch.Tensor]:
    """Tensors that a version fits into, with memory behind them."""
    return {name: torch.ones_like(tensor) for name, tensor in pin.state_dict().items()}


def _mapped() -> dict[str, int]:
    """What the mappings of weights take of the memory, in bytes, by the kernel's words."""
    found = {"Rss": 0, "Pss": 0, "Private_Dirty": 0}
    ours = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        word, _, rest = line.partition(" ")
        if not word.endswith(":"):  # the first line of a mapping; its last word is the file
            ours = line.endswith(".safetensors")
        elif ours and word[:-1] in found:
            found[word[:-1]] += int(rest.split()[0]) << 10
    return found


def _say(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _timed(act: Callable[[], None]) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    act()
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def _loader(root: str, url: str, name: str) -> None:
    with contextlib.ExitStack() as stack:
        subscriber = stack.enter_context(
            open_subscriber(root, url, CHANNEL, name, needs="latest", lease_s=60.0)
        )
        with subscriber.pin() as pin:
            target, paths = places(pin), shard_paths(root, pin.number)
        held = stack.enter_context(contextlib.ExitStack())
        _say("ready")
        for command in _commands():
            if command == "bare":
                _say(_timed(lambda: bare_load(paths, target)))
            elif command == "load":
                _say(_timed(lambda: _load(subscriber, target)))
            elif command == "hold":
                held.enter_context(subscriber.pin())
                _say({})
            elif command == "look":
                _say(_mapped())
            elif command == "drop":
                held.close()
                _say({})


def _load(subscriber: SyncSubscriber, target: State) -> None:
    with subscriber.pin() as pin:
        pin.load_into(target)


def _commands() -> Iterator[str]:
    for line in sys.stdin:
        yield line.strip()


def _module(state: State) -> torch.nn.Module:
    """A module that has just these tensors."""
    root = torch.nn.Module()
    for name, tensor in state.items():
        *parents, last = name.split(".")
        inner = root
        for parent in parents:
            if parent not in dict(inner.named_children()):
                inner.add_module(parent, torch.nn.Module())
            inner = inner.get_submodule(parent)
        inner.register_buffer(last, tensor)
    return root


async def _replica(root: str, url: str, name: str) -> None:
    async with (
        ledger.open(url) as led,
        Subscriber(root, led, CHANNEL, name, needs="latest", address=f"{name}:1") as subscriber,
    ):
        async with subscriber.pin() as pin:
            module = _module(places(pin))
        async with Replica(subscriber, ModuleEngine(module)) as replica:
            waits = [0.0]
            calling = asyncio.create_task(_call(replica, waits))
            _say("ready")
            while line := await asyncio.to_thread(sys.stdin.readline):
                assert line.strip() == "look"
                _say({"held": max(waits)})
                waits[:] = [0.0]
            calling.cancel()


async def _call(replica: Replica, waits: list[float]) -> None:
    """A caller who asks again and again."""
    async with replica.admit(timeout_s=600):  # waits for the first version
        pass
    while True:
        began = time.perf_counter()
        async with replica.admit(timeout_s=60):
            waits.append(time.perf_counter() - began)
            await asyncio.sleep(0.001)


def main(kind: str, root: str, url: str, name: str) -> None:
    torch.set_num_threads(1)
    if kind == "replica":
        asyncio.run(_replica(root, url, name))
    else:
        _loader(root, url, name)


if __name__ == "__main__":
    main(*sys.argv[1:])
