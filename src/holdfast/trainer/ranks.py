"""How the ranks of one trainer speak to each other: rank 0 says what to do, all of them do it.

Every rank holds the same models and carries out the same operations in the same order. What
travels is bytes and float32 vectors; nothing is pickled. When a rank dies the others notice in
their next exchange, end too, and are started again together.
"""

import os
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

__all__ = ["Alone", "Ranks", "TorchRanks", "from_env"]


class Ranks(Protocol):
    """One rank's view of all."""

    rank: int
    size: int

    def share(self, data: bytes | None) -> bytes:
        """Rank 0's bytes, on every rank."""

    def spread(self, vector: torch.Tensor, owner: int) -> torch.Tensor:
        """The owner's vector, on every rank; the others give one of the same shape to fill."""

    def total(self, vector: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in whatever order is fast."""

    def close(self) -> None:
        """Speak no more."""


class Alone:
    """One rank."""

    rank = 0
    size = 1

    def share(self, data: bytes | None) -> bytes:
        """There is nobody else."""
        assert data is not None
        return data

    def spread(self, vector: torch.Tensor, owner: int) -> torch.Tensor:
        """There is nobody else."""
        assert owner == 0
        return vector

    def total(self, vector: torch.Tensor) -> torch.Tensor:
        """There is nobody else."""
        return vector

    def close(self) -> None:
        """Nothing is held."""


class TorchRanks:
    """The ranks of a torch process group."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def share(self, data: bytes | None) -> bytes:
        """Length first, then the bytes."""
        length = torch.tensor([len(data) if data is not None else 0], dtype=torch.int64)
        dist.broadcast(length, 0)
        if data is None:
            buffer = torch.empty(int(length), dtype=torch.uint8)
        else:
            buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.broadcast(buffer, 0)
        return buffer.numpy().tobytes()

    def spread(self, vector: torch.Tensor, owner: int) -> torch.Tensor:
        """A broadcast: bits arrive as they are."""
        dist.broadcast(vector, owner)
        return vector

    def total(self, vector: torch.Tensor) -> torch.Tensor:
        """An all-reduce."""
        dist.all_reduce(vector)
        return vector

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()


def from_env(idle_s: float = 7 * 86_400.0) -> Ranks:
    """The ranks that torchrun's environment speaks of; without it, one.

    Ranks wait for work as long as there is none, so an exchange has a very long limit: death
    is noticed by the closed connection, not by time.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return Alone()
    dist.init_process_group("gloo", timeout=timedelta(seconds=idle_s))
    return TorchRanks(dist.get_rank(), size)
