"""Episodes: a model and an environment take turns on a task. Pure.

Invariants:

- The first turn, mostly the only one, is one batch of all the group's samples. Later turns, which
  differ from each other, are one sample each, with seeds of their own.
- What comes out depends on the arguments alone, if `say` and the environment do.
- `tokens`, `made` and `logprobs` are of one length; `pieces` has one text per token that was made.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, cast

import msgspec
import numpy as np
import numpy.typing as npt

from holdfast.engine.noise import seed_of
from holdfast.errors import Mistake
from holdfast.rollout.environments import Judge, Task

__all__ = ["Ended", "Episode", "Said", "Say", "play"]

Ended = Literal["stop", "length"]
Said = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], str]
"""The tokens of one sample, their log probabilities, and why it ended."""
Say = Callable[[Sequence[int], int, int], Awaitable[list[Said]]]
"""(tokens so far, how many samples, seed) -> the samples"""


class Episode(msgspec.Struct, eq=False, kw_only=True):
    """One sample: the prompt and everything that was said, in order."""

    tokens: npt.NDArray[np.int32] = msgspec.field(default_factory=lambda: np.zeros(0, np.int32))
    made: npt.NDArray[np.bool_] = msgspec.field(default_factory=lambda: np.zeros(0, np.bool_))
    """Where the model generated."""
    logprobs: npt.NDArray[np.float32] = msgspec.field(
        default_factory=lambda: np.zeros(0, np.float32)
    )
    """0 where it did not."""
    turns: list[str] = []
    pieces: list[str] = []
    """The text of each token that was made."""
    ended: Ended = "stop"
    """How the last turn ended."""

    def hear(self, tokens: Sequence[int]) -> None:
        """The environment says something."""
        self._add(tokens, [0.0] * len(tokens), made=False)

    def say(self, said: Said, decode: Callable[[Sequence[int]], str]) -> None:
        """The model says something."""
        array, logprobs, ended = said
        tokens = [int(token) for token in array]
        if len(tokens) != len(logprobs) or ended not in ("stop", "length"):
            raise Mistake(
                f"the sampler gave {len(tokens)} tokens, {len(logprobs)} log probabilities "
                f"and {ended!r}"
            )
        self._add(tokens, logprobs, made=True)
        self.turns.append(decode(tokens))
        self.pieces += [decode([token]) for token in tokens]
        self.ended = cast(Ended, ended)

    def _add(self, tokens: Sequence[int], logprobs: "npt.ArrayLike", *, made: bool) -> None:
        self.tokens = np.append(self.tokens, np.array(tokens, np.int32))
        self.made = np.append(self.made, np.full(len(tokens), made))
        self.logprobs = np.append(self.logprobs, np.array(logprobs, np.float32))


async def play(
    judge: Judge,
    task: Task,
    *,
    count: int,
    max_turns: int,
    say: Say,
    encode: Callable[[str], list[int]],
    decode: Callable[[Sequence[int]], str],
    seed: int,
    begin: Sequence[int] = (),
) -> list[Episode]:
    """Play `count` episodes of a task. `begin`: what the model wants before the prompt."""

    async def ask(tokens: Sequence[int], samples: int, its_seed: int) -> list[Said]:
        said = await say(tokens, samples, its_seed)
        if len(said) != samples:
            raise Mistake(f"the sampler gave {len(said)} samples where {samples} were asked for")
        return said

    if count < 1 or max_turns < 1:
        raise Mistake(f"count is {count} and max_turns {max_turns}: both must be 1 or more")
    prompt = [*begin, *encode(task.prompt)]
    episodes = [Episode() for _ in range(count)]
    for episode, said in zip(episodes, await ask(prompt, count, seed), strict=True):
        episode.hear(prompt)
        episode.say(said, decode)
    going = list(enumerate(episodes))
    for turn in range(1, max_turns):
        replies = [(index, one, await judge.reply(task, one.turns)) for index, one in going]
        going = []
        for index, episode, reply in replies:
            if reply is None:
                continue
            episode.hear(encode(reply))
            (said,) = await ask(episode.tokens.tolist(), 1, seed_of(seed, turn, index))
            episode.say(said, decode)
            going.append((index, episode))
    return episodes
