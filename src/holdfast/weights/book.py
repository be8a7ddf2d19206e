"""The book: who knows which versions exist, who reads them and who may publish.

Publisher, subscriber and sweep are written against this file. There are two books: the
ledger (`ledger_book.py`), and marker files for people who only have a shared file system
(`marker_book.py`), with the weaker promises that its docstring states.
"""

import abc
import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import TypeVar

import msgspec

from holdfast.errors import HoldfastError
from holdfast.ledger import Entry
from holdfast.weights.policy import Acknowledgement, Pin
from holdfast.weights.records import Consumer, Swept, Target, Told, Version

__all__ = ["DELETING", "Book", "Member", "Seat", "View", "at_least_every"]

T = TypeVar("T")

DELETING = "it is being deleted"
"""The mark of a version that was given up and whose files are still there."""


class Member(msgspec.Struct, frozen=True):
    """A consumer as the book knows it. `id` names its life; `until_s` ends it."""

    id: str
    record: Consumer
    until_s: float = float("inf")


class View(msgspec.Struct, frozen=True):
    """Everything that decisions need, at one moment."""

    head: int | None
    epoch: int
    versions: dict[int, Version]
    members: tuple[Member, ...]
    marks: dict[int, str]
    target: Target | None = None
    now_s: float = 0.0
    writer: str = ""
    """The name of who may publish, where that is known."""
    entries: dict[int, Entry] = {}
    """What the ledger held for each version, to be compared when it is given up."""

    def pins(self) -> list[Pin]:
        """What is being read, what a fleet is to load or may come back to, what is left to load.

        When the newest is damaged, the newest that is not is all there is for who comes now.
        """
        found = [
            Pin(member.record.name, version, member.until_s)
            for member in self.members
            for version in member.record.pins
        ]
        if self.target is not None:
            wanted = (*self.target.allowed, self.target.staging)
            found += [Pin("(fleet)", version) for version in wanted if version is not None]
        newest = self.newest()
        if newest is not None and newest.version < max(self.versions):
            found.append(Pin("(newest undamaged)", newest.version))
        return found

    def acknowledgements(self) -> list[Acknowledgement]:
        """What is being served, and what is still wanted."""
        return [
            Acknowledgement(
                member.record.name,
                member.record.acknowledged,
                member.record.needs,
                member.record.floor,
                member.until_s,
            )
            for member in self.members
        ]

    def is_known(self) -> bool:
        """Whether the book has ever heard of this channel."""
        return bool(self.epoch) or self.head is not None

    def newest(self) -> Version | None:
        """The newest version that may be loaded."""
        good = [number for number in self.versions if number not in self.marks]
        return self.versions[max(good)] if good else None


class Seat(abc.ABC):
    """One life of a consumer in the book. `join` it, `leave` it; when `lost`, take another."""

    id: str
    lost: asyncio.Event

    @abc.abstractmethod
    async def join(self) -> None:
        """Enter the book. From here on, what this consumer needs is kept."""

    @abc.abstractmethod
    async def leave(self) -> None:
        """Give up everything at once. Never raises because the book is away."""

    @abc.abstractmethod
    def believes(self) -> bool:
        """Whether this life should still count, by our own clock."""

    @abc.abstractmethod
    async def pin(self, number: int) -> Version:
        """Keep a version from being deleted. Raises `NotFound`, `Gone`, `Corrupt`, `LeaseLost`."""

    @abc.abstractmethod
    async def holds(self, number: int) -> bool:
        """Ask the book itself whether our pin still counts."""

    @abc.abstractmethod
    async def unpin(self, number: int) -> None:
        """Give up one pin."""

    @abc.abstractmethod
    async def report(self, told: Told) -> None:
        """Tell what is loaded aside, what is served, what went wrong, what it is held for."""


class Book(abc.ABC):
    """The authority over one channel."""

    epoch: int
    """Of our own right to publish; 0 before `open_writer`."""

    @abc.abstractmethod
    async def open_writer(self, *, again: bool = False) -> None:
        """Take over the right to publish; whoever had it is fenced off.

        `again`: only if it is still ours, for a new epoch. Else `Fenced`.
        """

    @abc.abstractmethod
    async def check_writer(self) -> None:
        """Raise `Fenced` when somebody else has taken over."""

    @abc.abstractmethod
    async def view(self) -> View:
        """Read everything at one moment."""

    @abc.abstractmethod
    async def lookup(self, number: int) -> Version | Swept | None:
        """What there is, or was, under a number."""

    @abc.abstractmethod
    async def commit(self, version: Version) -> None:
        """Make a version exist. Raises `Fenced`, and `Mistake` when a newer one exists."""

    @abc.abstractmethod
    async def forget(self, view: View, number: int) -> bool:
        """Record that a version is given up; False when somebody needs it since the view.

        Only after this may its files go.
        """

    def may_forget(self, view: View, number: int) -> bool:
        """Whether `forget` would even be tried, whoever needs the version."""
        return number in view.versions

    @abc.abstractmethod
    async def mark(self, number: int, reason: str) -> None:
        """Record that a version is damaged: nobody is to load it any more."""

    @abc.abstractmethod
    def changes(self) -> AsyncGenerator[View, None]:
        """Yield everything at the beginning and again whenever something may have changed."""

    @abc.abstractmethod
    def heads(self) -> AsyncGenerator[int | None, None]:
        """Yield the number of the newest version, and again whenever there may be a newer."""

    @abc.abstractmethod
    def seat(self, consumer: Consumer, lease_s: float) -> Seat:
        """A place for this consumer, who brings along what an earlier life has reported."""


async def at_least_every(
    pause_s: float, source: AsyncGenerator[T, None]
) -> AsyncGenerator[T | None, None]:
    """What the source yields, and None whenever it was silent for so long; nothing is missed."""
    async with contextlib.aclosing(source) as items:
        coming = asyncio.ensure_future(anext(items))
        try:
            while True:
                await asyncio.wait({coming}, timeout=pause_s)
                if coming.done():
                    found = coming.result()
                    coming = asyncio.ensure_future(anext(items))
                    yield found
                else:
                    yield None
        finally:
            coming.cancel()
            with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration, HoldfastError):
                await coming
