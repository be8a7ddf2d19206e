"""Tasks on numbers: reverse, copy and increment.

They can be learnt from scratch in minutes, because credit is given place by place: a token is
worth the share of its characters that are right where they stand. With one character per token
that is 1 or 0. An empty piece, such as the end of text, is right when the answer is complete.

A prompt is a number and a sign that says what to do with it: `48213>`, `48213=`, `48213+`.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from holdfast.engine.noise import seed_of
from holdfast.errors import Mistake
from holdfast.rollout.environments.base import Environment, Purpose, Score, Task, held_out

__all__ = ["Copy", "Increment", "Reverse"]

# One digit leaves too few tasks to hold some out; a seed has 63 bits, which is 18 digits.
_LEAST, _MOST = 2, 18


class Digits(Environment):
    """A number goes in and as many digits come out; the last `without` numbers are not asked."""

    def __init__(
        self, sign: str, answer: Callable[[str], str], without: int, /, digits: int = 5
    ) -> None:
        if type(digits) is not int or not _LEAST <= digits <= _MOST:
            raise Mistake(
                f"digits is {digits!r}: it must be a whole number from {_LEAST} to {_MOST}"
            )
        self.digits = digits
        self.max_tokens = digits
        self._sign, self._answer = sign, answer
        self._numbers = int(10**digits) - without

    def task(self, seed: int, purpose: Purpose) -> Task:
        """The first number of the seed's that is for this purpose."""
        for attempt in itertools.count():
            number = seed_of("number", seed, purpose, attempt) % self._numbers
            text = f"{number:0{self.digits}}"
            prompt = text + self._sign
            if held_out(prompt) == (purpose == "eval"):
                return Task(prompt, self._answer(text))
        raise AssertionError("unreachable")

    def score(self, task: Task, turns: Sequence[str], pieces: Sequence[str]) -> Score:  # noqa: ARG002
        """Credit by place; the reward is the share of places that are right."""
        text = "".join(pieces)
        right = sum(map(str.__eq__, text, task.answer))
        places = max(len(text), len(task.answer))
        return Score(right / places, text == task.answer, tuple(_credit(task.answer, pieces)))


def _plus_one(text: str) -> str:
    return f"{int(text) + 1:0{len(text)}}"


Reverse = partial(Digits, ">", lambda text: text[::-1], 0)
"""The number, from its last digit to its first."""
Copy = partial(Digits, "=", str, 0)
"""The number again."""
Increment = partial(Digits, "+", _plus_one, 1)
"""The number plus one, in as many digits: nines alone are never asked for."""


def _credit(answer: str, pieces: Sequence[str]) -> Iterator[float]:
    place = 0
    for piece in pieces:
        here = answer[place : place + len(piece)]
        place += len(piece)
        if piece:
            yield sum(map(str.__eq__, piece, here)) / len(piece)
        else:
            yield float(place == len(answer))
