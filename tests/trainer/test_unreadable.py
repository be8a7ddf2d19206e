"""Records of a trainer that nobody can read: they cost their own line, and nothing else."""

from holdfast import ledger as ledgers
from holdfast.ledger import Put
from holdfast.trainer import ops
from trainer.living import KEYS, STEP, begin_model, living, step


async def test_a_bad_record_costs_its_own_line() -> None:
    """A successor reads all there is; the other models, and what else was asked, go on."""
    async with ledgers.open("memory:") as ledger:
        async with living(ledger) as there:
            core = there.core
            models = [await begin_model(core) for _ in range(4)]
            for model in models:
                await step(core, model, 1)
                await step(core, model, 2)
            await core.journal.flushed()
        record, op, result, good = models
        session = good.rpartition("-")[0]
        await ledger.txn(
            [],
            [
                Put(KEYS.model(record), b"?"),
                Put(KEYS.op(op, 1), b"?"),
                Put(KEYS.result(result, 2), b"?"),
                Put(KEYS.session(session), b"?"),
                Put(KEYS.sampler("odd"), b"?"),
                Put(KEYS.save("m", "weights", "odd"), b"?"),
                Put(KEYS.ops + "odd", b"?"),
                Put(KEYS.now, b"?"),
            ],
        )
        async with living(ledger, epoch=2) as there:
            core = there.core
            for lost in (record, op):
                outcome = await core.retrieve(await core.submit(lost, 3, STEP), 10)
                assert isinstance(outcome, ops.Failed)
                assert "is lost" in outcome.error
            told = await core.retrieve(f"{result}:2", 10)
            assert isinstance(told, ops.Failed)
            assert "cannot be read" in told.error
            for alive in (result, good):
                await step(core, alive, 3)
            assert core.journal.failure is None
