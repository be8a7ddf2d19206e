"""What is said between a judge and the process that runs somebody's environment.

One line of JSON each way: a question, then its answer. The first question is how to load the
environment. Lines are bounded. No pickle: what comes back is checked against a type.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from holdfast.rollout.environments.base import Purpose, Task

__all__ = ["MAX_LINE_BYTES", "Answer", "AskLoad", "AskReply", "AskScores", "AskTasks", "Question"]

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


class Question(msgspec.Struct, frozen=True):
    """A numbered question."""

    number: int
    ask: AskLoad | AskTasks | AskScores | AskReply


class Answer(msgspec.Struct, frozen=True):
    """The result of the question of this number, or what went wrong.

    `mistake` is the name of a class of errors if loading failed because of the configuration.
    """

    number: int
    result: msgspec.Raw = msgspec.Raw(b"null")
    error: str | None = None
    mistake: str | None = None
