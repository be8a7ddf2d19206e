"""No answer to a caller's request ends the trainer: not gone weights, not damaged ones, no bug.

The trainer's core on a ledger in memory; where weights matter, in the real vault on the disk.
"""

import asyncio
import functools
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast import ledger as ledgers
from holdfast.errors import Corrupt, Gone, LeaseLost, NotFound, Unavailable
from holdfast.ledger.runtime import LiveRuntime
from holdfast.trainer import ops
from holdfast.trainer.journal import Journal
from holdfast.trainer.records import Keys
from holdfast.trainer.seams import Vault
from holdfast.trainer.vault import WeightsVault
from trainer.living import KEYS, STEP, Living, living

SAMPLE = ops.Sample(prompt=b"")
life = functools.partial(living, room_s=0)
"""A trainer that does not wait for a disk."""


def real_vault(folder: Path) -> Callable[[LiveRuntime, Journal], Vault]:
    def make(runtime: LiveRuntime, journal: Journal) -> Vault:
        return WeightsVault(folder, runtime.ledger, "r", lambda: journal.guards)

    return make


def blamed(outcome: ops.Outcome) -> str:
    """Who is to blame for a failure."""
    assert isinstance(outcome, ops.Failed), outcome
    return outcome.category


# ---- weights that are gone -----------------------------------------------------------


@pytest.mark.parametrize("folder", ["weights", "sampler_weights"])
@pytest.mark.parametrize("warm", [True, False], ids=["in memory", "on disk"])
@pytest.mark.parametrize("way", ["deleted", "expired", "overwritten"])
async def test_a_sample_of_gone_weights_is_the_callers_error(
    tmp_path: Path, folder: str, warm: bool, way: str
) -> None:
    """However they went, and whether they are still in memory; files and records are gone."""
    async with life(vault=real_vault(tmp_path)) as there:
        model, _ = await there.model()
        ttl = 3600 if way == "expired" else None
        first: ops.Op = ops.SaveForSampler(name="x", ttl_s=ttl)
        again: ops.Op = ops.SaveForSampler(name="x")
        if folder == "weights":
            first = ops.SaveWeights(name="x", ttl_s=ttl)
            again = ops.SaveWeights(name="x", overwrite=True)
        saved = await there.do(model, first)
        assert isinstance(saved, ops.Saved | ops.SamplerSaved)
        assert saved.path is not None
        sampler, other = await there.sampler(saved.path), await there.sampler(saved.path)
        if warm:
            assert isinstance(await there.do(sampler, SAMPLE), ops.Stepped)
        where, save = there.core.saves.find(saved.path)
        if way == "expired":
            await there.core.saves.change(where, expires_at=time.time() - 1)
        if way != "expired" and (way == "deleted" or folder == "sampler_weights"):
            await there.core.saves.delete(where)
        if way == "overwritten":
            assert not isinstance(await there.do(model, again), ops.Failed)
        for one in (sampler, other):
            outcome = await there.do(one, SAMPLE)
            assert blamed(outcome) == "user", outcome
        await there.upkeep.look()
        channel = f"{model}.{'w' if folder == 'weights' else 's'}.x"
        assert not (tmp_path / channel / f"step_{save.version}").exists()
        versions = (await there.ledger.range(f"/runs/r/weights/{channel}/live/versions/")).entries
        assert len(versions) == (way == "overwritten")
        if way != "overwritten":
            assert not (tmp_path / channel).exists()
            assert await there.ledger.get(KEYS.save(*where)) is None
            assert blamed(await there.do(model, ops.LoadWeights(path=saved.path))) == "user"
            with pytest.raises(NotFound):
                await there.sampler(saved.path)
        assert isinstance(await there.do(model, STEP), ops.Stepped)


async def test_a_deletion_is_ended_by_the_successor() -> None:
    """A trainer that dies between the record and the files leaves neither for ever."""
    async with ledgers.open("memory:") as ledger:
        async with life(ledger) as there:
            model, _ = await there.model()
            await there.do(model, ops.SaveWeights(name="x"))
            where = (model, "weights", "x")
            there.vault.trouble["drop"] = Unavailable("the disk is away")
            await there.core.saves.delete(where)
            await there.upkeep.look()
            assert await ledger.get(KEYS.save(*where)) is not None
            with pytest.raises(NotFound):
                there.core.saves.find(f"tinker://{model}/weights/x")
        async with life(ledger, epoch=2) as there:
            with pytest.raises(NotFound):
                there.core.saves.find(f"tinker://{model}/weights/x")
            await there.upkeep.look()
            assert await ledger.get(KEYS.save(*where)) is None
            assert not there.running.done()


async def test_what_was_said_of_saved_weights_is_known_to_the_successor(tmp_path: Path) -> None:
    """Published, and until when they are kept: once it was said, a kill changes nothing of it.
    What is over goes with files and record; the rest stays."""
    async with ledgers.open("memory:") as ledger:
        async with life(ledger, vault=real_vault(tmp_path)) as there:
            model, _ = await there.model()
            for name in ("kept", "over"):
                await there.do(model, ops.SaveWeights(name=name, ttl_s=3600))
            kept, over = ((model, "weights", name) for name in ("kept", "over"))
            await there.core.saves.change(kept, public=True)
            await there.core.saves.change(kept, expires_at=0.0)
            await there.core.saves.change(over, expires_at=time.time() - 1)
        async with life(ledger, vault=real_vault(tmp_path), epoch=2) as there:
            with pytest.raises(NotFound, match="time to live"):
                there.core.saves.at(over)
            await there.upkeep.look()
            save = there.core.saves.at(kept)
            assert (save.public, save.expires_at) == (True, 0.0)
            assert (tmp_path / f"{model}.w.kept").exists()
            assert not (tmp_path / f"{model}.w.over").exists()
            assert await ledger.get(KEYS.save(*over)) is None


async def test_published_weights_are_found_by_their_job_only(tmp_path: Path) -> None:
    """A mark in listings opens nothing: neither another account nor another job finds them."""
    async with life(vault=real_vault(tmp_path)) as there:
        model, _ = await there.model()
        await there.do(model, ops.SaveWeights(name="x"))
        await there.core.saves.change((model, "weights", "x"), public=True)
        for keys in (Keys("r", "y", "j"), Keys("r", "x", "k")):
            async with life(there.ledger, vault=real_vault(tmp_path), keys=keys) as other:
                await other.model()
                for path in (f"tinker://{model}/weights/x", "x"):
                    with pytest.raises(NotFound):
                        other.core.saves.find(path)
                    with pytest.raises(NotFound):
                        await other.sampler(f"tinker://{model}/weights/x")


async def test_a_name_that_is_used_again_while_it_is_deleted(tmp_path: Path) -> None:
    """The old weights go, the new ones stay, with their record and their files."""
    async with life(vault=real_vault(tmp_path)) as there:
        model, _ = await there.model()
        where = (model, "weights", "x")
        await there.do(model, ops.SaveWeights(name="x"))
        deleting = asyncio.create_task(there.core.saves.delete(where))
        saved = await there.do(model, ops.SaveWeights(name="x", overwrite=True))
        await deleting
        await there.upkeep.look()
        assert isinstance(saved, ops.Saved)
        assert isinstance(await there.do(model, ops.LoadWeights(path=saved.path)), ops.Loaded), (
            "the new weights cannot be loaded"
        )
        assert await there.ledger.get(KEYS.save(*where)) is not None


# ---- the boundary, per operation -------------------------------------------------------

LOAD_ERRORS = {
    "Corrupt": (Corrupt("step_4 is missing"), "server"),
    "Gone": (Gone("deleted"), "user"),
    "NotFound": (NotFound("never published"), "user"),
    "LeaseLost": (LeaseLost("slept"), "server"),
    "Unavailable": (Unavailable("the disk is away"), "server"),
}


async def refusals(there: Living, model: str, sampler: str, path: str) -> set[str]:
    """Who is blamed by everything that needs these weights; what began with them is no model."""
    sampled = await there.do(sampler, SAMPLE)
    loaded = await there.do(model, ops.LoadWeights(path=path))
    new, created = await there.model(load=path)
    assert isinstance(await there.do(new, STEP), ops.Failed)
    return {blamed(one) for one in (sampled, loaded, created)}


@pytest.mark.parametrize("name", LOAD_ERRORS)
async def test_weights_that_cannot_be_read_are_an_answer(name: str) -> None:
    """To a sample, to load_weights and to a model that begins with them; nothing is changed."""
    error, category = LOAD_ERRORS[name]
    async with life() as there:
        model, _ = await there.model()
        path = await there.save(model, "x")
        sampler = await there.sampler(path)
        there.vault.trouble["load"] = error
        assert await refusals(there, model, sampler, path) == {category}
        stepped = await there.do(model, STEP)
        assert isinstance(stepped, ops.Stepped)
        assert stepped.metrics["count"] == 2, "the base, and this step: nothing was loaded"
        del there.vault.trouble["load"]
        assert isinstance(await there.do(sampler, SAMPLE), ops.Stepped)
        assert isinstance(await there.do(model, ops.LoadWeights(path=path)), ops.Loaded)


async def test_damaged_weights_are_an_answer(tmp_path: Path) -> None:
    """One bit is not as it was saved: category server, to each operation that needs the weights.
    Nothing else suffers."""
    async with life(vault=real_vault(tmp_path)) as there:
        model, _ = await there.model()
        path = await there.save(model, "x")
        sampler = await there.sampler(path)
        (file,) = tmp_path.glob(f"{model}.w.x/step_*/*.safetensors")
        raw = file.read_bytes()
        file.chmod(0o600)
        file.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        assert await refusals(there, model, sampler, path) == {"server"}
        assert isinstance(await there.do(model, STEP), ops.Stepped)


READS: dict[str, tuple[ops.Op, list[str]]] = {
    "forward": (ops.ForwardBackward(data=[], loss="x", backward=False), ["apply"]),
    "save_weights": (ops.SaveWeights(name="x"), ["capture", "save"]),
    "save_weights_for_sampler": (ops.SaveForSampler(name="x"), ["export", "save"]),
    "unnamed": (ops.SaveForSampler(session_seq=1), ["export", "save"]),
    "publish_weights": (ops.Publish(version=1), ["export", "save"]),
    "sample": (SAMPLE, ["load", "sample"]),
}


@pytest.mark.parametrize("error", [RuntimeError("bug"), MemoryError(), Corrupt("bits")], ids=repr)
@pytest.mark.parametrize("name", READS)
async def test_a_bug_in_what_only_reads_is_an_answer(name: str, error: Exception) -> None:
    """Category server; the same operation works when the cause has gone."""
    op, calls = READS[name]
    async with life() as there:
        line, _ = await there.model()
        path = await there.save(line, "begin")
        if name == "sample":
            line = await there.sampler(path)
        for call in calls:
            for part in (there.compute, there.vault):
                part.trouble[call] = error
            assert blamed(await there.do(line, op)) == "server", call
            there.compute.trouble.clear()
            there.vault.trouble.clear()
        assert not isinstance(await there.do(line, op), ops.Failed)


async def test_ranks_that_are_out_of_step_end_together() -> None:
    """Then an answer would be a lie: the process ends, and a successor begins from the journal."""
    async with life() as there:
        model, _ = await there.model()
        there.compute.in_step = False
        there.compute.trouble["capture"] = RuntimeError("a rank has gone")
        await there.core.submit(model, 1, ops.SaveWeights(name="x"))
        with pytest.raises(RuntimeError, match="a rank has gone"):
            await there.running


# ---- what is lost ------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["its checkpoint", "its journal"])
async def test_one_model_is_lost_and_the_others_go_on(what: str) -> None:
    """Every operation of it fails with category server, also when the bytes come back: a model
    that has missed operations must not go on. Its results stay."""
    files: dict[tuple[int, int], bytes] = {}
    async with ledgers.open("memory:") as ledger:
        async with life(ledger, files=files, checkpoint_ops=2) as there:
            bad, _ = await there.model()
            for _ in range(2):
                assert isinstance(await there.do(bad, STEP), ops.Stepped)
            while there.core.lines[bad].line.trimmed < 1:
                await asyncio.sleep(0.01)
            config: dict[str, float | str] = {"x": "y" * 5000}  # large: its content is in a file
            large = ops.ForwardBackward(data=[], loss="x", config=config)
            assert isinstance(await there.do(bad, large), ops.Stepped)
            numbers = dict(there.numbers)
        taken = dict(files)
        assert taken
        if what == "its journal":
            files.clear()
        async with life(ledger, files=files, epoch=2) as there:
            there.numbers, there.session = numbers, bad.partition("-")[0]
            if what == "its checkpoint":
                there.vault.trouble["checkpoint"] = Corrupt("step_2 is damaged")
            assert blamed(await there.do(bad, STEP)) == "server"
            there.vault.trouble.clear()
            files.update(taken)
            assert blamed(await there.do(bad, ops.SaveWeights(name="x"))) == "server"
            assert isinstance(await there.hear(f"{bad}:1"), ops.Stepped)
            good, _ = await there.model()
            assert isinstance(await there.do(good, STEP), ops.Stepped)
        async with life(ledger, files=files, epoch=3) as there:
            there.numbers = numbers
            stepped = await there.do(bad, STEP)
            assert isinstance(stepped, ops.Stepped)
            assert stepped.metrics["count"] == 5, "the base, three operations, this one"
