"""The seam to whatever starts trainers: a local process, or a cluster's way.

A `Launcher` starts one incarnation and says when it serves; the `Host` does everything else.
"""

import abc
from typing import Any

import msgspec

__all__ = ["Launcher", "Running", "Ticket"]


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be started."""

    run: str
    account: str
    job: str
    epoch: int
    spec: dict[str, Any] = {}
    secret: str = ""
    """For the trainer's environment (`fence.SECRET`), never for a command line or a log."""


class Running(abc.ABC):
    """One incarnation on its way, or at work."""

    @abc.abstractmethod
    async def serving(self) -> str:
        """Wait until it answers; return its address (host:port). Raises when it never will."""

    @abc.abstractmethod
    async def ended(self) -> tuple[bool, str]:
        """Wait until it has ended by itself: whether it succeeded, and what there is to say."""

    @abc.abstractmethod
    async def stop(self, grace_s: float) -> None:
        """End it, all of it: politely first, if `grace_s` is more than 0. Returns when it is."""


class Launcher(abc.ABC):
    """Starts trainers. One object per host."""

    offers: tuple[str, ...] = ()
    """The names of the trainers that it can start; jobs that ask for others are refused."""
    any_command: bool = True
    """Whether it starts whatever a job brings."""

    @abc.abstractmethod
    async def start(self, ticket: Ticket) -> Running:
        """Begin an incarnation. Raises `Mistake` when this spec can never be started."""
