"""Weights: a trainer publishes, consumers load, a sweep deletes; the disk loses power.

n0 publishes, n1 sweeps, n2 loads every version in turn, n3 loads the newest, n4 loads the
newest through paths (as vLLM does). Any of them may be killed, hang for a minute, run twice.
Promise 6 as invariants:

1. a version in the ledger is on the disk, whole, byte for byte, at every moment;
2. a folder that bears the marker is whole, also for readers that know no ledger;
3. a version is given up only when no living consumer pins it, serves it or still needs it,
   and never one of the last k, nor what the fleet's target names;
4. numbers only grow and are never used again; only the newest epoch publishes;
5. a publish that was reported is there; nothing else than what was published is read,
   whatever becomes of the reader's lease;
6. staged paths are there as long as the lease of the consumer is;
7. what a consumer has acknowledged stands in the ledger from when it was told so, as long as
   its lease lives and it acknowledges nothing else.

At the end everything is published and loaded, and nothing is left lying about.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from holdfast.errors import Corrupt, Gone, HoldfastError, LeaseLost, Mistake, UnknownOutcome
from holdfast.ledger import Batch, Compare, Entry, Runtime
from holdfast.ledger.records import decode
from holdfast.retry import AGAIN, insist
from holdfast.sim.files import SimInode
from holdfast.sim.protocol import Protocol, Violation
from holdfast.sim.times import TIMES
from holdfast.sim.world import Node
from holdfast.weights.book import Book
from holdfast.weights.channel import Channel
from holdfast.weights.ledger_book import LedgerBook
from holdfast.weights.manifest import MANIFEST, STABLE, Manifest, digest
from holdfast.weights.manifest import decode as decode_manifest
from holdfast.weights.pin import Pin
from holdfast.weights.policy import Retention
from holdfast.weights.publisher import Publisher
from holdfast.weights.records import Consumer, Keys, Target, Version, Writer
from holdfast.weights.subscriber import Subscriber
from holdfast.weights.sweep import Sweeper

__all__ = ["WeightsProtocol"]

ROOT, CHANNEL = "/w", "policy"
LAST = 4
KEEP = 2
KEYS = Keys("default", CHANNEL)
BASE = f"{ROOT}/{CHANNEL}"


class WeightsProtocol(Protocol):
    """The sound protocol, with the parts that it is given."""

    disk = True
    steps = 1500
    # Only consumers hold leases, and they write nothing: they link and read.
    never = frozenset({("expire", "disk.write"), ("expire", "disk.sync")})
    retention = Retention(keep_last=KEEP)

    def __init__(
        self,
        book: Callable[..., LedgerBook] = LedgerBook,
        publisher: type[Publisher] = Publisher,
        subscriber: type[Subscriber] = Subscriber,
        sweeper: type[Sweeper] = Sweeper,
    ) -> None:
        self.book = book
        self._publisher = publisher
        self._subscriber = subscriber
        self._sweeper = sweeper
        self._head = -1
        self._live: dict[int, dict[str, SimInode]] = {}
        self._tensors: dict[int, dict[str, bytes]] = {}
        self._records: dict[int, Version] = {}
        self._marked: dict[int, tuple[int, ...]] = {}
        self._done: set[str] = set()
        self._looked = -1
        self._acknowledged: dict[Subscriber, set[int]] = {}

    # ---- the processes -------------------------------------------------------

    async def run(self, runtime: Node, name: str) -> None:
        """One process, by its name."""
        channel = _Channel(self, runtime)
        if name == "n0":
            await insist(runtime, lambda: self._train(channel))
        elif name == "n1":
            await self._sweep(channel)
        else:
            await self._consume(channel, name)
        self._done.add(name)

    async def _train(self, channel: "_Channel") -> None:
        runtime, luck = channel.runtime, channel.runtime.random
        publisher = self._publisher("", None, "", self.retention, shard_bytes=64, at=channel)
        publisher._sweeper = self._sweeper(channel, publisher._book, self.retention)
        await publisher.open()
        while self._head < LAST:
            step = await self._next(publisher)
            # A trainer that replays makes the same weights again, or not.
            other = 0 if luck.random() < 0.5 else luck.getrandbits(32)
            # Published before with other contents, or nobody knows: go on with the next.
            with contextlib.suppress(Mistake, UnknownOutcome):
                done = await publisher.publish(step, _weights(step, other))
                self._must_be_known(done.version, done.content)
            await runtime.sleep(luck.random() * 4)

    async def _next(self, publisher: Publisher) -> int:
        """The next number; now and then one that was published before."""
        following = await publisher.next_version()
        again = following and publisher._channel.runtime.random.random() < 0.2
        return following - 1 if again else following

    def _must_be_known(self, version: int, content: str) -> None:
        known = self._records.get(version)
        if known is None or known.content != content:
            raise Violation(f"version {version} was reported as published, and is not")

    async def _sweep(self, channel: "_Channel") -> None:
        book = channel.book("sweeper")
        sweeper = self._sweeper(channel, book, self.retention)
        await channel.make()
        while not self._all_is_done():
            with contextlib.suppress(TimeoutError, *AGAIN):
                async with asyncio.timeout(20), contextlib.aclosing(book.changes()) as changes:
                    async for _ in changes:
                        await sweeper.sweep()
                        await channel.runtime.sleep(1 + channel.runtime.random.random() * 4)
                        if self._all_is_done():
                            return

    def _all_is_done(self) -> bool:
        return self._done >= {"n0", "n2", "n3", "n4"} and self._is_clean()

    def _is_clean(self) -> bool:
        hidden = f"{BASE}/.holdfast"
        below = [self.files.names(f"{hidden}/{part}") for part in ("drafts", "trash", "staging")]
        folders = [name for name in self.files.names(BASE) if name.startswith("step_")]
        return not any(below) and len(folders) == len(self._live)

    async def _consume(self, channel: "_Channel", name: str) -> None:
        needs = "every" if name == "n2" else "latest"
        read = self._read_paths if name == "n4" else self._read
        given: Any = {"needs": needs, "lease_s": TIMES.consumer_lease_s, "at": channel}
        subscriber = self._subscriber("", None, "", name, **given)
        last: int | None = None
        while last is None or last < LAST:
            with contextlib.suppress(LeaseLost, *AGAIN):
                async with subscriber:
                    try:
                        while last is None or last < LAST:
                            last = await self._load(channel.runtime, subscriber, last, read)
                    finally:
                        self._acknowledged.pop(subscriber, None)

    async def _load(
        self,
        runtime: Runtime,
        subscriber: Subscriber,
        last: int | None,
        read: "Callable[[Runtime, Pin], Awaitable[None]]",
    ) -> int | None:
        """Load one version; returns the last one that was loaded."""
        if runtime.random.random() < 0.6:
            await subscriber.wait_newer(last)
        version = None
        if runtime.random.random() < 0.6:  # any that is there: it may be given up just now
            there = await subscriber._book.view()
            version = runtime.random.choice(sorted(there.versions) or [0])
        try:
            async with subscriber.pin(version) as pin:
                await read(runtime, pin)
                await self._acknowledge(subscriber, pin.number)
                await runtime.sleep(runtime.random.random() * 2)
                return max(pin.number, -1 if last is None else last)
        except Corrupt as error:
            raise Violation(f"{subscriber.name} was given damaged weights: {error}") from error
        except (Gone, Mistake):
            return last  # it went before we pinned it: the next one does

    async def _acknowledge(self, subscriber: Subscriber, number: int) -> None:
        """Tell it; while that goes on, what was told before may stand there as well."""
        if subscriber in self._acknowledged:
            self._acknowledged[subscriber].add(number)
        await subscriber.acknowledge(number)
        self._acknowledged[subscriber] = {number}

    def _recorded(self, seat: str) -> Consumer | None:
        """What the ledger says of a consumer; nothing when its lease has ended."""
        name, _, lease = seat.rpartition("-")
        return self.record_at(KEYS.consumer(name, int(lease)), Consumer)

    def _must_be_acknowledged(self) -> None:
        for subscriber, told in self._acknowledged.items():
            record = self._recorded(subscriber.seat_id)
            if record is not None and record.acknowledged not in told:  # it goes with its lease
                raise Violation(
                    f"{record.name} was told that it has acknowledged {sorted(told)}; the ledger "
                    f"says {record.acknowledged}"
                )

    async def _read(self, runtime: Runtime, pin: Pin) -> None:
        for name in pin.names:
            self._compare(pin.number, name, bytes(pin.raw(name)))
            if runtime.random.random() < 0.3:
                await runtime.sleep(runtime.random.random() * 8)
                self._must_be_held(pin)

    async def _read_paths(self, runtime: Runtime, pin: Pin) -> None:
        path = await pin.stage()
        lease = int(pin._seat.id.rpartition("-")[2])
        await runtime.sleep(runtime.random.random() * 8)
        self._must_be_held(pin)
        assert isinstance(runtime, Node)
        for name in pin.manifest.files:
            try:
                async with await runtime.disk.folder(path) as folder:
                    raw = await folder.read(name.name, 1 << 20)
            except FileNotFoundError:
                if lease in self.truth.leases():
                    raise Violation(f"{path} went while its lease {lease} lives") from None
                raise LeaseLost("our staging folder is gone") from None
            if digest(raw) != name.hash:
                raise Violation(f"{path}/{name.name} has other bytes than were published")

    def _must_be_held(self, pin: Pin) -> None:
        """While its lease lives, a pin is in the ledger."""
        name, _, lease = pin._seat.id.rpartition("-")
        if int(lease) in self.truth.leases():
            record = self._recorded(pin._seat.id)
            if record is None or pin.number not in record.pins:
                raise Violation(f"{name} reads version {pin.number}, and its pin was lost")

    def _compare(self, version: int, name: str, found: bytes) -> None:
        if self._tensors.get(version, {}).get(name) != found:
            raise Violation(f"version {version}: {name} was read with other bytes")

    # ---- the invariants ------------------------------------------------------

    def observe(self, batch: Batch) -> None:
        """Judge what one transaction changed."""
        for event in batch.events:
            if event.key.startswith(KEYS.consumers):
                if event.entry is not None and event.entry.version == 1:
                    self._see_joined(decode(Consumer, event.entry))
            elif event.key.startswith(KEYS.versions):
                number = int(event.key.removeprefix(KEYS.versions))
                if event.entry is None:
                    self._see_swept(number)
                elif number in self._live:
                    if decode(Version, event.entry) != self._records[number]:
                        raise Violation(f"the record of version {number} was changed")
                else:
                    self._see_published(number, decode(Version, event.entry))

    def _see_joined(self, consumer: Consumer) -> None:
        gone = [one for one in self._records if one >= consumer.floor and one not in self._live]
        if consumer.needs == "every" and gone:
            raise Violation(f"{consumer.name} joined to load {gone}, which were given up before")

    def _see_published(self, number: int, record: Version) -> None:
        if number in self._records:
            raise Violation(f"version {number} was published a second time")
        if number <= self._head:
            raise Violation(f"version {number} was published after {self._head}")
        writer = self.record_at(KEYS.writer, Writer)
        if writer is None or writer.epoch != record.epoch:
            raise Violation(
                f"version {number} was published by epoch {record.epoch}, not the last"
            )
        folder = self._folder(number)
        raw = folder.get(MANIFEST)
        if STABLE not in folder or raw is None or digest(raw.data) != record.manifest:
            raise Violation(f"version {number} was recorded before it was there")
        manifest = self._whole(folder, f"version {number}")
        self._head = number
        self._records[number] = record
        self._live[number] = folder
        self._tensors[number] = _tensors(manifest, folder)

    def _see_swept(self, number: int) -> None:
        for entry in self._entries(KEYS.consumers):
            consumer = decode(Consumer, entry)
            if number in consumer.pins:
                raise Violation(f"version {number} was given up while {consumer.name} pins it")
            if number == consumer.acknowledged:
                raise Violation(f"version {number} was given up while {consumer.name} serves it")
            if consumer.needs == "every" and number >= consumer.floor:
                raise Violation(f"version {number} was given up; {consumer.name} needs it")
        newer = [one for one in self._live if one > number]
        if len(newer) < KEEP:
            raise Violation(f"version {number} was given up, one of the last {KEEP}")
        target = self.record_at(KEYS.target, Target)
        if target is not None and number in (*target.allowed, target.staging):
            raise Violation(f"version {number} was given up while the fleet uses it")
        del self._live[number]

    def check(self) -> None:
        """Look at the acknowledgements, and at the disk whenever it has changed."""
        self._must_be_acknowledged()
        if self.files.changes == self._looked:
            return
        self._looked = self.files.changes
        base = self._names(BASE)
        for number, files in self._live.items():
            folder = base.get(f"step_{number}")
            there = folder.names if folder is not None else None
            for name, inode in files.items():
                if there is None or there.get(name) is not inode:
                    raise Violation(f"version {number} is in the ledger without its {name}")
        for name, folder in base.items():
            if name.startswith("step_"):
                self._check_marked(name, folder.names or {})

    def _check_marked(self, name: str, folder: Mapping[str, SimInode]) -> None:
        if STABLE not in folder:
            return
        seen = tuple(id(inode) for inode in folder.values())
        if self._marked.get(id(folder)) != seen:
            self._whole(folder, name)
            self._marked[id(folder)] = seen

    def _whole(self, folder: Mapping[str, SimInode], what: str) -> Manifest:
        """Raise unless a folder holds what its manifest says."""
        if MANIFEST not in folder:
            raise Violation(f"{what} bears the marker and has no manifest")
        try:
            manifest = decode_manifest(folder[MANIFEST].data, what)
        except HoldfastError as error:
            raise Violation(f"{what} bears the marker: {error}") from error
        for entry in manifest.files:
            inode = folder.get(entry.name)
            if inode is None or digest(inode.data) != entry.hash:
                raise Violation(f"{what} bears the marker and has no whole {entry.name}")
        return manifest

    def _names(self, path: str) -> dict[str, SimInode]:
        try:
            return self.files.folder(path).names or {}
        except OSError:
            return {}

    def _folder(self, number: int) -> dict[str, SimInode]:
        return dict(self._names(f"{BASE}/step_{number}"))

    def _entries(self, prefix: str) -> Sequence[Entry]:
        return self.truth.page(prefix, "", 1000, 0).entries

    def settled(self) -> bool:
        """Everybody has done what there was to do, and nothing is left."""
        return len(self._done) == self.nodes


class _Channel(Channel):
    """The channel as a simulated process reaches it, with the variant's book."""

    def __init__(self, protocol: WeightsProtocol, node: Node) -> None:
        super().__init__(ROOT, None, CHANNEL, runtime=node, disk=node.disk)
        self._protocol = protocol

    def book(self, name: str, guards: Sequence[Compare] = (), **_: bool) -> Book:
        """See `Channel.book`."""
        return self._protocol.book(self.runtime, self.keys, name, guards)


def _weights(step: int, other: int) -> dict[str, np.ndarray[Any, Any]]:
    """A version: a part that changes, and a part that never does."""
    return {
        "moving": np.array([step, other, step, other] * 4, dtype=np.int64),
        "frozen": np.arange(12, dtype=np.int64),
    }


def _tensors(manifest: Manifest, folder: Mapping[str, SimInode]) -> dict[str, bytes]:
    """The bytes of every tensor of a version that is whole."""
    from holdfast.weights.stfile import parse

    found: dict[str, bytes] = {}
    for file in {tensor.file for tensor in manifest.tensors}:
        data = folder[file].data
        for name, span in parse(memoryview(data), file).items():
            found[name] = data[span.begin : span.end]
    return found
