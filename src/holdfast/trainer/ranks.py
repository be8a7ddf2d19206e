"""How the ranks of one trainer speak to each other: rank 0 says what to do, all of them do it.

Every rank has the same models, or its part of them, and carries out the same operations in the
same order. What travels is bytes and vectors of numbers; nothing is pickled. When a rank dies
the others notice in their next exchange, end too, and are started again together.
"""

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

# torch exports the store without saying so.
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from holdfast.errors import Mistake
from holdfast.rendezvous.address import is_loopback, listen

__all__ = ["Ranks", "TorchRanks", "agreed", "from_env"]

T = TypeVar("T")
_WORDS = 1024
"""Bytes of a mistake that ranks tell each other."""


class Ranks:
    """One rank's view of all. This one is alone: there is nobody else to speak to."""

    rank = 0
    size = 1

    def share(self, data: bytes | None) -> bytes:
        """Rank 0's bytes, on every rank."""
        assert data is not None
        return data

    def spread(self, vector: torch.Tensor, owner: int) -> torch.Tensor:
        """The owner's vector, on every rank; the others give one of the same shape to fill."""
        assert owner == 0
        return vector

    def total(self, vector: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in whatever order is fast."""
        return vector

    def collect(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's vector, by rank, on every rank; all of one shape."""
        return [vector]

    def close(self) -> None:
        """Speak no more."""


class TorchRanks(Ranks):
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

    def collect(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """An all-gather: bits arrive as they are."""
        found = [torch.empty_like(vector) for _ in range(self.size)]
        dist.all_gather(found, vector)
        return found

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()


def agreed(ranks: Ranks, work: Callable[[], T], undo: Callable[[T], None]) -> T:
    """Do what each rank does by itself: a mistake on one of them is the same one on all.

    Without this, one rank would go back for the next order while the others wait for it.
    """
    done: list[T] = []
    said = ""
    try:
        done.append(work())
    except Mistake as error:
        said = str(error) or type(error).__name__
    words = torch.zeros(_WORDS, dtype=torch.uint8)
    mine = torch.tensor(list(said.encode()[:_WORDS]), dtype=torch.uint8)
    words[: len(mine)] = mine
    for rank, one in enumerate(ranks.collect(words)):
        text = one.numpy().tobytes().rstrip(b"\0").decode(errors="ignore")
        if text:
            for made in done:
                undo(made)
            raise Mistake(f"{text} (on rank {rank})")
    return done[0]


def from_env(idle_s: float = 7 * 86_400.0, *, backend: str = "gloo") -> Ranks:
    """The ranks that torchrun's environment speaks of; without it, one.

    Ranks wait for work as long as there is none, so an exchange has a very long limit: death
    is noticed by the closed connection, not by time.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return Ranks()
    rank, timeout = int(os.environ["RANK"]), timedelta(seconds=idle_s)
    store = _store(rank, size, timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    return TorchRanks(rank, size)


def _store(rank: int, size: int, timeout: timedelta) -> TCPStore:
    """Where ranks find each other. Rank 0 serves it, unless torchrun's agent does.

    torch's own `env://` would listen on all interfaces, and gloo where this machine's name points.
    """
    name, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    address = str(socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0][4][0])
    if is_loopback(address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return TCPStore(
        address,
        port,
        size,
        is_master=serves,
        timeout=timeout,
        master_listen_fd=listen(address, port).detach() if serves else None,
    )
