"""Log probabilities of given tokens: one definition for the losses and for sampling.

The softmax is taken in float32 whatever the model computes in, over the model's whole
vocabulary, at temperature 1.
"""

import torch

__all__ = ["token_logprobs"]


def token_logprobs(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The log probability of each target: logits [..., V], int64 targets [...], float32 [...].

    `logits[..., t, :]` must be what predicts `targets[..., t]`: shifting is up to the caller.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    return logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
