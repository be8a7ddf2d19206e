"""Reads back what the counting trainer did: the proof of "exactly once and in order"."""

import json
from dataclasses import dataclass

from holdfast import ledger as ledgers
from holdfast.ledger import Ledger

from .counting_trainer import Keys


@dataclass(frozen=True)
class Applied:
    """One operation that took effect."""

    seq: int
    op: str
    epoch: int
    revision: int
    """When, in the ledger's order."""


async def applied(ledger: Ledger, run: str, account: str, job: str) -> dict[str, list[Applied]]:
    """What took effect, per model, in the order in which it did.

    Raises AssertionError unless every operation was recorded once, never changed, and there
    are as many of them as were counted.
    """
    keys = Keys(run, account, job)
    found = await ledger.range(keys.root)
    models: dict[str, list[Applied]] = {}
    counts: dict[str, int] = {}
    for entry in found.entries:
        if entry.key.startswith(keys.models):
            name = entry.key.removeprefix(keys.models)
            counts[name] = int(entry.value)
            models.setdefault(name, [])
    for entry in found.entries:
        if entry.key.startswith(keys.ops):
            name = entry.key.removeprefix(keys.ops).rpartition("/")[0]
            record = json.loads(entry.value)
            assert entry.version == 1, f"{entry.key} was written {entry.version} times"
            models[name].append(
                Applied(record["seq"], record["op"], record["epoch"], entry.create_revision)
            )
    for name, ops in models.items():
        ops.sort(key=lambda op: op.revision)
        assert len({op.seq for op in ops}) == len(ops) == counts[name], (name, counts[name], ops)
    return models


async def assert_exactly_once(
    ledger: Ledger, run: str, account: str, job: str
) -> dict[str, list[Applied]]:
    """Every model has had the operations 1 to n, each once, in order."""
    models = await applied(ledger, run, account, job)
    for name, ops in models.items():
        seqs = [op.seq for op in ops]
        assert seqs == list(range(1, len(seqs) + 1)), f"{name}: {seqs}"
        epochs = [op.epoch for op in ops]
        assert epochs == sorted(epochs), f"{name}: an older incarnation acted later: {epochs}"
    return models


async def read(url: str, run: str, account: str, job: str) -> dict[str, list[Applied]]:
    """Do what `assert_exactly_once` does, with a ledger's URL."""
    async with ledgers.open(url) as ledger:
        return await assert_exactly_once(ledger, run, account, job)
