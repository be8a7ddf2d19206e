"""The child processes of `transfer.py`: `python -m benchmarks.transfer_child KIND JSON`.

A child says "ready" and then answers every line that it is told: `put WORKLOAD`, `get WORKLOAD`
(with what the putting child answered), `clear WORKLOAD`. An answer is one line of JSON with the
seconds that it took. Every value that was got is compared with what was put, after the clock.
"""

import abc
import contextlib
import ctypes
import json
import mmap
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from holdfast import transfer
from holdfast.transfer import Ref

WORKLOADS = {"64KiB": (1000, 64 << 10), "16MiB": (64, 16 << 20), "256B": (100_000, 256)}


def rows(workload: str) -> torch.Tensor:
    """What is put: a tensor with a row per key."""
    count, size = WORKLOADS[workload]
    return torch.arange(count * size // 4, dtype=torch.int32).reshape(count, size // 4)


def names(workload: str) -> list[str]:
    """The keys of a workload."""
    return [f"bench/{workload}/{at:06d}" for at in range(WORKLOADS[workload][0])]


class Contender(abc.ABC):
    """Something that moves values from one process to another."""

    def __init__(self, how: dict[str, Any]) -> None:
        self.how = how

    @abc.abstractmethod
    def put(self, workload: str, values: torch.Tensor) -> object:
        """Put all rows; what it returns is told to the getting process."""

    @abc.abstractmethod
    def get(self, workload: str, told: Any) -> torch.Tensor | list[torch.Tensor]:
        """Get all rows, as one tensor or as many."""

    def clear(self, workload: str) -> None:  # noqa: B027 -- bare memory has nothing to clear
        """Make room again."""


class Holdfast(Contender):
    """`put` and `get`, a value per key."""

    def __init__(self, how: dict[str, Any]) -> None:
        super().__init__(how)
        self.store = transfer.connect(how["url"])

    def put(self, workload: str, values: torch.Tensor) -> object:
        refs = self.store.put(dict(zip(names(workload), values.unbind(), strict=True)))
        return list(refs.values())

    def get(self, workload: str, told: Any) -> torch.Tensor | list[torch.Tensor]:
        return list(self.store.get(told).values())

    def clear(self, workload: str) -> None:
        self.store.delete(names(workload))


class Rows(Holdfast):
    """`put_rows` and `get_rows`."""

    def put(self, workload: str, values: torch.Tensor) -> object:
        return list(self.store.put_rows(names(workload), values).values())

    def get(self, workload: str, told: Any) -> torch.Tensor:
        found: torch.Tensor = self.store.get_rows(told)
        return found


class Into(Holdfast):
    """`get_into` memory that is there already."""

    places: dict[str, torch.Tensor] | None = None

    def get(self, workload: str, told: Any) -> list[torch.Tensor]:
        if self.places is None or len(self.places) != len(told):
            made = torch.zeros_like(rows(workload)).unbind()
            self.places = dict(zip(names(workload), made, strict=True))
        self.store.get_into({ref: self.places[ref.key] for ref in told})
        return list(self.places.values())


class Memory(Contender):
    """Bare shared memory that is warm: one segment, no keys, no proof."""

    def __init__(self, how: dict[str, Any]) -> None:
        super().__init__(how)
        with Path(how["path"]).open("r+b") as file:
            self.buffer = mmap.mmap(file.fileno(), 0)
        self.out: torch.Tensor | None = None

    def put(self, workload: str, values: torch.Tensor) -> object:
        view = np.frombuffer(self.buffer, np.int32, values.numel())
        view[:] = values.numpy().reshape(-1)
        return None

    def get(self, workload: str, told: Any) -> torch.Tensor:
        count, size = WORKLOADS[workload]
        if self.out is None or self.out.shape != (count, size // 4):
            self.out = torch.zeros(count, size // 4, dtype=torch.int32)
        view = np.frombuffer(self.buffer, np.int32, self.out.numel())
        self.out.numpy().reshape(-1)[:] = view
        return self.out


class BareRedis(Contender):
    """redis-py: pipelined SET, MGET, and tensors over what came."""

    def __init__(self, how: dict[str, Any]) -> None:
        super().__init__(how)
        import redis

        self.client = redis.Redis(how["host"], how["port"])

    def put(self, workload: str, values: torch.Tensor) -> object:
        count, size = WORKLOADS[workload]
        keys, flat = names(workload), values.numpy().reshape(-1).data.cast("B")
        step = max(1, (32 << 20) // size)
        for at in range(0, count, step):
            some = range(at, min(count, at + step))
            self.client.mset(
                {keys[one]: bytes(flat[one * size : one * size + size]) for one in some}
            )
        return None

    def get(self, workload: str, told: Any) -> list[torch.Tensor]:
        count, size = WORKLOADS[workload]
        keys, step = names(workload), max(1, (32 << 20) // size)
        found: list[torch.Tensor] = []
        for at in range(0, count, step):
            answer: Any = self.client.mget(keys[at : at + step])
            found += [torch.frombuffer(bytearray(one), dtype=torch.int32) for one in answer]
        return found

    def clear(self, workload: str) -> None:
        self.client.flushdb()


class BareMooncake(Contender):
    """The pointer calls of Mooncake in batches of 400, into one registered buffer."""

    def __init__(self, how: dict[str, Any]) -> None:
        super().__init__(how)
        from mooncake.store import MooncakeDistributedStore

        self.store = MooncakeDistributedStore()
        code = self.store.setup(
            "127.0.0.1", how["metadata"], 0, 64 << 20, "tcp", "", f"127.0.0.1:{how['port']}"
        )
        if code:
            raise SystemExit(f"Mooncake's setup answered {code}")
        self.buffers: dict[str, torch.Tensor] = {}

    def _buffer(self, workload: str) -> torch.Tensor:
        if workload not in self.buffers:
            made = self.buffers[workload] = torch.zeros_like(rows(workload))
            self.store.register_buffer(made.data_ptr(), made.nbytes)
        return self.buffers[workload]

    def _all(self, workload: str, buffer: torch.Tensor, call: Callable[..., list[int]]) -> None:
        count, size = WORKLOADS[workload]
        keys, begin = names(workload), buffer.data_ptr()
        for at in range(0, count, 400):
            to = min(count, at + 400)
            places = [begin + one * size for one in range(at, to)]
            codes = call(keys[at:to], places, [size] * (to - at))
            if min(codes) < 0:
                raise SystemExit(f"Mooncake answered {min(codes)}")

    def put(self, workload: str, values: torch.Tensor) -> object:
        buffer = self._buffer(workload)
        ctypes.memmove(buffer.data_ptr(), values.data_ptr(), values.nbytes)
        self._all(workload, buffer, self.store.batch_upsert_from)
        return None

    def get(self, workload: str, told: Any) -> torch.Tensor:
        buffer = self._buffer(workload)
        self._all(workload, buffer, self.store.batch_get_into)
        return buffer

    def clear(self, workload: str) -> None:
        self.store.batch_remove(names(workload))


KINDS: dict[str, type[Contender]] = {
    "holdfast": Holdfast,
    "rows": Rows,
    "into": Into,
    "memory": Memory,
    "redis": BareRedis,
    "mooncake": BareMooncake,
}


def main() -> None:
    """Answer until the input ends."""
    torch.set_num_threads(1)
    contender = KINDS[sys.argv[1]](json.loads(sys.argv[2]))
    print("ready", flush=True)
    for line in sys.stdin:
        do, workload, rest = line.rstrip("\n").split(" ", 2)
        values = rows(workload)
        answer: dict[str, Any] = {}
        if do == "put":
            began = time.perf_counter()
            told = contender.put(workload, values)
            answer["s"] = time.perf_counter() - began
            answer["told"] = msgspec.to_builtins(told)
        elif do == "get":
            told = json.loads(rest)
            refs = [Ref(*one) for one in told] if told else None
            began = time.perf_counter()
            found = contender.get(workload, refs)
            answer["s"] = time.perf_counter() - began
            one_tensor = found if isinstance(found, torch.Tensor) else torch.stack(found)
            answer["right"] = bool(torch.equal(one_tensor, values))
        else:
            contender.clear(workload)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
