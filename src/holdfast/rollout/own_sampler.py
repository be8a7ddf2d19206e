"""A sampler of our own: a base model in this process, and a few versions of its weights.

A version that is asked for again is still in memory, unless `KEEP` others were asked for since.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.engine.base import Lora, load_base
from holdfast.engine.determinism import settle
from holdfast.engine.generate import Settings, generate
from holdfast.rollout.episodes import Said, Say
from holdfast.rollout.sampler import Sampler

if TYPE_CHECKING:
    import torch

    from holdfast.engine.base import Tenant
    from holdfast.weights.pin import Pin

__all__ = ["OwnSampler"]

KEEP = 3
"""Versions in memory: that of this step's samples, the next one, and one to evaluate."""


class OwnSampler(Sampler):
    """Speaks with Holdfast's engine, which blocks: in a thread of its own."""

    exact = True

    def __init__(self, directory: Path, *, lora_rank: int = 0) -> None:
        settle(1)
        self._base = load_base("policy", directory)
        super().__init__(self._base.tokenizer)
        self._thread = ThreadPoolExecutor(1, "engine")
        self._lora = Lora(rank=lora_rank) if lora_rank else None
        self._versions: OrderedDict[int, Tenant] = OrderedDict()

    async def __aexit__(self, *_: object) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def has(self, version: int) -> bool:
        """Whether a version is in memory."""
        return version in self._versions

    async def load(self, pin: "Pin") -> None:
        """Have a version in memory; the one that was used least recently goes."""
        loop, weights = asyncio.get_running_loop(), pin.state_dict()
        await loop.run_in_executor(self._thread, self._load, pin.number, weights)

    def _load(self, version: int, weights: "Mapping[str, torch.Tensor]") -> None:
        if len(self._versions) >= KEEP:
            _, tenant = self._versions.popitem(last=False)
        elif self._lora is None:
            tenant = self._base.full()
        else:
            tenant = self._base.lora(self._lora, f"policy-{len(self._versions)}")
        tenant.load_state(weights)
        self._versions[version] = tenant

    def say(self, version: int, temperature: float, max_tokens: int) -> Say:
        """What continues prompts with a version that is in memory."""
        self._versions.move_to_end(version)
        tenant: Any = self._versions[version]
        settings = Settings(max_tokens=max_tokens, temperature=temperature)

        async def say(prompt: Sequence[int], count: int, seed: int) -> list[Said]:
            work = partial(generate, tenant, prompt, settings, num_samples=count, seed=seed)
            found = await asyncio.get_running_loop().run_in_executor(self._thread, work)
            return [(one.tokens, one.logprobs, one.stop_reason) for one in found.continuations]

        return say
