"""More models than fit into memory: the others wait on disk, and come back bit for bit."""

import asyncio
from pathlib import Path

import pytest

from holdfast.errors import NoRoom, Unavailable
from holdfast.trainer import ops
from holdfast.trainer.line import Line
from holdfast.trainer.records import Content, Entry, Model
from holdfast.trainer.shelf import choose
from holdfast.trainer.state import State
from patience import until
from trainer.house import JOB, house
from trainer.living import STEP, begin_model, living, step


def held(name: str, used: int, *, session: str = "loud", asked: bool = False) -> State:
    line = Line()
    if asked:
        line.entries[0] = Entry(kind="k", identity="", term=1, at=0.0, content=Content())
    return State(name, line, model=Model(session=session, base="b"), used=used, loaded=True)


def test_which_one_is_put_aside() -> None:
    """Of silent sessions first, then the longest unused; in a queue, the one that comes last."""
    models = [held("a", 1, asked=True), held("b", 3), held("c", 2)]
    assert choose(models, frozenset()).name == "c"
    assert choose([*models, held("d", 9, session="quiet")], frozenset({"quiet"})).name == "d"
    assert choose([held("a", 1, asked=True), held("b", 2, asked=True)], frozenset()).name == "b"


async def test_a_model_is_refused_only_while_all_are_in_work() -> None:
    """The caller hears 503 and when to come again; as soon as one rests there is room."""
    async with living(max_models=2) as there:
        core, compute = there.core, there.compute
        compute.may_end.clear()
        models = [await begin_model(core) for _ in range(2)]
        for model in models:
            await core.submit(model, 1, STEP)
        session = await core.create_session()
        with pytest.raises(Unavailable, match="max_models") as refused:
            await core.create_model(session, 0, ops.CreateModel(session="", base="b"))
        assert refused.value.retry_after_s
        compute.may_end.set()
        for model in models:
            assert isinstance(await core.retrieve(f"{model}:1", 10), ops.Stepped)
        await begin_model(core, session)
        for model in models:
            await step(core, model, 2)


async def test_models_on_disk_have_a_bound_too() -> None:
    """The message says which, and what to do; what was unloaded no longer counts."""
    async with living(max_models=1, max_kept_models=3) as there:
        core = there.core
        models = [await begin_model(core) for _ in range(3)]
        session = await core.create_session()
        with pytest.raises(Unavailable, match=r"3 models.*unload"):
            await core.create_model(session, 0, ops.CreateModel(session="", base="b"))
        await core.retrieve(await core.unload(models[0], ops.Unload()), 10)
        await begin_model(core, session)
        assert core.known.census() == {"in_memory": 1, "put_aside": 2}


async def test_without_room_on_disk_what_needs_room_fails_and_nothing_is_lost() -> None:
    """No model is dropped that was not kept; when there is room again, models take turns."""
    async with living(max_models=1, room_s=0) as there:
        core = there.core
        first = await begin_model(core)
        await step(core, first, 1)
        there.vault.trouble["save"] = NoRoom("the disk is full")
        _, outcome = await there.model()
        assert isinstance(outcome, ops.Failed)
        assert (outcome.category, "the disk is full" in outcome.error) == ("server", True)
        assert [one.name for one in core.known.in_memory()] == [first]
        await step(core, first, 2)
        there.vault.trouble.clear()
        second = await begin_model(core)
        await step(core, first, 3)
        await step(core, second, 1)
        assert core.journal.failure is None


async def test_silent_sessions_make_room_and_lose_nothing() -> None:
    """Their models are put aside though nothing needs the room; the next call brings them back."""
    async with living(silent_s=60) as there:
        core = there.core
        quiet, loud = await begin_model(core), await begin_model(core)
        before = await step(core, quiet, 1)
        core.known.seen[quiet.rpartition("-")[0]] -= 61
        await there.upkeep.look()
        async with asyncio.timeout(10):
            while len(core.known.in_memory()) != 1:
                await asyncio.sleep(0)
        assert [one.name for one in core.known.in_memory()] == [loud]
        assert not core.find(quiet).ended
        outcome = await core.retrieve(f"{quiet}:1", 10)
        assert isinstance(outcome, ops.Stepped)
        assert outcome.metrics["digest"] == before
        await step(core, quiet, 2)
        assert len(core.known.in_memory()) == 2


TWINS = """
def trained(seed, others=()):
    client = service.create_lora_training_client(base_model=BASE, rank=4, seed=seed)
    for step in range(2):
        client.forward_backward([datum(f"{step} wind")], "cross_entropy").result()
        for other in others:  # gradients wait on disk while others compute
            other.forward_backward([datum("rain")], "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    client.save_state("end").result()
    return client
calm = trained(7)
shaken = trained(7, [calm])
say(models=[calm.model_id, shaken.model_id])
service.close("success").result()
"""


def test_a_model_that_was_put_aside_is_its_calm_twin(tmp_path: Path) -> None:
    """To the last bit, gradients too. When models end, what was put aside goes from the disk."""
    with house(tmp_path, policy={"max_models": 1, "upkeep_s": 0.2}) as there:
        models = there.run(TWINS)[0]["models"]
        calm, shaken = (asyncio.run(there.content(f"{one}.w.end")) for one in models)
        assert shaken == calm
        log = "".join(one.read_text() for one in there.folder.rglob("events/*.jsonl"))
        assert log.count('"type":"trainer.put_aside"') >= 4
        home = there.folder / "trainers" / "local" / JOB / "weights"
        until(lambda: not list(home.glob("*.state/step_*")), "checkpoints are removed")
        assert len(list(home.glob("*.w.end/step_*"))) == 2, "saves stay"
        assert there.models() == {"in_memory": 0, "put_aside": 0}


MANY = """
import logging
logging.disable(logging.CRITICAL)
clients = []
for seed in range(200):
    client = service.create_lora_training_client(base_model=BASE, rank=256, seed=seed)
    client.forward_backward([datum("wind")], "cross_entropy").result()
    client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    clients.append(client)
    if seed in (0, 19, 199):
        say(made=seed + 1)
        time.sleep(1)
"""


@pytest.mark.long
@pytest.mark.timeout(300)
def test_memory_is_bounded_by_the_models_in_it(tmp_path: Path) -> None:
    """200 models take the memory of 16, and those of a client that ended take none."""
    policy = {"max_models": 16, "silent_s": 5.0, "upkeep_s": 0.5}
    with house(tmp_path, policy=policy) as there:

        def rss() -> float:
            (process,) = there.service.processes("holdfast.trainer")
            return float(process.memory_info().rss) / 2**20

        with there.program(MANY) as program:
            one, few, many = ((program.next()["made"], rss())[1] for _ in range(3))
            print(f"RSS with 1, 20 and 200 models: {one:.0f}, {few:.0f}, {many:.0f} MiB")
            assert few > one + 16 * 10, "models are large enough to be seen"
            assert many < few + 100
        until(
            lambda: there.models() == {"in_memory": 0, "put_aside": 200},
            "the models of the client that ended are put aside",
        )
        assert rss() < one + 100
