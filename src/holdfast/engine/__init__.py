"""Models, batched generation with a KV cache, sampling and log probabilities.

The trainer and the rollout replicas compute with the same code, so that what one samples is
what the other scores.

- `tiny`: a small causal language model, made on the spot.
- `base`: a model directory, and the tenants that share its weights: all of them trained, an
  adapter, or as they are.
- `generate`, `sampling`, `stopping`: continuations of one prompt.
- `scoring`: log probabilities of given tokens.
- `determinism`: what makes two runs give the same bits.

Nothing is imported here: `tiny` needs no torch, and torch, transformers and peft together take
seconds to import. transformers and peft are imported when the first model is loaded.
"""
