"""The process that runs somebody's environment. A judge starts it and asks: see `wire`.

What the environment prints goes to standard error, and standard input is empty for it: the line
to the judge is kept on descriptors of its own. The process ends when the judge closes that line.
"""

import os
import sys
from typing import BinaryIO

import msgspec

from holdfast.errors import Mistake
from holdfast.rollout.environments.base import Environment, limits_of
from holdfast.rollout.environments.loading import load_environment
from holdfast.rollout.environments.wire import (
    MAX_LINE_BYTES,
    Answer,
    AskLoad,
    Question,
    answer,
    blame,
)


def main() -> None:
    """Answer until the line ends."""
    questions, answers = _line()
    environment: Environment | None = None
    while raw := questions.readline(MAX_LINE_BYTES):
        question = msgspec.json.decode(raw, type=Question)
        try:
            if isinstance(question.ask, AskLoad):
                environment = load_environment(question.ask.name, question.ask.options)
                result: object = limits_of(environment)
            else:
                assert environment is not None, "nothing was loaded"
                result = answer(environment, question.ask)
            said = Answer(question.number, msgspec.Raw(msgspec.json.encode(result)))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - somebody else's code
            said = _failure(question, error)
        answers.write(_encoded(said))
        answers.flush()


def _line() -> tuple[BinaryIO, BinaryIO]:
    questions, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - line by line
    return questions, answers


def _failure(question: Question, error: BaseException) -> Answer:
    if not isinstance(question.ask, AskLoad):
        return Answer(question.number, error=blame(error))
    if isinstance(error, Mistake):
        return Answer(question.number, error=str(error), mistake=type(error).__name__)
    text = f"environment {question.ask.name} does not load: {blame(error)}"
    return Answer(question.number, error=text, mistake="Mistake")


def _encoded(said: Answer) -> bytes:
    data = msgspec.json.encode(said) + b"\n"
    if len(data) <= MAX_LINE_BYTES:
        return data
    text = f"the environment's answer is larger than {MAX_LINE_BYTES >> 20} MiB"
    return msgspec.json.encode(Answer(said.number, error=text)) + b"\n"


if __name__ == "__main__":
    main()
