"""Schedules around the end of a line, step by step, on a ledger in memory."""

import asyncio

import pytest

from holdfast.errors import Gone, NotFound
from holdfast.trainer import ops
from holdfast.trainer.records import Now
from trainer.living import KEYS, STEP, begin_model, living


async def test_what_is_in_work_when_its_session_ends_has_one_result() -> None:
    """Nobody writes "too late" for an operation that is being carried out."""
    async with living() as there:
        core, compute = there.core, there.compute
        compute.may_end.clear()
        session = await core.create_session()
        model = await begin_model(core, session)
        await core.submit(model, 1, STEP)
        await core.submit(model, 2, STEP)
        await compute.begun.wait()
        await there.upkeep.end_session(session)
        await there.upkeep.look()
        await core.journal.flushed()
        assert await core.runtime.ledger.get(KEYS.result(model, 1)) is None
        told = asyncio.create_task(core.retrieve(f"{model}:2", 10))
        compute.may_end.set()
        assert isinstance(await core.retrieve(f"{model}:1", 10), ops.Stepped)
        while not told.done():
            await there.upkeep.look()
            await asyncio.sleep(0.01)
        outcome = await told
        assert isinstance(outcome, ops.Failed)
        assert "ended" in outcome.error


async def test_sampling_sessions_end_with_their_weights() -> None:
    """Whoever makes one per step has the newest; of the others nothing is left, and a late
    question hears that it is gone, not that it never was."""
    async with living(sampler_keep=1, result_s=0, max_samplers=3) as there:
        core = there.core
        session = await core.create_session()
        model = await begin_model(core, session)
        made = []
        for number in range(1, 6):
            op = ops.SaveForSampler(session_seq=number)
            saved = await core.retrieve(await core.submit(model, number, op), 10)
            assert isinstance(saved, ops.SamplerSaved)
            assert saved.sampling_session is not None
            made.append(saved.sampling_session)
            core.known.check_room_for_samplers()
            await core.retrieve(await core.submit(made[-1], 0, ops.Sample(prompt=b"")), 10)
            await there.upkeep.look()
        await there.upkeep.look()
        assert [name for name in core.lines if name != model] == made[-1:]
        for name in made[:-1]:
            with pytest.raises(Gone):
                core.find(name)
            assert await core.runtime.ledger.get(KEYS.sampler(name)) is None
            assert await core.runtime.ledger.get(KEYS.result(name, 0)) is None
        with pytest.raises(NotFound):
            core.find(f"{model}-p99")
        await there.upkeep.end_session(session)
        await there.upkeep.look()
        assert list(core.lines) == [model]
        with pytest.raises(Gone):
            core.find(made[-1])


@pytest.mark.parametrize("ordered", [True, False])
async def test_what_killed_three_trainers_fails(ordered: bool) -> None:
    """A step of a model, or a sample: its caller hears it, and the trainer goes on."""
    async with living() as there:
        core = there.core
        session = await core.create_session()
        model = await begin_model(core, session)
        line = model if ordered else await core.create_sampler(session, 0, "b", "")
        there.trainer.runner._suspect = Now(line=line, number=1, deaths=2)
        op: ops.Op = STEP if ordered else ops.Sample(prompt=b"")
        outcome = await core.retrieve(await core.submit(line, 1, op), 10)
        assert isinstance(outcome, ops.Failed)
        assert outcome.category == "server"
        assert isinstance(await core.retrieve(await core.submit(line, 2, op), 10), ops.Stepped)
        assert core.journal.failure is None
