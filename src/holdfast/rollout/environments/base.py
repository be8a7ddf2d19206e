"""What an environment is, and what makes a score one.

An environment gives tasks and scores what a model made of them. Invariants that each keeps:

- `task` is a function of its arguments and of nothing else: a run that is resumed asks the same.
- No task for evaluation is ever one for training.
- `score` and `reply` are functions of their arguments, if the run is to end in the same bits.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from holdfast.engine.noise import seed_of
from holdfast.errors import HoldfastError, Mistake

__all__ = [
    "Environment",
    "Limits",
    "Purpose",
    "Score",
    "Spoilt",
    "Task",
    "check_score",
    "check_task",
    "held_out",
    "limits_of",
]

Purpose = Literal["train", "eval"]

_HELD_OUT = 10
"""One task in so many is for evaluation."""


class Spoilt(HoldfastError):
    """An environment failed on this group: it raised, hung, died or gave what is no score."""


class Task(msgspec.Struct, frozen=True):
    """One task. `facts` is whatever else the environment wants back; JSON, like the rest."""

    prompt: str
    answer: str = ""
    facts: dict[str, Any] = {}


class Score(msgspec.Struct, frozen=True):
    """What an episode is worth.

    `per_token` is dense credit, a number for each generated token; without it the whole episode
    shares `reward`.
    """

    reward: float
    exact: bool = False
    per_token: tuple[float, ...] | None = None


class Limits(msgspec.Struct, frozen=True):
    """How much a model may say: tokens in a turn, and turns."""

    max_tokens: int
    max_turns: int = 1


class Environment(ABC):
    """Tasks, and scores for what was made of them. One turn, unless `max_turns` says more."""

    max_tokens: int = 64
    """In each turn."""
    max_turns: int = 1

    @abstractmethod
    def task(self, seed: int, purpose: Purpose) -> Task:
        """The task of a seed. `held_out` tells which ones are for evaluation."""

    @abstractmethod
    def score(self, task: Task, turns: Sequence[str], pieces: Sequence[str]) -> Score:
        """What an episode is worth: `turns` is what was said, `pieces` each token of it."""

    def reply(self, task: Task, turns: Sequence[str]) -> str | None:  # noqa: ARG002 - for others
        """What the environment says next; None when the episode is over."""
        return None


def held_out(*words: str | int) -> bool:
    """Whether the task that these words describe is for evaluation: one in ten, by a hash."""
    return seed_of("held out", *words) % _HELD_OUT == 0


def limits_of(environment: Environment) -> Limits:
    """Its limits, if they are numbers."""
    for name in ("max_tokens", "max_turns"):
        value = getattr(environment, name)
        if type(value) is not int or value < 1:
            what = type(environment).__name__
            raise Mistake(f"{what}.{name} is {value!r}: it must be a whole number, 1 or more")
    return Limits(environment.max_tokens, environment.max_turns)


def check_task(task: object) -> Task:
    """The task, if it is one that survives JSON; Spoilt otherwise."""
    if not isinstance(task, Task):
        raise Spoilt(f"the environment gave {_short(task)} for a task")
    try:
        return msgspec.json.decode(msgspec.json.encode(task), type=Task)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise Spoilt(f"the environment gave a task that is not JSON: {error}") from None


def check_score(score: object, pieces: Sequence[str]) -> Score:
    """The score, if it is one; Spoilt otherwise."""
    if not isinstance(score, Score):
        raise Spoilt(f"the environment gave {_short(score)} for a score")
    if not isinstance(score.exact, bool):
        raise Spoilt(f"the environment gave exact={_short(score.exact)}, not true or false")
    reward = _number("a reward", score.reward)
    if score.per_token is None:
        return Score(reward, score.exact)
    if not isinstance(score.per_token, list | tuple):
        raise Spoilt(f"the environment gave {_short(score.per_token)} for per_token")
    if len(score.per_token) != len(pieces):
        raise Spoilt(
            f"the environment gave per_token {len(score.per_token)} numbers"
            f" for {len(pieces)} generated tokens"
        )
    credit = tuple(_number("per_token", value) for value in score.per_token)
    return Score(reward, score.exact, credit)


def _number(what: str, value: object) -> float:
    """The value as a float. Numpy's numbers are welcome, True and False too."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, str | bytes) or not math.isfinite(number):
        raise Spoilt(f"the environment gave {what} of {_short(value)}: it must be a finite number")
    return number


def _short(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - somebody else's object, and only for a message
        return f"an object of type {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:60]}… ({type(value).__name__})"
