"""The part of a replica that computes: a base model, and a few versions of its weights.

Everything here blocks, and is called from one thread. A version that is asked for again is
still in memory, unless `KEEP` others were asked for since.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from holdfast.engine.base import Lora, load_base
from holdfast.engine.determinism import settle
from holdfast.engine.generate import Settings, generate

if TYPE_CHECKING:
    import torch

    from holdfast.engine.base import Tenant

__all__ = ["Sampler"]

KEEP = 3
"""Versions in memory: that of this step's samples, the next one, and one to evaluate."""

Said = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], str]


class Sampler:
    """A model that speaks."""

    def __init__(
        self, directory: Path, *, lora_rank: int = 0, device: str = "cpu", threads: int = 1
    ) -> None:
        settle(threads)
        self._base = load_base("policy", directory, device=device)
        self._lora = Lora(rank=lora_rank) if lora_rank else None
        self._versions: OrderedDict[int, Tenant] = OrderedDict()

    @property
    def first_token(self) -> list[int]:
        """What a prompt begins with, where the tokenizer has such a token."""
        token = self._base.tokenizer.bos_token_id
        return [] if token is None else [int(token)]

    def encode(self, text: str) -> list[int]:
        """A text as tokens."""
        return list(self._base.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        """Tokens as a text."""
        text: str = self._base.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def has(self, version: int) -> bool:
        """Whether a version is in memory."""
        return version in self._versions

    def load(self, version: int, weights: "Mapping[str, torch.Tensor]") -> None:
        """Have a version in memory; the one that was used least recently goes."""
        if len(self._versions) >= KEEP:
            _, tenant = self._versions.popitem(last=False)
        elif self._lora is None:
            tenant = self._base.full()
        else:
            tenant = self._base.lora(self._lora, f"policy-{len(self._versions)}")
        tenant.load_state(weights)
        self._versions[version] = tenant

    def speak(
        self, version: int, temperature: float, max_tokens: int
    ) -> Callable[[Sequence[int], int, int], list[Said]]:
        """What continues prompts with a version that is in memory."""
        self._versions.move_to_end(version)
        tenant: Any = self._versions[version]
        settings = Settings(max_tokens=max_tokens, temperature=temperature)

        def say(prompt: Sequence[int], count: int, seed: int) -> list[Said]:
            found = generate(tenant, prompt, settings, num_samples=count, seed=seed)
            return [(one.tokens, one.logprobs, one.stop_reason) for one in found.continuations]

        return say
