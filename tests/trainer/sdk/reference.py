"""Training as a page of plain PyTorch does it, to compare with: no code of ours in it.

One sequence at a time, without padding, shards or batches; losses as the documentation of the
protocol writes them; `torch.optim.AdamW` and `torch.nn.utils.clip_grad_norm_`.
"""

import importlib
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Example = dict[str, Any]


def load(base: Path, adapter: Path | None = None) -> nn.Module:
    """A model as transformers has it; with an adapter as peft has it, ready to be trained."""
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = importlib.import_module("transformers")
        transformers.utils.logging.disable_progress_bar()
        model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(base)
        if adapter is not None:
            peft = importlib.import_module("peft")
            model = peft.PeftModel.from_pretrained(model, adapter, is_trainable=True)
    return model.eval()


def trained(model: nn.Module) -> dict[str, Tensor]:
    """What is trained of a model, under the names of its files."""
    named = {name.replace(".default.", "."): one for name, one in model.named_parameters()}
    return {name: one.detach() for name, one in named.items() if one.requires_grad}


def logprobs(model: nn.Module, example: Example) -> Tensor:
    """The log probability of every target."""
    logits = model(input_ids=torch.tensor([example["tokens"]])).logits[0]
    targets = torch.tensor(example["target_tokens"])
    if targets.ndim == 1:
        targets = targets.unsqueeze(-1)
    found: Tensor = logits.log_softmax(-1).gather(-1, targets)
    return found.squeeze(-1) if found.shape[-1] == 1 else found


def loss(name: str, now: Tensor, example: Example, config: dict[str, float]) -> Tensor:
    """The loss of one sequence."""
    if name == "cross_entropy":
        return -(torch.as_tensor(example["weights"]) * now).sum()
    old = torch.as_tensor(example["logprobs"])
    gain = torch.as_tensor(example["advantages"])
    ratio = (now - old).exp()
    low, high = config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2)
    if name == "importance_sampling":
        return -(ratio * gain).sum()
    if name == "ppo":
        return -torch.min(ratio * gain, ratio.clamp(low, high) * gain).sum()
    if name == "cispo":
        return -(ratio.clamp(low, high).detach() * now * gain).sum()
    if name == "dro":
        return -(now * gain - 0.5 * config["beta"] * (now - old) ** 2).sum()
    assert name == "gspo"
    mask = torch.as_tensor(example["sequence_ratio_mask"])
    whole = ((now - old) * mask).sum() / mask.sum()
    token = (whole.detach() + now - now.detach()).exp()
    return -torch.min(token * gain, token.clamp(low, high) * gain).sum()


def backward(
    model: nn.Module, name: str, data: Iterable[Example], config: dict[str, float] | None = None
) -> float:
    """Add the gradients of these sequences to those there are; their loss."""
    total = torch.zeros(())
    for example in data:
        total = total + loss(name, logprobs(model, example), example, config or {})
    total.backward()  # type: ignore[no-untyped-call]
    return float(total.detach())


class Adam:
    """The optimizer, with settings that are called as the protocol calls them."""

    def __init__(self, model: nn.Module) -> None:
        self._trained = [one for one in model.parameters() if one.requires_grad]
        self._adam = torch.optim.AdamW(self._trained)

    def step(
        self,
        *,
        learning_rate: float,
        beta1: float = 0.9,
        beta2: float = 0.95,
        eps: float = 1e-12,
        weight_decay: float = 0.0,
        grad_clip_norm: float = 0.0,
    ) -> float:
        """One step; the norm of the gradients before they were clipped."""
        limit = grad_clip_norm or float("inf")
        norm = nn.utils.clip_grad_norm_(self._trained, limit)
        self._adam.param_groups[0].update(
            lr=learning_rate, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay
        )
        self._adam.step()
        self._adam.zero_grad()
        return float(norm)
