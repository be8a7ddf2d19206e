"""The part of a replica that speaks: its own engine (`own_sampler`), or a server of somebody's.

A replica asks for one thing at a time: `load` a version unless it `has` it, then `say` something
with it.
"""

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from holdfast.rollout.episodes import Say

if TYPE_CHECKING:
    from holdfast.weights.pin import Pin

__all__ = ["Sampler"]


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
