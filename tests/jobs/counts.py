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


async def assert_exactly_once(
    ledger: Ledger, run: str, account: str, job: str
) -> dict[str, list[Applied]]:
    """What took effect, per model, in the order in which it did.

    Raises AssertionError unless every model has had the operations 1 to n, each recorded once,
    never changed, in order, and as many as were counted.
    """
    keys = Keys(run, account, job)
    found = (await ledger.range(keys.root)).entries
    counts = {
        entry.key.removeprefix(keys.models): int(entry.value)
        for entry in found
        if entry.key.startswith(keys.models)
    }
    models: dict[str, list[Applied]] = {name: [] for name in counts}
    for entry in sorted(found, key=lambda entry: entry.create_revision):
        if entry.key.startswith(keys.ops):
            name = entry.key.removeprefix(keys.ops).rpartition("/")[0]
            record = json.loads(entry.value)
            assert entry.version == 1, f"{entry.key} was written {entry.version} times"
            models[name].append(Applied(record["seq"], record["op"], record["epoch"]))
    for name, ops in models.items():
        assert [op.seq for op in ops] == list(range(1, counts[name] + 1)), (name, ops)
        epochs = [op.epoch for op in ops]
        assert epochs == sorted(epochs), f"{name}: an older incarnation acted later: {epochs}"
    return models


async def read(url: str, run: str, account: str, job: str) -> dict[str, list[Applied]]:
    """Do what `assert_exactly_once` does, with a ledger's URL."""
    async with ledgers.open(url) as ledger:
        return await assert_exactly_once(ledger, run, account, job)
