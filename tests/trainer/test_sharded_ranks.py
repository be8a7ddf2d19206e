"""The real service with `--fsdp`: a rank that dies is only a pause, and the bits are the same."""

import os
import signal
from pathlib import Path

import pytest

from gateway.service import wait_for
from trainer.house import house
from trainer.test_ranks import outcome, ranks

STEPS = 6
PROGRAM = f"""
client = service.create_lora_training_client(base_model=BASE, rank=0)
words = ["one", "three", "five and six", "seven", "eleven"]
for step in range({STEPS}):
    data = [datum(word + str(step)) for word in words]
    first = client.forward_backward(data, "cross_entropy")
    second = client.optim_step(types.AdamParams(learning_rate=1e-2, grad_clip_norm=1.0))
    say(loss=first.result().metrics["loss:sum"], norm=second.result().metrics["grad_norm:mean"])
    if step == 2:
        sampler = client.save_weights_and_get_sampling_client()
        prompt = types.ModelInput.from_ints([1, *encode("th")])
        wish = types.SamplingParams(max_tokens=8, seed=3)
        drawn = sampler.sample(prompt=prompt, num_samples=2, sampling_params=wish).result()
        say(tokens=[one.tokens for one in drawn.sequences])
try:
    service.create_lora_training_client(base_model=BASE, rank=4)
    say(refused=False)
except Exception as error:
    say(refused="without --fsdp" in str(error))
say(path=client.save_state("end").result().path)
"""


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_rank_that_dies_is_only_a_pause(tmp_path: Path) -> None:
    """Either rank, killed in the middle: losses, samples and weights of an undisturbed run."""
    found = []
    for victim in (None, 1, 0):
        folder = tmp_path / str(victim)
        folder.mkdir()
        with (
            house(folder, "--ranks", "2", "--fsdp", policy={"checkpoint_ops": 4}) as there,
            there.program(PROGRAM) as program,
        ):
            if victim is not None:
                for _ in range(2 if victim else 4):
                    program.next()
                before = ranks(there)
                assert len(before) == 2
                os.kill(before[victim].pid, signal.SIGKILL)
                old = {one.pid for one in before}
                wait_for(
                    lambda there=there, old=old: (  # type: ignore[misc]
                        len(ranks(there)) == 2 and not {one.pid for one in ranks(there)} & old
                    ),
                    "both ranks are new",
                    60,
                )
            found.append(outcome(there, program))
    assert found[0][0][-1]["refused"]
    assert found[0][0][0]["loss"] > found[0][0][-2]["loss"]
    assert found[1] == found[0]
    assert found[2] == found[0]
