"""The part of a replica that speaks: its own engine (`own_sampler`), or a server of somebody's.

A replica asks for one thing at a time: `load` a version unless it `has` it, then `say` something
with it.
"""

import abc
import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar, Self

from holdfast.rollout.episodes import Said, Say, Speak

if TYPE_CHECKING:
    from holdfast.weights.pin import Pin

__all__ = ["Sampler", "ThreadSampler"]


class Sampler(abc.ABC):
    """A model that speaks. Use `async with`."""

    exact: ClassVar[bool]
    """Whether the same question has the same answer, bit for bit, whoever is asked."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:  # noqa: B027 -- not every sampler has to end
        """End whatever it has started."""

    @property
    def first_token(self) -> list[int]:
        """What a prompt begins with, where the tokenizer has such a token."""
        token = self._tokenizer.bos_token_id
        return [] if token is None else [int(token)]

    def encode(self, text: str) -> list[int]:
        """A text as tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        """Tokens as a text."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    @abc.abstractmethod
    def has(self, version: int) -> bool:
        """Whether it can speak with a version now."""

    @abc.abstractmethod
    async def load(self, pin: "Pin") -> None:
        """Have a version; another one may have to go. `Unavailable` when that is not possible
        now, and somebody else should be asked.
        """

    @abc.abstractmethod
    def say(self, version: int, temperature: float, max_tokens: int) -> Say:
        """What continues prompts with a version that it has."""


class ThreadSampler(Sampler):
    """A model in this process. What `speak` gives blocks, and is called from `thread` alone."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self.thread = ThreadPoolExecutor(1, "engine")

    async def __aexit__(self, *_: object) -> None:
        self.thread.shutdown(wait=False, cancel_futures=True)

    def say(self, version: int, temperature: float, max_tokens: int) -> Say:
        """What `speak` gives, for the event loop: it runs in our thread."""
        speak = self.speak(version, temperature, max_tokens)

        async def say(tokens: Sequence[int], count: int, seed: int) -> list[Said]:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self.thread, speak, tokens, count, seed)

        return say

    @abc.abstractmethod
    def speak(self, version: int, temperature: float, max_tokens: int) -> Speak:
        """What continues prompts with a version that it has."""
