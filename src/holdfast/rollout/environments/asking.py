"""Asking an environment, in the process where it lives: questions in, checked answers out."""

import traceback
from typing import Any

from holdfast.rollout.environments.base import (
    Environment,
    Score,
    Spoilt,
    Task,
    check_score,
    check_task,
)
from holdfast.rollout.environments.wire import AskReply, AskScores, AskTasks

__all__ = ["answer", "blame"]


def answer(environment: Environment, ask: AskTasks | AskScores | AskReply) -> Any:
    """What the environment says. Raises what the environment raises, or `Spoilt`."""
    match ask:
        case AskTasks():
            return [check_task(environment.task(seed, ask.purpose)) for seed in ask.seeds]
        case AskScores():
            return [_score(environment, ask.task, *episode) for episode in ask.episodes]
        case AskReply():
            reply = environment.reply(ask.task, tuple(ask.turns))
            if reply is not None and not isinstance(reply, str):
                raise Spoilt(f"the environment gave a {type(reply).__name__} for a reply")
            return reply


def _score(environment: Environment, task: Task, turns: list[str], pieces: list[str]) -> Score:
    return check_score(environment.score(task, tuple(turns), tuple(pieces)), pieces)


def blame(error: BaseException) -> str:
    """The error in one line, and where it was raised."""
    if isinstance(error, Spoilt):
        return str(error)
    text = traceback.format_exception_only(error)[-1].strip()
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{text[:1000]}{where}"
