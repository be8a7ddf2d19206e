"""A model directory, loaded once, and the tenants on it.

    base = load_base("tiny", folder)
    tenant = base.lora(Lora(rank=8), "run-1")

- The weights of a base never change. Tenants by `lora` and `frozen` read the same memory;
  every tenant by `full` has a copy of its own.
- Each tenant has modules of its own, even where the weights are shared. So there is no "active
  adapter" to switch, and nothing that one tenant does can be seen by another.
- Loading reads data, never code (`loading`). It takes 0.1 s for a small model, after what a
  process needs once to import torch (1.6 s of a CPU), transformers (3.3 s) and, with the first
  adapter, peft (0.25 s).
"""

import copy
import inspect
import itertools
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from holdfast.engine import directory, loading
from holdfast.engine.lora import Lora, attach
from holdfast.engine.tenant import Tenant
from holdfast.errors import Exists, Mistake

__all__ = ["Base", "Lora", "Tenant", "load_base"]


def load_base(name: str, folder: Path, *, device: str = "cpu", dtype: str = "float32") -> "Base":
    """Load a causal language model: config.json, a tokenizer and safetensors, as transformers
    has them. Raises `Mistake`, which says what to do, for a folder that is not like this.
    """
    if dtype not in loading.DTYPES:
        raise Mistake(f"dtype={dtype!r}: one of {', '.join(loading.DTYPES)}")
    config = directory.read_config(folder)
    return Base(name, folder, loading.load_model(folder, device, dtype), config)


class Base:
    """A loaded model. Made by `load_base`."""

    def __init__(self, name: str, folder: Path, model: Any, config: dict[str, Any]) -> None:
        self.name = name
        self.folder = folder
        self.architecture = type(model).__name__
        self.device = next(model.parameters()).device
        self.vocabulary_size = int(model.get_input_embeddings().weight.shape[0])
        self.context_length = _context_length(model.config, folder)
        self.eos_tokens = directory.end_tokens(folder, config)
        self.last_only: dict[str, int] = {}
        """What makes the model compute logits after the last token only, if it can."""
        if "logits_to_keep" in inspect.signature(model.forward).parameters:
            self.last_only = {"logits_to_keep": 1}
        self._model = model
        self._config = config
        self._carried = loading.carried(folder)
        self._tenants: list[Tenant] = []
        self._numbers = itertools.count(1)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of transformers, loaded when it is asked for the first time."""
        return loading.load_tokenizer(self.folder)

    def full(self, name: str | None = None) -> Tenant:
        """A tenant with a copy of all the weights, all of them trainable."""
        name = self._free(f"full-{next(self._numbers)}" if name is None else name)
        model = copy.deepcopy(self._model)
        parameters = dict(model.named_parameters())
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        tied = {key for key, _ in model.named_parameters(remove_duplicate=False)}
        buffers = {key: value for key, value in model.state_dict().items() if key not in tied}
        self._check_names({*parameters, *buffers})
        files = {**self._carried, "config.json": self._config_file()}
        mine = Tenant(self, name, model, parameters, files, "model.safetensors", buffers)
        return self._add(mine)

    def lora(self, lora: Lora, name: str) -> Tenant:
        """A tenant with a new adapter on the base's own weights."""
        self._free(name)
        model = self._view()
        parameters, config = attach(model, lora, self.name)
        files = {"adapter_config.json": config}
        return self._add(Tenant(self, name, model, parameters, files, "adapter_model.safetensors"))

    def frozen(self) -> Tenant:
        """The base as it is, for sampling and scoring. Nothing to train, nothing to publish."""
        return Tenant(self, self.name, self._view(), {}, {}, "")

    def drop(self, tenant: Tenant) -> None:
        """Let a tenant go, with its weights and its name. Dropping it again does nothing."""
        self._tenants = [other for other in self._tenants if other is not tenant]
        tenant.release()

    def check_tokens(self, tokens: torch.Tensor | Sequence[int]) -> None:
        """Raise `Mistake` if a token is not in the vocabulary."""
        if isinstance(tokens, torch.Tensor):
            wrong = tokens[(tokens < 0) | (tokens >= self.vocabulary_size)][:1].tolist()
        else:
            wrong = [token for token in tokens if not 0 <= token < self.vocabulary_size]
        if wrong:
            raise Mistake(
                f"token {wrong[0]} is not in the vocabulary of {self.name}, which has "
                f"{self.vocabulary_size}: was the text encoded with another tokenizer?"
            )

    def _view(self) -> Any:
        """New modules around the same weights."""
        shared = {id(parameter): parameter for parameter in self._model.parameters()}
        return copy.deepcopy(self._model, shared)

    def _free(self, name: str) -> str:
        if any(tenant.name == name for tenant in self._tenants):
            raise Exists(f"{self.name} has a tenant {name} already: drop it, or take another name")
        return name

    def _add(self, tenant: Tenant) -> Tenant:
        self._tenants.append(tenant)
        return tenant

    def _config_file(self) -> bytes:
        """config.json, with the dtype in which the weights are published."""
        dtype = str(next(self._model.parameters()).dtype).removeprefix("torch.")
        fields = {key: value for key, value in self._config.items() if key != "dtype"}
        return (json.dumps({**fields, "torch_dtype": dtype}, indent=2) + "\n").encode()

    def _check_names(self, names: set[str]) -> None:
        """What is published must have the names of the files, or others could not load it."""
        strange = sorted(names - loading.stored(self.folder).keys())
        if strange:
            raise Mistake(
                f"{self.architecture} is stored under other names than it computes with "
                f"({strange[0]} is not in the files): train an adapter on it instead"
            )


def _context_length(config: Any, folder: Path) -> int:
    for field in directory.CONTEXT_LENGTHS:
        value = getattr(config, field, None)
        if isinstance(value, int) and value > 0:
            return value
    raise Mistake(f"config.json in {folder} does not say max_position_embeddings: add it")
