"""The trainer that only counts keeps its own promises: others' tests rely on them."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from holdfast import ledger as ledgers
from holdfast.jobs.fence import Incarnation
from holdfast.jobs.records import Keys
from holdfast.ledger import Ledger, Put

from .counting_trainer import Counting, Reply
from .counts import assert_exactly_once

RUN, ACCOUNT, JOB = "r", "acme", "one"


@dataclass
class House:
    """A ledger, and whoever serves the job."""

    ledger: Ledger

    async def incarnation(self, epoch: int, **how: float) -> Counting:
        key = Keys(RUN).epoch(ACCOUNT, JOB)
        await self.ledger.txn((), [Put(key, str(epoch).encode())])
        return Counting(self.ledger, Incarnation(RUN, ACCOUNT, JOB, epoch), **how)

    async def counts(self) -> dict[str, int]:
        done = await assert_exactly_once(self.ledger, RUN, ACCOUNT, JOB)
        return {model: len(ops) for model, ops in done.items()}


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    async with ledgers.open(f"sqlite:///{tmp_path}/run.db") as ledger:
        yield House(ledger)


async def post(trainer: Counting, name: str, **ask: Any) -> Reply:
    body = json.dumps(ask).encode()
    return await trainer.answer("POST", f"/api/v1/{name}", {}, body)


async def model(trainer: Counting) -> str:
    made = await post(trainer, "create_model", session_id="s", model_seq_id=0)
    return str(json.loads(made.body)["model_id"])


async def test_a_duplicate_does_nothing(house: House) -> None:
    """The same number, many times at once: one effect, the same promise."""
    trainer = await house.incarnation(1)
    name = await model(trainer)
    assert await model(trainer) == name
    same = [post(trainer, "optim_step", model_id=name, seq_id=1) for _ in range(20)]
    assert len({(reply.status, reply.body) for reply in await asyncio.gather(*same)}) == 1
    assert await house.counts() == {name: 1}


async def test_numbers_decide_the_order(house: House) -> None:
    """Operations that come in another order wait; one whose predecessor never comes is told."""
    trainer = await house.incarnation(1, order_s=0.3)
    name = await model(trainer)
    sent = [post(trainer, "optim_step", model_id=name, seq_id=seq) for seq in (3, 5, 2, 1)]
    replies = await asyncio.gather(*sent)
    assert [reply.status for reply in replies] == [200, 503, 200, 200]
    assert await house.counts() == {name: 3}


async def test_who_was_replaced_does_nothing(house: House) -> None:
    """An older incarnation that still gets requests is refused by the ledger."""
    old = await house.incarnation(1)
    name = await model(old)
    new = await house.incarnation(2)
    assert (await post(old, "optim_step", model_id=name, seq_id=1)).status == 421
    assert await house.counts() == {name: 0}
    assert (await post(new, "optim_step", model_id=name, seq_id=1)).status == 200
    assert await house.counts() == {name: 1}


async def test_a_successor_answers_old_futures(house: House) -> None:
    """The result comes from the record: whoever reads it gives the same."""
    old = await house.incarnation(1, delay_s=0.2, hold_s=0.05)
    name = await model(old)
    promise = json.loads((await post(old, "optim_step", model_id=name, seq_id=1)).body)
    assert (await post(old, "retrieve_future", **promise)).status == 408
    new = await house.incarnation(2)
    assert (await post(new, "optim_step", model_id=name, seq_id=1)).status == 200
    given = await post(new, "retrieve_future", **promise)
    assert json.loads(given.body)["metrics"] == {"step:max": 1.0}
    assert await house.counts() == {name: 1}


async def test_two_processes_of_one_incarnation_count_once(house: House, tmp_path: Path) -> None:
    """Even if a request reaches two of them at the same time: the ledger decides."""
    name = await model(await house.incarnation(1))

    async def serve() -> None:
        async with ledgers.open(f"sqlite:///{tmp_path}/run.db") as ledger:
            trainer = Counting(ledger, Incarnation(RUN, ACCOUNT, JOB, 1))
            for seq in range(1, 101):
                reply = await post(trainer, "optim_step", model_id=name, seq_id=seq)
                assert reply.status == 200, reply

    await asyncio.gather(*(asyncio.to_thread(asyncio.run, serve()) for _ in range(3)))
    assert await house.counts() == {name: 100}
