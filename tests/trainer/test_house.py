"""Holdfast's own trainer, as the real Tinker client sees it: one short way through all of it."""

from pathlib import Path

from trainer.house import house

PROGRAM = """
client = service.create_lora_training_client(base_model=BASE, rank=4)
data = [datum("hello"), datum("world")]
for _ in range(12):
    first = client.forward_backward(data, "cross_entropy")
    second = client.optim_step(types.AdamParams(learning_rate=2e-2))
    say(loss=first.result().metrics["loss:sum"], norm=second.result().metrics["grad_norm:mean"])
say(path=client.save_state("kept").result().path)
sampler = client.save_weights_and_get_sampling_client()
prompt = types.ModelInput.from_ints([1, *encode("hel")])
params = types.SamplingParams(max_tokens=4, temperature=0.0)
found = sampler.sample(prompt=prompt, num_samples=2, sampling_params=params).result()
say(texts=[decode(one.tokens) for one in found.sequences])
"""


def test_a_model_is_trained_saved_and_sampled(tmp_path: Path) -> None:
    """The loss falls, weights are saved under a path, and samples come back."""
    with house(tmp_path) as there:
        *steps, saved, sampled = there.run(PROGRAM)
    losses = [step["loss"] for step in steps]
    assert losses[-1] < losses[0] / 2
    assert saved["path"].startswith("tinker://")
    assert saved["path"].endswith("/weights/kept")
    assert len(sampled["texts"]) == 2
    assert sampled["texts"][0] == sampled["texts"][1]
