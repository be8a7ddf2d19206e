"""A real TransferQueue over a store of ours, and what is done to that store behind its back."""

import functools
import importlib
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
import torch

from holdfast import transfer
from holdfast.errors import BatchFailed
from holdfast.servers import RedisServer
from holdfast.transfer import shm

# Not installed where the types are checked.
ray: Any = importlib.import_module("ray")
tq: Any = importlib.import_module("transfer_queue")
interface: Any = importlib.import_module("transfer_queue.interface")
OmegaConf: Any = importlib.import_module("omegaconf").OmegaConf
_tensordict: Any = importlib.import_module("tensordict")
TensorDict, NonTensorStack, NonTensorData = (
    _tensordict.TensorDict,
    _tensordict.NonTensorStack,
    _tensordict.NonTensorData,
)
importlib.import_module("holdfast.contrib.transferqueue")

CHECKPOINTS = pytest.mark.skipif(
    not hasattr(tq, "save_checkpoint"), reason="TransferQueue has checkpoints since 0.1.9"
)
PROTOTYPE = "ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"
"""What torch says about nested tensors, which TransferQueue makes of every field."""
QUICK = {"deadline_s": 3, "attempts": 4}


class Place:
    """The store that a TransferQueue uses, seen from outside."""

    def __init__(self, url: str, server: RedisServer | None = None) -> None:
        self.url = url
        self.server = server

    def names(self, part: str = "") -> list[str]:
        """The names of all values, as the store has them."""
        with transfer.connect(self.url) as store:
            return sorted(one.key for one in store.scan() if part in one.key)

    def delete(self, part: str) -> None:
        """Delete the one value whose name has this in it."""
        (name,) = self.names(part)
        with transfer.connect(self.url) as store:
            assert store.delete([name])[name]

    def change(self, payload: bytes, how: Callable[[bytearray], bytearray]) -> None:
        """Change the stored bytes in which `payload` is, without asking our code."""
        changed = self._in_redis(payload, how) if self.server else self._in_files(payload, how)
        assert changed == 1, f"{changed} places have these bytes"

    def _in_redis(self, payload: bytes, how: Callable[[bytearray], bytearray]) -> int:
        assert self.server is not None
        changed = 0
        with redis.Redis(self.server.host, self.server.port) as raw:
            for key in raw.scan_iter(count=1000):
                found = raw.get(key)
                if isinstance(found, bytes) and payload in found:
                    raw.set(key, bytes(how(bytearray(found))))
                    changed += 1
        return changed

    def _in_files(self, payload: bytes, how: Callable[[bytearray], bytearray]) -> int:
        name = self.url.removeprefix("shm://").partition("?")[0]
        changed = 0
        for folder in Path("/dev/shm").glob(f"holdfast-*/{name}"):
            for path in folder.iterdir():
                found = bytearray(path.read_bytes())
                at = found.find(payload)
                if at >= 0:
                    part = how(found[at : at + len(payload)])
                    with path.open("r+b") as file:
                        file.seek(at)
                        file.write(part)
                    changed += 1
        return changed


def flip(payload: bytes, data: bytearray) -> bytearray:
    """One bit of the payload is another one."""
    data[data.find(payload) + len(payload) // 2] ^= 0x10
    return data


def flipped(payload: bytes) -> Callable[[bytearray], bytearray]:
    """What `Place.change` does to make one bit another one."""
    return functools.partial(flip, payload)


@contextmanager
def place(kind: str, folder: Path, *, budget: str = "256M") -> Iterator[Place]:
    """A store of its own, gone afterwards."""
    name = f"test-{uuid.uuid4().hex}"
    if kind == "shm":
        yield Place(f"shm://{name}?segment=8M&budget={budget}")
        shm.remove(name)
        return
    with RedisServer(folder) as server:
        yield Place(f"{server.url}?prefix={name}:&timeout=1", server)


@contextmanager
def running(url: str, **more: Any) -> Iterator[Any]:
    """A TransferQueue with its controller; nothing of it is left in the store afterwards."""
    controller = more.pop("controller", {})
    section = {"url": url, **QUICK, **more}
    conf = {"backend": {"storage_backend": "Holdfast", "Holdfast": section}}
    made = OmegaConf.create({**conf, "controller": controller}, flags={"allow_objects": True})
    try:
        yield tq.init(made)
    finally:
        tq.close()


@contextmanager
def simple() -> Iterator[Any]:
    """A TransferQueue with its own storage."""
    section = {"storage_backend": "SimpleStorage", "SimpleStorage": {"num_data_storage_units": 2}}
    try:
        yield tq.init(OmegaConf.create({"backend": section}))
    finally:
        tq.close()


def fresh(what: str) -> str:
    """The name of a partition that no other test uses."""
    return f"{what}-{uuid.uuid4().hex[:8]}"


def rows(*numbers: float, width: int = 2) -> Any:
    """A batch with the field `x`: a row of each number."""
    column = torch.tensor([[float(number)] * width for number in numbers])
    return TensorDict({"x": column}, batch_size=len(numbers))


def column(data: Any, field: str = "x") -> list[Any]:
    """A field of a batch, row by row."""
    found = data[field]
    return list(found.unbind()) if isinstance(found, torch.Tensor) else list(found)


def numbers(data: Any) -> list[float]:
    """What `rows` was made of."""
    return [float(row[0]) for row in column(data)]


def reasons(error: BatchFailed) -> dict[str, str]:
    """What happened to which of TransferQueue's keys (INDEX@FIELD)."""
    return {_own_key(key): transfer.status(why) for key, why in error.failures.items()}


def _own_key(name: str) -> str:
    parts: Sequence[str] = name.split("/")
    return parts[1] if len(parts) == 3 else name
