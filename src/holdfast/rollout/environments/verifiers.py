"""Environments of the library `verifiers`, in the form that its versions 0.1 load.

The library runs a conversation against a client of its own. Here that client plays what our model
has said, from the beginning, each time: so nothing is kept between two questions, several turns
work as the environment means them (its set-up, its answers, its stop conditions), and one that is
deterministic stays so. Where the script ends is where the model is asked.

Messages become text by the options `message` and `opening`: see `chat`.

What it does not do: rewards of a whole group, pictures, tool calls as anything but text. A reward
function that raises is worth 0: the library itself says so, in its log. The form that newer
versions have is in `verifiers_v1`.
"""

import asyncio
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.errors import MissingPackage, Mistake
from holdfast.rollout.environments.base import Environment, Purpose, Score, Task
from holdfast.rollout.environments.chat import MESSAGE, OPENING, as_text
from holdfast.rollout.environments.tasks import TaskList

__all__ = ["Verifiers", "library"]

_DEFAULT_TURNS = 8


class _More(Exception):
    """The script is over, and the model is asked: with these messages."""

    def __init__(self, messages: Sequence[Any]) -> None:
        super().__init__(f"the environment asks for more than {_said(messages)} turns")
        self.messages = messages


class Verifiers(Environment):
    """An environment by its id. Options that are not named here are the environment's own."""

    def __init__(
        self,
        env_id: str,
        /,
        *,
        max_tokens: int = 64,
        max_turns: int | None = None,
        message: str = MESSAGE,
        opening: str = OPENING,
        **options: Any,
    ) -> None:
        self._library = library()
        self._environment = self._library.load_environment(env_id, **options)
        if self._environment.requires_group_rollouts:
            raise Mistake(f"verifiers:{env_id} rewards whole groups, which is not supported here")
        self._runner = asyncio.Runner()
        self._message, self._opening = message, opening
        self.max_tokens = max_tokens
        own = getattr(self._environment, "max_turns", 1)
        self.max_turns = max_turns or (own if own > 0 else _DEFAULT_TURNS)
        if own > 0:
            self.max_turns = min(own, self.max_turns)
        self._environment.max_turns = self.max_turns
        self._rows: dict[str, Any] = {"train": self._environment.build_dataset()}
        self._rows["eval"] = self._environment.build_eval_dataset()
        if self._rows["train"] is None:  # made for evaluation alone: some of it is to train on
            self._rows["train"], self._rows["eval"] = self._rows["eval"], None
        evaluation = None if self._rows["eval"] is None else self._list("eval")
        self._tasks = TaskList(self._list("train"), evaluation)

    def task(self, seed: int, purpose: Purpose) -> Task:
        """A row of its data."""
        return self._tasks.task(seed, purpose)

    def score(self, task: Task, turns: Sequence[str], pieces: Sequence[str]) -> Score:  # noqa: ARG002
        """What its rubric says."""
        reward = self._runner.run(self._reward(task, turns))
        return Score(reward, exact=reward >= 1.0)

    def reply(self, task: Task, turns: Sequence[str]) -> str | None:
        """What it says after the last turn."""
        try:
            self._runner.run(self._play(task, turns))
        except _More as more:
            return self._text(_new(more.messages))
        return None

    async def _reward(self, task: Task, turns: Sequence[str]) -> float:
        state = await self._play(task, turns)
        await self._environment.rubric.score_rollout(state)
        await self._environment.rubric.cleanup(state)
        return float(state["reward"])

    async def _play(self, task: Task, turns: Sequence[str]) -> Any:
        row = self._rows[task.facts["set"]][task.facts["row"]]
        client = _script(self._library, turns)
        state = await self._environment.rollout(row, client, "holdfast", {})
        if state["error"] is not None:
            raise state["error"]
        return state

    def _list(self, name: str) -> list[Task]:
        return [
            Task(self._text(row["prompt"]), _answer(row), {"set": name, "row": place})
            for place, row in enumerate(self._rows[name])
        ]

    def _text(self, messages: Any) -> str:
        if isinstance(messages, str):
            return as_text([("user", messages)], self._message, self._opening)
        pairs = [(each["role"], _content(each)) for each in messages]
        return as_text(pairs, self._message, self._opening)


def library() -> Any:
    """The library, if it is installed."""
    try:
        return importlib.import_module("verifiers")
    except ModuleNotFoundError as error:
        if error.name != "verifiers":
            raise
        raise MissingPackage(
            "the package verifiers is not installed: pip install verifiers, or for an"
            ' environment that has load_environment: pip install "verifiers<0.2"'
        ) from None


def _script(verifiers: Any, turns: Sequence[str]) -> Any:
    """A client of the library's that says `turns`, one after the other."""
    types = importlib.import_module("verifiers.types")
    left = list(turns)

    async def get_response(_: Any, prompt: Sequence[Any], model: str, *__: Any, **___: Any) -> Any:
        if not left:
            raise _More(prompt)
        said = types.ResponseMessage(
            content=left.pop(0), finish_reason="stop", is_truncated=False, tokens=None
        )
        return types.Response(id="", created=0, model=model, usage=None, message=said)

    base = verifiers.Client
    # Its other methods are about other people's protocols, and are not called.
    unused = dict.fromkeys(base.__abstractmethods__)
    return type("Script", (base,), {**unused, "get_response": get_response})(None)


def _new(messages: Sequence[Any]) -> list[Any]:
    """What came after the last thing that the model said."""
    places = [place for place, each in enumerate(messages) if each["role"] == "assistant"]
    return list(messages[places[-1] + 1 :]) if places else list(messages)


def _said(messages: Sequence[Any]) -> int:
    return sum(each["role"] == "assistant" for each in messages)


def _content(message: Mapping[str, Any]) -> str:
    content = message["content"]
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part["text"] for part in content if part["type"] == "text")


def _answer(row: Mapping[str, Any]) -> str:
    answer = row.get("answer")
    return "" if answer is None else str(answer)
