"""The contenders of `transfer.py` that need nothing but Holdfast's own environment.

`python -m benchmarks.transfer_child KIND SOURCE LOG JSON`; see `transfer_work.py`.
"""

import contextlib
import ctypes
import mmap
import operator
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from benchmarks.transfer_work import Contender, Task, serve
from holdfast import transfer
from holdfast.transfer import Ref, frame
from holdfast.transfer import rows as row_frames


class Holdfast(Contender):
    """`put` and `get`, a value per key."""

    def __init__(self, how: dict[str, Any]) -> None:
        super().__init__(how)
        self.store = transfer.connect(how["url"])

    def put(self, task: Task) -> Any:
        return self.store.put(task.named)

    def tell(self, put: Any) -> Any:
        return msgspec.to_builtins(list(put.values()))

    def prepare(self, task: Task, told: Any) -> Any:
        return [Ref(*one) for one in told]

    def get(self, task: Task, ready: Any) -> Any:
        return list(self.store.get(ready).values())

    def clear(self, task: Task) -> None:
        self.store.delete(task.keys)


class Unproven(Holdfast):
    """The same with a checksum that looks at no byte. There is no such switch for users."""

    def __init__(self, how: dict[str, Any]) -> None:
        for module in (frame, row_frames):
            # As quick to call as the real one, and it also takes a second number.
            vars(module)["xxh3_64_intdigest"] = operator.length_hint
        super().__init__(how)


class Rows(Holdfast):
    """`put_rows` and `get_rows`."""

    def put(self, task: Task) -> Any:
        return self.store.put_rows(task.keys, task.values)

    def get(self, task: Task, ready: Any) -> Any:
        return self.store.get_rows(ready)


class Into(Holdfast):
    """`get_into` memory that is there already."""

    places: dict[str, torch.Tensor] | None = None

    def prepare(self, task: Task, told: Any) -> Any:
        if self.places is None or list(self.places) != task.keys:
            self.places = None
            made = torch.zeros_like(task.values).unbind()
            self.places = dict(zip(task.keys, made, strict=True))
        return {ref: self.places[ref.key] for ref in super().prepare(task, told)}

    def get(self, task: Task, ready: Any) -> Any:
        self.store.get_into(ready)
        return list(ready.values())


class View(Holdfast):
    """`view`: proven where it lies, not copied."""

    def __init__(self, how: dict[str, Any]) -> None:
        super().__init__(how)
        self._open = contextlib.ExitStack()

    def get(self, task: Task, ready: Any) -> Any:
        return list(self._open.enter_context(self.store.view(ready)).values())

    def release(self) -> None:
        self._open.close()


class Copy(Contender):
    """memcpy inside one process, into memory that is warm. Keys and the other process: none."""

    def __init__(self, how: dict[str, Any]) -> None:
        super().__init__(how)
        self.out = torch.empty(0, dtype=torch.int32)

    def _warm(self, task: Task) -> torch.Tensor:
        if self.out.shape != task.values.shape:
            self.out = torch.empty(0, dtype=torch.int32)
            self.out = torch.zeros_like(task.values)
        return self.out

    def put(self, task: Task) -> Any:
        return self._warm(task).copy_(task.values)

    def prepare(self, task: Task, told: Any) -> Any:
        return self._warm(task)

    def get(self, task: Task, ready: Any) -> Any:
        return ready.copy_(task.values)


class CopyOut(Copy):
    """The same, and a get makes new memory, as a store must that gives memory away."""

    def prepare(self, task: Task, told: Any) -> Any:
        return None

    def get(self, task: Task, ready: Any) -> Any:
        made = np.empty(task.values.shape, np.int32)
        made[:] = task.values.numpy()
        return torch.from_numpy(made)


class Memory(Copy):
    """Bare shared memory that is warm: one segment, no keys, no proof."""

    def __init__(self, how: dict[str, Any]) -> None:
        super().__init__(how)
        with Path(how["path"]).open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self.shared = torch.frombuffer(self._map, dtype=torch.int32)

    def put(self, task: Task) -> Any:
        self.shared[: task.values.numel()].view_as(task.values).copy_(task.values)

    def get(self, task: Task, ready: Any) -> Any:
        return ready.copy_(self.shared[: task.values.numel()].view_as(task.values))


class BareRedis(Contender):
    """redis-py: MSET and MGET of up to 32 MiB, and tensors over what came."""

    def __init__(self, how: dict[str, Any]) -> None:
        super().__init__(how)
        import redis

        self.client = redis.Redis(how["host"], how["port"])

    def _steps(self, task: Task) -> Iterator[slice]:
        step = max(1, (32 << 20) // task.size)
        return (slice(at, at + step) for at in range(0, len(task.keys), step))

    def put(self, task: Task) -> Any:
        for some in self._steps(task):
            keys = task.keys[some]
            self.client.mset({key: task.named[key].numpy().tobytes() for key in keys})

    def _mget(self, keys: list[str]) -> Any:
        return self.client.mget(keys)

    def get(self, task: Task, ready: Any) -> Any:
        return [
            torch.frombuffer(bytearray(one), dtype=torch.int32)
            for some in self._steps(task)
            for one in self._mget(task.keys[some])
        ]

    def clear(self, task: Task) -> None:
        self.client.flushdb()


class BareRedisRows(BareRedis):
    """The same, from one tensor and into one."""

    def put(self, task: Task) -> Any:
        flat, size = task.values.numpy().reshape(-1).data.cast("B"), task.size
        for some in self._steps(task):
            begins = range(some.start * size, flat.nbytes, size)
            pairs = zip(task.keys[some], begins, strict=False)
            self.client.mset({key: bytes(flat[at : at + size]) for key, at in pairs})

    def get(self, task: Task, ready: Any) -> Any:
        parts = [part for some in self._steps(task) for part in self._mget(task.keys[some])]
        whole = torch.frombuffer(bytearray().join(parts), dtype=torch.int32)
        return whole.view(len(task.keys), -1)


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
        self.buffer = torch.empty(0, dtype=torch.int32)

    def _buffer(self, task: Task) -> torch.Tensor:
        if self.buffer.shape != task.values.shape:
            if self.buffer.numel():
                self.store.unregister_buffer(self.buffer.data_ptr())
            self.buffer = torch.empty(0, dtype=torch.int32)
            self.buffer = torch.zeros_like(task.values)
            self.store.register_buffer(self.buffer.data_ptr(), self.buffer.nbytes)
        return self.buffer

    def _all(self, task: Task, call: Callable[..., list[int]]) -> None:
        size, begin = task.size, self.buffer.data_ptr()
        for at in range(0, len(task.keys), 400):
            to = min(len(task.keys), at + 400)
            places = [begin + one * size for one in range(at, to)]
            codes = call(task.keys[at:to], places, [size] * (to - at))
            if min(codes) < 0:
                raise RuntimeError(f"Mooncake answered {min(codes)}")

    def put(self, task: Task) -> Any:
        buffer = self._buffer(task)
        ctypes.memmove(buffer.data_ptr(), task.values.data_ptr(), task.values.nbytes)
        self._all(task, self.store.batch_upsert_from)

    def prepare(self, task: Task, told: Any) -> Any:
        return self._buffer(task)

    def get(self, task: Task, ready: Any) -> Any:
        self._all(task, self.store.batch_get_into)
        return ready

    def clear(self, task: Task) -> None:
        self.store.batch_remove(task.keys)


KINDS: dict[str, type[Contender]] = {
    "holdfast": Holdfast,
    "unproven": Unproven,
    "rows": Rows,
    "into": Into,
    "view": View,
    "memcpy": Copy,
    "memcpy-new": CopyOut,
    "memory": Memory,
    "redis": BareRedis,
    "redis-rows": BareRedisRows,
    "mooncake": BareMooncake,
}

if __name__ == "__main__":
    serve(KINDS)
