"""Training on a queue: every rank its shard, and after any kill the same steps again."""

import asyncio
import contextlib
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from holdfast import ledger as ledgers
from holdfast import transfer
from holdfast.errors import Gone, Mistake, NotFound, TimedOut
from holdfast.proc import Child, spawn
from holdfast.transfer import Store
from holdfast.transfer.queue import Item, open_queue
from holdfast.transfer.queue.dataset import QueueDataset

CHILD = Path(__file__).with_name("rank_child.py")
Opener = Callable[..., QueueDataset]


@pytest.fixture
def ledger_url(sqlite_url: str) -> str:
    return sqlite_url


def fill(store: Store | str, ledger_url: str, count: int) -> None:
    with open_queue(store, ledger_url, "q", {"train": ["x"]}) as queue:
        queue.put([Item(f"s{at:03d}", {"x": torch.full((4,), at)}) for at in range(count)])


def keys(step: int, batch: int, rank: int, world: int) -> list[str]:
    size = batch // world
    first = (step - 1) * batch + rank * size
    return [f"s{at:03d}" for at in range(first, first + size)]


@pytest.fixture
def store() -> Store:
    return transfer.connect("memory:")


@pytest.fixture
def dataset(store: Store, ledger_url: str) -> Iterator[Opener]:
    """Opens one more dataset of the same queue; all are closed at the end."""
    with contextlib.ExitStack() as stack:

        def opened(**how: Any) -> QueueDataset:
            one = QueueDataset(store, ledger_url, "q", "train", **{"batch_size": 2, **how})
            return stack.enter_context(contextlib.closing(one))

        yield opened


def test_each_rank_gets_its_part_of_the_same_steps(
    dataset: Opener, store: Store, ledger_url: str
) -> None:
    """And nothing is acknowledged before it is saved."""
    fill(store, ledger_url, 12)
    ranks = [dataset(batch_size=4, rank=rank, world_size=2) for rank in range(2)]
    loaders = [iter(DataLoader(one, batch_size=None)) for one in ranks]
    for step in (1, 2, 3):
        for rank, loader in enumerate(loaders):
            shard, wanted = next(loader), keys(step, 4, rank, 2)
            assert (shard.step, [one.key for one in shard.samples]) == (step, wanted)
            assert [int(one["x"][0]) for one in shard.values] == [int(key[1:]) for key in wanted]
        if step == 2:
            assert store.stat().keys == 12, "nothing is acknowledged before it is saved"
            for one in ranks:
                one.saved(2)
            assert store.stat().keys == 4
    assert ranks[1].state_dict() == {"step": 3}


def test_a_step_that_was_begun_and_not_saved_comes_again_as_it_was(
    dataset: Opener, store: Store, ledger_url: str
) -> None:
    """Also when more samples came meanwhile; and a step that was saved is acknowledged then."""
    fill(store, ledger_url, 4)
    first = dataset()
    steps = iter(first)
    given = [[one.key for one in next(steps).samples] for _ in range(2)]
    first.close()
    second = dataset(start=1)
    assert [one.key for one in next(iter(second)).samples] == given[1]
    assert store.stat().keys == 2, "step 1 is in the checkpoint and is acknowledged now"
    second.close()
    with pytest.raises(Gone, match="step 1 of 'train' is finished"):
        next(iter(dataset(rank=1, world_size=2)))
    with pytest.raises(Mistake, match="step 1 of 'train' cannot be begun: step 2 was"):
        next(iter(dataset()))
    with pytest.raises(TimedOut, match="no 2 samples"):
        next(iter(dataset(start=2, timeout_s=0.2)))


def test_mistakes_are_told(dataset: Opener, store: Store, ledger_url: str) -> None:
    """Before anything is claimed."""
    with pytest.raises(Mistake, match="cannot be divided"):
        dataset(batch_size=3, world_size=2)
    with pytest.raises(Mistake, match="not below"):
        dataset(batch_size=4, rank=2, world_size=2)
    with pytest.raises(NotFound, match="open it with its tasks"):
        next(iter(dataset()))
    fill(store, ledger_url, 2)
    one = dataset()
    with pytest.raises(Mistake, match="not given yet"):
        one.saved(1)
    with pytest.raises(Mistake, match="num_workers=0"):
        next(iter(DataLoader(one, batch_size=None, num_workers=1)))


@pytest.mark.long
def test_killed_ranks_repeat_what_was_lost_and_nothing_else(
    tmp_path: Path, ledger_url: str, shm_url: str
) -> None:
    """Two ranks, killed with -9 at seeded moments: every step has its samples, on every try."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    luck = random.Random(seed)
    store = f"{shm_url}?budget=64M&segment=4M"
    batch, world, steps = 4, 2, 6
    fill(store, ledger_url, batch * steps)
    how = {"folder": str(tmp_path), "store": store, "ledger": ledger_url}
    how |= {"batch": batch, "world": world, "steps": steps, "pause_s": 0.05}  # type: ignore[dict-item]
    for attempt in range(4):
        with contextlib.ExitStack() as stack:
            ranks = [
                stack.enter_context(
                    spawn(
                        [
                            *(sys.executable, str(CHILD)),
                            json.dumps({**how, "rank": rank, "attempt": attempt}),
                        ],
                        name=f"rank-{rank}-{attempt}",
                        log=tmp_path / f"out-{attempt}-{rank}",
                    )
                )
                for rank in range(world)
            ]
            if attempt < 3:
                _kill_after(ranks, tmp_path, attempt, luck.randint(1, 3))
            else:
                assert [rank.wait(60) for rank in ranks] == [0, 0]
    for rank in range(world):
        seen = {}
        for line in (tmp_path / f"log-{rank}").read_text().splitlines():
            told = json.loads(line)
            assert told["keys"] == keys(told["step"], batch, rank, world), seed
            assert told["sum"] == sum(4 * int(key[1:]) for key in told["keys"]), seed
            seen[told["step"]] = True
        assert sorted(seen) == list(range(1, steps + 1)), seed

    async def left() -> int:
        async with ledgers.open(ledger_url) as ledger:
            return len((await ledger.range("/runs/default/queue/q/steps/")).entries)

    assert asyncio.run(left()) == 0
    with transfer.connect(store) as opened:
        assert opened.stat().keys == 0


def _kill_after(ranks: list[Child], folder: Path, attempt: int, count: int) -> None:
    """Kill both when rank 0 has done so many steps in this life, or has ended."""

    def done() -> bool:
        log = folder / f"out-{attempt}-0"
        lines = log.read_text().count('"step"') if log.exists() else 0
        return lines >= count or not ranks[0].alive()

    ranks[0].wait_until(done, 60)
    for rank in ranks:
        rank.kill_group()
