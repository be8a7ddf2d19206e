"""Several ranks: the same bits with any number of them, and whichever dies."""

import asyncio
import contextlib
import os
import random
import signal
from pathlib import Path

import psutil
import pytest

from gateway.service import wait_for
from trainer.house import House, Program, house

STEPS = 10
PROGRAM = f"""
client = service.create_lora_training_client(base_model=BASE, rank=4)
words = ["one", "three", "five and six", "seven", "eleven", "thirteen", "a"]
for step in range({STEPS}):
    data = [datum(word + str(step)) for word in words]
    first = client.forward_backward(data, "cross_entropy")
    second = client.optim_step(types.AdamParams(learning_rate=1e-2, weight_decay=0.01))
    say(loss=first.result().metrics["loss:sum"], norm=second.result().metrics["grad_norm:mean"])
say(path=client.save_state("end").result().path)
"""


def content(there: House, path: str) -> str:
    """The hash of what was saved: over all names, kinds and bytes."""
    model = path.split("/")[2]
    return asyncio.run(there.content(f"{model}.w.end"))


def outcome(there: House, program: Program) -> tuple[list[dict[str, float]], str]:
    """Every step's numbers, and the hash of the weights in the end."""
    *steps, end = program.finish()
    return steps, content(there, end["path"])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, float]], str]:
    """What one rank, undisturbed, makes of it."""
    with (
        house(tmp_path_factory.mktemp("alone")) as there,
        there.program(PROGRAM) as program,
    ):
        return outcome(there, program)


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
    tmp_path: Path, alone: tuple[list[dict[str, float]], str], count: int
) -> None:
    """Losses, norms and weights do not depend on how many compute."""
    with house(tmp_path, "--ranks", str(count)) as there, there.program(PROGRAM) as program:
        program.next()
        assert len(ranks(there)) == count
        assert outcome(there, program) == alone


@pytest.mark.long
@pytest.mark.parametrize("victims", [(1,), (0,), (0, 1)])
def test_ranks_that_die_are_only_a_pause(
    tmp_path: Path, alone: tuple[list[dict[str, float]], str], victims: tuple[int, ...]
) -> None:
    """Whichever rank is killed, the client waits a while, and nothing else changes."""
    seed = random.randrange(2**32)
    luck = random.Random(seed)
    print(f"seed {seed}")
    with house(tmp_path, "--ranks", "2") as there, there.program(PROGRAM) as program:
        for _ in range(luck.randrange(1, STEPS - 2)):
            program.next()
        there_before = ranks(there)
        for one in victims:
            os.kill(there_before[one].pid, signal.SIGKILL)
        wait_for(
            lambda: (
                not {one.pid for one in ranks(there)} & {one.pid for one in there_before}
                and len(ranks(there)) == 2
            ),
            "both ranks are new",
        )
        assert outcome(there, program) == alone
