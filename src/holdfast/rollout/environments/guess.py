"""Guess a number: the shipped environment of several turns, and the smallest example of one.

The model names two digits, the environment says whether the number is higher or lower. Seven
turns are enough for whoever halves what is left. Earlier is better.
"""

import itertools
from collections.abc import Sequence

from holdfast.engine.noise import seed_of
from holdfast.rollout.environments.base import Environment, Purpose, Score, Task, held_out

__all__ = ["Guess"]


class Guess(Environment):
    """A number from 00 to 99."""

    max_tokens = 2
    max_turns = 7

    def task(self, seed: int, purpose: Purpose) -> Task:
        """The prompt is always the same, so what is held out is the number."""
        for attempt in itertools.count():
            number = f"{seed_of('guess', seed, purpose, attempt) % 100:02}"
            if held_out("guess", number) == (purpose == "eval"):
                return Task("00 to 99?", number)
        raise AssertionError("unreachable")

    def score(self, task: Task, turns: Sequence[str], pieces: Sequence[str]) -> Score:  # noqa: ARG002
        """1 for a hit at once, 1/7 for one in the last turn."""
        if task.answer not in turns:
            return Score(0.0)
        return Score(1.0 - turns.index(task.answer) / self.max_turns, exact=True)

    def reply(self, task: Task, turns: Sequence[str]) -> str | None:
        """Where to look next."""
        guess = turns[-1]
        if guess == task.answer:
            return None
        if len(guess) != 2 or not (guess.isascii() and guess.isdigit()):
            return " two digits?"
        return " higher?" if guess < task.answer else " lower?"
