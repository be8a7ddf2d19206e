"""Snapshots as versions of `holdfast.weights`: verified, fenced, swept.

A channel per purpose: `MODEL.state` for checkpoints, `MODEL.sampler` for unnamed sampler
weights, `MODEL.w.NAME` and `MODEL.s.NAME` for what was saved under a name. A version is the
number of the operation behind which it was taken, so a replay that keeps the same again finds
it there. Publishing compares the trainer's seat and epoch: one that was replaced keeps nothing.
"""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from holdfast.errors import Corrupt, Mistake
from holdfast.ledger import Ledger
from holdfast.ledger.types import Compare
from holdfast.trainer.records import check_name
from holdfast.trainer.seams import Kept, Snapshot
from holdfast.weights import Publisher, Retention, Subscriber, Version
from holdfast.weights.channel import Channel

__all__ = ["WeightsVault"]

FACTS = "holdfast_facts.json"


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

    async def newest(self, channel: str) -> int | None:
        """The newest version of a channel."""
        book = Channel(self._root, self._ledger, channel, run=self._run).book("trainer")
        return (await book.view()).head

    async def save(self, channel: str, version: int, snapshot: Snapshot, keep: int) -> Kept:
        """Publish a snapshot; what was published under this number stays as it is."""
        publisher = await self._publisher(channel, keep)
        book = Channel(self._root, self._ledger, channel, run=self._run).book("trainer")
        known = await book.lookup(version)
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

    async def drop(self, channel: str) -> None:
        """Remove a channel's files; its numbers stay used."""
        self._publishers.pop(channel, None)
        shutil.rmtree(self._root / check_name("channel", channel), ignore_errors=True)

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
