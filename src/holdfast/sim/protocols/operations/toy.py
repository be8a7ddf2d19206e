"""A model that is nothing but the history of what was done to it, and a vault in the ledger.

Whatever is lost, done twice or done out of order shows in the history, and so in the digest
that every result carries.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence

import msgspec

from holdfast.errors import Corrupt, Fenced, Gone, Mistake, UnknownOutcome
from holdfast.ledger.types import Compare, Delete, Get, Put, absent
from holdfast.retry import insist
from holdfast.sim.world import Node
from holdfast.trainer import ops
from holdfast.trainer.records import Place
from holdfast.trainer.seams import Kept, Snapshot

__all__ = ["LOADED", "ToyCompute", "ToySegments", "ToyVault", "digest", "event"]

LOADED = "loaded"


def digest(history: Sequence[str]) -> float:
    """A number that stands for a history."""
    return float(int(hashlib.sha256("\n".join(history).encode()).hexdigest()[:12], 16))


def event(number: int, identity: str) -> str:
    """What an operation adds to a history."""
    return f"{number}:{identity[:12]}"


class ToySegments:
    """Files that outlive every process, shared by all of them."""

    def __init__(self, files: dict[tuple[int, int], bytes], term: int) -> None:
        self._files = files
        self._term = term
        self._count = 0

    def append(self, data: bytes) -> Place:
        """Every content is a segment of its own."""
        self._count += 1
        self._files[self._term, self._count] = data
        return Place(self._term, self._count, 0, len(data), "")

    def read(self, place: Place) -> bytes:
        """What was written there."""
        try:
            return self._files[place.term, place.segment]
        except KeyError:
            raise Corrupt(f"segment {place.segment} of term {place.term} is gone") from None

    def sweep(self, needed: Iterable[Place]) -> int:
        """Remove what nobody needs, of this term and of those before it."""
        keep = {(place.term, place.segment) for place in needed}
        old = [key for key in self._files if key[0] <= self._term and key not in keep]
        for key in old:
            del self._files[key]
        return len(old)


class ToyVault:
    """Snapshots as records of the ledger."""

    def __init__(self, node: Node, guards: Callable[[], Sequence[Compare]]) -> None:
        self._node = node
        self._guards = guards

    async def _versions(self, channel: str) -> list[int]:
        found = await self._node.ledger.range(f"/vault/{channel}/")
        return [int(entry.key.rpartition("/")[2]) for entry in found.entries]

    async def newest(self, channel: str) -> int | None:
        """The newest version."""
        return max(await insist(self._node, lambda: self._versions(channel)), default=None)

    async def save(self, channel: str, version: int, snapshot: Snapshot, keep: int) -> Kept:
        """Keep it, in one transaction with the removal of what is old."""
        await self._node.sleep(self._node.random.random() * 2)
        key = f"/vault/{channel}/{version:010}"
        value = msgspec.json.encode(snapshot.facts["history"])
        old = sorted(await self._versions(channel))
        drop = [one for one in old if one != version][: max(0, len(old) + 1 - keep)]
        guards = self._guards()
        try:
            txn = await self._node.ledger.txn(
                [*guards, absent(key)],
                [Put(key, value), *(Delete(f"/vault/{channel}/{one:010}") for one in drop)],
                [Get(key)],
            )
            there = txn.succeeded or txn.results[0] is not None
        except UnknownOutcome:
            there = await self._node.ledger.get(key) is not None
            if not there:
                raise
        if not there:
            raise Fenced("the vault does not know us any more")
        return Kept(version, "", len(value))

    async def load(self, channel: str, version: int) -> Snapshot:
        """What was kept."""
        entry = await self._node.ledger.get(f"/vault/{channel}/{version:010}")
        if entry is None:
            raise Gone(f"version {version} of {channel} is gone")
        return _snapshot(msgspec.json.decode(entry.value))

    async def drop(self, channel: str, version: int) -> None:
        """Nothing is dropped here."""


def _snapshot(history: Sequence[str]) -> Snapshot:
    return Snapshot(tensors={}, facts={"history": list(history)}, files={})


class ToyCompute:
    """Models of one process."""

    in_step = True

    def __init__(self, node: Node) -> None:
        self._node = node
        self._models: dict[str, list[str]] = {}
        self._samplers: dict[str, list[str]] = {}

    def check(self, base: str, op: ops.Op) -> None:
        """Anything goes."""

    async def create(self, model: str, base: str, lora: ops.Lora | None) -> None:  # noqa: ARG002
        """An empty history."""
        self._models[model] = [base]

    async def load(self, model: str, snapshot: Snapshot, *, optimizer: bool) -> None:  # noqa: ARG002
        """Another history, and that it was loaded."""
        self._models[model] = [*snapshot.facts["history"], LOADED]

    async def restore(
        self,
        model: str,
        base: str,  # noqa: ARG002
        lora: ops.Lora | None,  # noqa: ARG002
        snapshot: Snapshot,
    ) -> None:
        """The history that was captured."""
        self._models[model] = list(snapshot.facts["history"])

    async def apply(
        self, model: str, number: int, op: ops.ForwardBackward | ops.OptimStep
    ) -> ops.Outcome:
        """Add to the history; some operations are wrong, and add nothing."""
        await self._node.sleep(self._node.random.random())
        if isinstance(op, ops.ForwardBackward) and op.loss == "bad":
            raise Mistake("there is no such loss")
        history = self._models[model]
        if isinstance(op, ops.OptimStep) or op.backward:
            history.append(event(number, ops.identity(op)))
        # As on a GPU, the same twice is not the same to the last bit.
        noise = self._node.random.random()
        return ops.Stepped(metrics={"digest": digest(history), "noise": noise})

    async def capture(self, model: str) -> Snapshot:
        """The history so far."""
        return _snapshot(self._models[model])

    export = capture

    async def drop(self, model: str) -> None:
        """Forget it."""
        self._models.pop(model, None)

    def has_sampler(self, key: str) -> bool:
        """Whether it was opened."""
        return key in self._samplers

    async def open_sampler(
        self,
        key: str,
        base: str,
        lora: ops.Lora | None,  # noqa: ARG002
        snapshot: Snapshot | None,
    ) -> None:
        """A history that no longer changes."""
        self._samplers[key] = snapshot.facts["history"] if snapshot else [base]

    async def sample(self, key: str, *_: object) -> ops.Outcome:
        """The digest of the weights."""
        await self._node.sleep(self._node.random.random())
        return ops.Stepped(metrics={"digest": digest(self._samplers[key])})
