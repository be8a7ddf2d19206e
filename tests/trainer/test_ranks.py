"""Several ranks: the same bits with any number of them, and whichever dies.

With `--fsdp`, where every rank has a part of the model, the bits are those of the same number of
ranks that nothing happens to.
"""

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest

from patience import until
from trainer.house import House, Program, house

STEPS = 8
PROGRAM = f"""
rank = int(os.environ["LORA"])
client = service.create_lora_training_client(base_model=BASE, rank=rank)
words = ["one", "three", "five and six", "seven", "eleven", "thirteen", "a"]
for step in range({STEPS}):
    data = [datum(word + str(step)) for word in words]
    first = client.forward_backward(data, "cross_entropy")
    second = client.optim_step(
        types.AdamParams(learning_rate=1e-2, weight_decay=0.01, grad_clip_norm=1.0))
    say(loss=first.result().metrics["loss:sum"], norm=second.result().metrics["grad_norm:mean"])
    if step == 2:
        sampler = client.save_weights_and_get_sampling_client()
        prompt = types.ModelInput.from_ints([1, *encode("th")])
        wish = types.SamplingParams(max_tokens=8, seed=3)
        drawn = sampler.sample(prompt=prompt, num_samples=2, sampling_params=wish).result()
        say(tokens=[one.tokens for one in drawn.sequences])
say(path=client.save_state("end").result().path)
"""
FSDP = ("--ranks", "2", "--fsdp")

Outcome = tuple[list[dict[str, Any]], str]
"""Everything that the client was told, and the hash of the weights in the end."""


@contextlib.contextmanager
def training(folder: Path, *flags: str) -> Any:
    """A house whose trainer has these ranks, and a program that trains in it."""
    lora = "0" if "--fsdp" in flags else "4"
    with (
        house(folder, *flags, policy={"checkpoint_ops": 4}) as there,
        there.program(PROGRAM, LORA=lora) as program,
    ):
        yield there, program


def outcome(there: House, program: Program) -> Outcome:
    *told, end = program.finish()
    model = end["path"].split("/")[2]
    return told, asyncio.run(there.content(f"{model}.w.end"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Outcome]:
    """What becomes of it with these flags when nothing happens."""

    @cache
    def run(*flags: str) -> Outcome:
        with training(tmp_path_factory.mktemp("calm"), *flags) as (there, program):
            return outcome(there, program)

    return run


def ranks(there: House) -> list[psutil.Process]:
    """The living ranks of the trainer, rank 0 first: each has a file of events that names it."""
    found: list[tuple[int, psutil.Process]] = []
    for path in (there.folder / "trainers").glob("*/*/events/*.jsonl"):
        _, _, rank, pid = path.stem.split("-")
        with contextlib.suppress(psutil.Error):
            one = psutil.Process(int(pid))
            if one.status() != psutil.STATUS_ZOMBIE:
                found.append((int(rank[1:]), one))
    return [one for _, one in sorted(found, key=lambda it: it[0])]


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 4])
def test_any_number_of_ranks_gives_the_same_bits(
    tmp_path: Path, undisturbed: Callable[..., Outcome], count: int
) -> None:
    """Losses, norms, samples and weights do not depend on how many compute."""
    with training(tmp_path, "--ranks", str(count)) as (there, program):
        program.next()
        assert len(ranks(there)) == count
        assert outcome(there, program) == undisturbed()


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("victims", [(1,), (0,), (0, 1)])
@pytest.mark.parametrize("flags", [("--ranks", "2"), FSDP], ids=["whole", "fsdp"])
def test_ranks_that_die_are_only_a_pause(
    tmp_path: Path,
    undisturbed: Callable[..., Outcome],
    flags: tuple[str, ...],
    victims: tuple[int, ...],
) -> None:
    """Whichever rank is killed, the client waits a while, and nothing else changes."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    with training(tmp_path, *flags) as (there, program):
        for _ in range(random.Random(seed).randrange(1, STEPS - 2)):
            program.next()
        before = ranks(there)
        assert len(before) == 2
        for one in victims:
            os.kill(before[one].pid, signal.SIGKILL)
        old = {one.pid for one in before}
        until(
            lambda: len(ranks(there)) == 2 and not {one.pid for one in ranks(there)} & old,
            "both ranks are new",
            60,
        )
        found = outcome(there, program)
    assert found == (undisturbed(*flags) if flags == FSDP else undisturbed())
    assert found[0][0]["loss"] > found[0][STEPS]["loss"]
