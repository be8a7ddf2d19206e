"""Snapshots as versions of `holdfast.weights`: verified, fenced, swept.

A channel per purpose: `MODEL.state` for checkpoints, `MODEL.sampler` for unnamed sampler
weights, `MODEL.w.NAME` and `MODEL.s.NAME` for what was saved under a name. A version is the
number of the operation behind which it was taken, so a replay that keeps the same again finds
it there. Publishing compares the trainer's seat and epoch: one that was replaced keeps nothing.

A version that is dropped is given up in the ledger first, so a late reader hears that it is gone;
only then do its files go. Keeping, reading and dropping take turns per channel.
"""

import asyncio
import shutil
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from holdfast.errors import Conflict, Corrupt, Mistake
from holdfast.ledger import Ledger
from holdfast.ledger.types import Compare
from holdfast.trainer.seams import Kept, Snapshot
from holdfast.weights import Publisher, Retention, Subscriber, Version
from holdfast.weights.book import Book
from holdfast.weights.channel import Channel
from holdfast.weights.layout import check_name, version_folder

__all__ = ["WeightsVault"]

FACTS = "holdfast_facts.json"
_ATTEMPTS = 10


class WeightsVault:
    """Keeps snapshots below one folder."""

    def __init__(
        self,
        root: Path,
        ledger: Ledger,
        run: str,
        guards: Callable[[], Sequence[Compare]],
    ) -> None:
        self._root = root
        self._ledger = ledger
        self._run = run
        self._guards = guards
        self._publishers: dict[str, Publisher] = {}
        self._turns: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    def _book(self, channel: str) -> Book:
        return Channel(self._root, self._ledger, channel, run=self._run).book("trainer")

    def _turn(self, channel: str) -> asyncio.Lock:
        return self._turns.setdefault(channel, asyncio.Lock())

    async def newest(self, channel: str) -> int | None:
        """The newest version of a channel."""
        return (await self._book(channel).view()).head

    async def save(self, channel: str, version: int, snapshot: Snapshot, keep: int) -> Kept:
        """Publish a snapshot; what was published under this number stays as it is."""
        async with self._turn(channel):
            return await self._save(channel, version, snapshot, keep)

    async def _save(self, channel: str, version: int, snapshot: Snapshot, keep: int) -> Kept:
        publisher = await self._publisher(channel, keep)
        known = await self._book(channel).lookup(version)
        if known is None:
            files = {**snapshot.files, FACTS: msgspec.json.encode(snapshot.facts)}
            adapter = snapshot.facts.get("kind") == "adapter"
            known = await publisher.publish(
                version, snapshot.tensors, files=files, kind="adapter" if adapter else "model"
            )
        size = known.bytes if isinstance(known, Version) else 0
        return Kept(version, known.content, size)

    async def load(self, channel: str, version: int) -> Snapshot:
        """Read a version, every byte of it verified."""
        async with (
            self._turn(channel),
            Subscriber(
                self._root, self._ledger, channel, "trainer", needs="latest", run=self._run
            ) as subscriber,
            subscriber.pin(version) as pin,
        ):
            tensors = {name: tensor.clone() for name, tensor in pin.state_dict().items()}
            try:
                facts = msgspec.json.decode(pin.carried(FACTS), type=dict)
            except (Mistake, msgspec.DecodeError) as error:
                raise Corrupt(f"version {version} of {channel} says nothing of itself") from error
        return Snapshot(tensors, facts, {})

    async def drop(self, channel: str, version: int) -> None:
        """Give up this version and older ones, then remove files; their numbers stay used."""
        folder = self._root / check_name("channel", channel)
        async with self._turn(channel):
            book = self._book(channel)
            for _ in range(_ATTEMPTS):
                view = await book.view()
                old = [number for number in view.versions if number <= version]
                if not old:
                    break
                for number in old:
                    await book.forget(view, number)
            else:
                raise Conflict(f"version {version} of {channel} is still being read")
            if view.versions:  # newer weights under the same name
                folder = folder / version_folder(version)
            else:
                self._publishers.pop(channel, None)
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def _publisher(self, channel: str, keep: int) -> Publisher:
        if channel not in self._publishers:
            publisher = Publisher(
                self._root,
                self._ledger,
                channel,
                Retention(keep_last=keep),
                run=self._run,
                name="trainer",
                guards=self._guards(),
            )
            await publisher.open()
            self._publishers[channel] = publisher
        return self._publishers[channel]
