"""Adapters of low rank, with peft: which layers get one, and what is in it at first.

- A new adapter changes nothing: its B is zero.
- Its A is a function of `Lora.seed` and of the layer's name. So it does not depend on the state
  of any generator, on which other layers are trained, or on which adapters were made before.
- The factor is ALPHA / rank, so that a learning rate means about the same at every rank.
- Names and files are those of peft, so that peft and vLLM load what is published.
"""

import json
import math
from typing import Any

import msgspec
import torch
from torch import nn

from holdfast.engine.noise import uniform
from holdfast.engine.quiet import peft, quiet
from holdfast.errors import Mistake

__all__ = ["ALPHA", "MAX_RANK", "Lora", "attach"]

ALPHA = 32
MAX_RANK = 1024

_PREFIX = "base_model.model."
_ADAPTER = "default"
_ATTENTION = ("attn", "attention")
_MLP = ("mlp", "ffn", "feed_forward", "fc")
_ROUTERS = ("gate", "router")
"""These choose among experts; they are not part of one."""


class Lora(msgspec.Struct, frozen=True, kw_only=True):
    """Which adapter: its rank, the seed of its first weights, and the layers that get it."""

    rank: int
    seed: int = 0
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= MAX_RANK:
            raise Mistake(f"an adapter has a rank between 1 and {MAX_RANK}, not {self.rank}")
        if not (self.train_attn or self.train_mlp or self.train_unembed):
            raise Mistake("an adapter needs at least one of train_attn, train_mlp, train_unembed")


def attach(model: Any, lora: Lora, base: str) -> tuple[dict[str, nn.Parameter], bytes]:
    """Put an adapter into `model`; give its parameters by published name, and its config file.

    `base` is the name that the config file gives for the model below the adapter.
    """
    targets = _targets(model, lora)
    with quiet(), torch.random.fork_rng(devices=[]):  # peft draws numbers that are not kept
        config = peft().LoraConfig(
            r=lora.rank,
            lora_alpha=ALPHA,
            lora_dropout=0.0,
            bias="none",
            target_modules=targets,
            task_type="CAUSAL_LM",
            base_model_name_or_path=base,
        )
        wrapped = peft().get_peft_model(model, config, adapter_name=_ADAPTER)
    named = {
        _PREFIX + name.replace(f".{_ADAPTER}.", "."): parameter
        for name, parameter in wrapped.base_model.model.named_parameters()
        if parameter.requires_grad
    }
    with torch.no_grad():
        for name, parameter in named.items():
            if ".lora_A." in name:
                bound = 1 / math.sqrt(parameter.shape[1])
                values = uniform(tuple(parameter.shape), bound, "lora", lora.seed, name)
                parameter.copy_(torch.from_numpy(values))
            else:
                parameter.zero_()
    return named, _config_file(config, base)


def _config_file(config: Any, base: str) -> bytes:
    """adapter_config.json, with its sets in order, so that equal adapters have equal files."""
    fields = {**config.to_dict(), "base_model_name_or_path": base, "inference_mode": True}
    return (json.dumps(fields, indent=2, sort_keys=True, default=sorted) + "\n").encode()


def _targets(model: Any, lora: Lora) -> list[str]:
    """The layers to adapt: by last name where that means just these, else by whole name."""
    output = model.get_output_embeddings()
    kinds: dict[str, str] = {}
    for name, module in model.named_modules():
        if module is output:
            kinds[name] = "unembed"
        elif isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
            kinds[name] = _kind(name)
    chosen = {"attn": lora.train_attn, "mlp": lora.train_mlp, "unembed": lora.train_unembed}
    for kind, wanted in chosen.items():
        if wanted and kind not in kinds.values():
            raise Mistake(
                f"an adapter with train_{kind}=True: {type(model).__name__} has no such layer "
                f"that an adapter fits; set train_{kind} to False"
            )
    targets = set()
    for name, kind in kinds.items():
        if chosen.get(kind):
            last = name.rpartition(".")[2]
            alike = {other for key, other in kinds.items() if key.rpartition(".")[2] == last}
            targets.add(last if all(map(chosen.get, alike)) else name)
    return sorted(targets)


def _kind(name: str) -> str:
    parts = name.split(".")
    if parts[-1] in _ROUTERS:
        return "router"
    if any(word in part for part in parts for word in _ATTENTION):
        return "attn"
    if any(part.startswith(_MLP) for part in parts):
        return "mlp"
    return "other"
