"""Reads back what Holdfast's trainer did: the proof of "exactly once and in order"."""

from dataclasses import dataclass

from holdfast import ledger as ledgers
from holdfast.ledger.records import decode
from holdfast.trainer.records import Keys, Result, number_of


@dataclass(frozen=True)
class Applied:
    """One operation that took effect."""

    seq: int
    op: str
    epoch: int
    """Which holder of the seat carried it out."""


async def read(url: str, run: str, account: str, job: str) -> dict[str, list[Applied]]:
    """What took effect, per model, by number; each result was written once, and never changed."""
    keys = Keys(run, account, job)
    models: dict[str, list[Applied]] = {}
    async with ledgers.open(url) as ledger:
        for entry in (await ledger.range(keys.results)).entries:
            line, number = number_of(entry.key)
            assert entry.version == 1, f"{entry.key} was written {entry.version} times"
            result = decode(Result, entry)
            assert not result.failed, f"{line}:{number} failed"
            if number > 0 and "-s" not in line:
                models.setdefault(line, []).append(Applied(number, result.kind, result.term))
    for applied in models.values():
        applied.sort(key=lambda one: one.seq)
        terms = [one.epoch for one in applied]
        assert terms == sorted(terms), "a trainer that was replaced went on"
    return models
