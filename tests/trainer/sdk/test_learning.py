"""Whole training loops with the real clients: they learn, full and with adapters."""

from statistics import mean

import pytest

from trainer.house import House
from trainer.sdk.programs import run

REINFORCED = """
client = lora(seed=1, rank=8)
prompt, wanted, length = [1, *encode("go:")], encode("a")[0], 6
for number in range(12):
    sampler = client.save_weights_and_get_sampling_client()
    found = sampler.sample(
        prompt=types.ModelInput.from_ints(prompt), num_samples=16,
        sampling_params=types.SamplingParams(max_tokens=length, seed=number, stop=[])).result()
    rewards = [sum(token == wanted for token in one.tokens) / length for one in found.sequences]
    usual = sum(rewards) / len(rewards)
    data = []
    for one, reward in zip(found.sequences, rewards):
        ids = [*prompt, *one.tokens]
        before = [0.0] * (len(prompt) - 1)
        data.append(types.Datum(
            model_input=types.ModelInput.from_ints(ids[:-1]),
            loss_fn_inputs={
                "target_tokens": ids[1:], "logprobs": [*before, *one.logprobs],
                "advantages": [*before, *[reward - usual] * length]}))
    first = client.forward_backward(data, "importance_sampling")
    second = client.optim_step(types.AdamParams(learning_rate=1e-2))
    say(reward=usual, loss=first.result().metrics["loss:sum"])
    second.result()
"""


def test_reinforcement_learns(there: House) -> None:
    """Sample, reward, importance_sampling, step, publish: from chance to nearly always."""
    rewards = [one["reward"] for one in run(there, REINFORCED)]
    assert mean(rewards[:3]) < 0.1, rewards
    assert mean(rewards[-3:]) > 0.8, rewards


FIREWORKS = """
from fireworks.training.sdk import FiretitanServiceClient
from fireworks.training.sdk import types as fire
fireworks = FiretitanServiceClient(
    base_url=os.environ["HOUSE_URL"], api_key=os.environ["HOUSE_KEY"])
"""
SUPERVISED = """
client = fireworks.create_training_client(base_model=BASE, lora_rank=GIVEN)
told = [step(client, "hello", "world", rate=3e-3, types=fire) for _ in range(20)]
last = client.forward(
    [datum("hello", fire), datum("world", fire)], "cross_entropy").result()
saved = client.save_weights_for_sampler("name").result().path
twin = lora(rank=GIVEN, seed=0)
same = [step(twin, "hello", "world", rate=3e-3) for _ in range(20)]
sampler = service.create_sampling_client(model_path=saved)
found = sampler.sample(
    prompt=types.ModelInput.from_ints([1, *encode("he")]), num_samples=1,
    sampling_params=types.SamplingParams(max_tokens=8, temperature=0.0)).result()
say(told=told, same=same, last=last.metrics["loss:sum"],
    text=decode(found.sequences[0].tokens), state=client.save_state("state").result().path)
client.unload_model().result()
"""


@pytest.mark.parametrize(
    "rank", [pytest.param(0, id="full"), pytest.param(8, id="lora", marks=pytest.mark.long)]
)
def test_fireworks_client_learns(there: House, rank: int) -> None:
    """The Fireworks client trains all weights and adapters, with the numbers that Tinker's has;
    what it published is sampled from.
    """
    (said,) = run(there, FIREWORKS + SUPERVISED, rank)
    losses = [loss for loss, _ in said["told"]]
    assert losses[-1] < losses[0] / 4, losses
    assert said["last"] < losses[0] / 4
    assert said["told"] == said["same"], "the two clients' numbers differ"
    assert said["state"].endswith("/weights/state")
    if rank == 0:
        assert said["text"] == "llo"


RESUMED = """
client = fireworks.create_training_client(base_model=BASE, lora_rank=4)
step(client, "hello", types=fire)
client.save_state("mine").result()
attempt("load", lambda: client.load_state_with_optimizer("mine").result())
say(listed=client.list_checkpoints())
"""


def test_fireworks_client_goes_on_from_a_name(there: House) -> None:
    """`load_state_with_optimizer("mine")`: the name under which this model was saved."""
    told, listed = run(there, FIREWORKS + RESUMED)
    assert told["error"] is None, told
    assert "mine" in listed["listed"]
