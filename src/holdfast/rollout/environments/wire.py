"""What is said between a judge and the process that runs somebody's environment.

One line of JSON each way: a question, then its answer. The first question is how to load the
environment. Lines are bounded. No pickle: what comes back is checked against a type.

`answer` asks the environment, in the process where it lives: questions in, checked answers out.
"""

import traceback
from collections.abc import Mapping
from typing import Any

import msgspec

from holdfast.rollout.environments import base
from holdfast.rollout.environments.base import Environment, Purpose, Score, Spoilt, Task

__all__ = ["MAX_LINE_BYTES", "Answer", "Ask", "AskLoad", "AskReply", "AskScores", "AskTasks"]
__all__ += ["Question", "answer", "blame"]

MAX_LINE_BYTES = 16 << 20


class AskLoad(msgspec.Struct, frozen=True, tag="load"):
    """Load the environment; the answer is its limits."""

    name: str
    options: Mapping[str, Any]


class AskTasks(msgspec.Struct, frozen=True, tag="tasks"):
    """The tasks of these seeds."""

    seeds: list[int]
    purpose: Purpose


class AskScores(msgspec.Struct, frozen=True, tag="scores"):
    """The scores of a group; an episode is its turns and its pieces."""

    task: Task
    episodes: list[tuple[list[str], list[str]]]


class AskReply(msgspec.Struct, frozen=True, tag="reply"):
    """What the environment says next."""

    task: Task
    turns: list[str]


Ask = AskTasks | AskScores | AskReply
"""What a loaded environment can be asked."""


class Question(msgspec.Struct, frozen=True):
    """A numbered question."""

    number: int
    ask: AskLoad | Ask


class Answer(msgspec.Struct, frozen=True):
    """The result of the question of this number, or what went wrong.

    `mistake` is the name of a class of errors if loading failed because of the configuration.
    """

    number: int
    result: msgspec.Raw = msgspec.Raw(b"null")
    error: str | None = None
    mistake: str | None = None


def answer(environment: Environment, ask: Ask) -> Any:
    """What the environment says. Raises what the environment raises, or `Spoilt`."""
    match ask:
        case AskTasks():
            return [base.check_task(environment.task(seed, ask.purpose)) for seed in ask.seeds]
        case AskScores():
            return [_score(environment, ask.task, *episode) for episode in ask.episodes]
        case AskReply():
            reply = environment.reply(ask.task, tuple(ask.turns))
            if reply is not None and not isinstance(reply, str):
                raise Spoilt(f"the environment gave a {type(reply).__name__} for a reply")
            return reply


def _score(environment: Environment, task: Task, turns: list[str], pieces: list[str]) -> Score:
    return base.check_score(environment.score(task, tuple(turns), tuple(pieces)), pieces)


def blame(error: BaseException) -> str:
    """The error in one line, and where it was raised."""
    if isinstance(error, Spoilt):
        return str(error)
    text = traceback.format_exception_only(error)[-1].strip()
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{text[:1000]}{where}"
