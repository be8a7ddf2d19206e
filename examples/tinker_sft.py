"""Teach a small model some words through the public Tinker client, and sample from it.

export TINKER_BASE_URL=$(holdfast jobs url my-job) TINKER_API_KEY=$(holdfast jobs key)
python examples/tinker_sft.py
"""

import os

import tinker
from tinker import types

os.environ.setdefault("HF_HUB_OFFLINE", "1")
WORDS = ["holdfast", "ledger", "journal", "epoch", "promise", "fence"]

service = tinker.ServiceClient()
client = service.create_lora_training_client(base_model="holdfast/tiny", rank=16)
tokenizer = client.get_tokenizer()


def datum(word: str) -> types.Datum:
    tokens = [tokenizer.bos_token_id, *tokenizer.encode(word), tokenizer.eos_token_id]
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


data = [datum(word) for word in WORDS]
for step in range(120):
    losses = client.forward_backward(data, "cross_entropy")
    stepped = client.optim_step(types.AdamParams(learning_rate=1e-2))
    stepped.result()
    if step % 20 == 0:
        print(f"step {step}: loss {losses.result().metrics['loss:sum']:.3f}")

sampler = client.save_weights_and_get_sampling_client()
prompt = types.ModelInput.from_ints([tokenizer.bos_token_id, *tokenizer.encode("led")])
params = types.SamplingParams(max_tokens=8, temperature=0.0)
answer = sampler.sample(prompt=prompt, num_samples=1, sampling_params=params).result()
print("led" + tokenizer.decode(answer.sequences[0].tokens, skip_special_tokens=True))
print(client.save_state("end").result().path)
