"""Tasksets of the library `verifiers`, in the form of its `verifiers.v1`.

A task is a prompt, and its rewards score the answer: one turn. What needs more than the answer is
refused when it is loaded, because it would be worth 0 without a word: tasks with a container,
tools, a set-up of their own or a user who speaks, and rewards that look into a sandbox.
"""

import asyncio
import importlib
import inspect
from collections.abc import Sequence
from typing import Any

from holdfast.errors import Mistake
from holdfast.rollout.environments.base import Environment, Purpose, Score, Task
from holdfast.rollout.environments.chat import MESSAGE, OPENING, as_text
from holdfast.rollout.environments.tasks import TaskList

__all__ = ["VerifiersTaskset"]

_MAX_TASKS = 10_000
"""So many are read of a taskset that has no end."""


class VerifiersTaskset(Environment):
    """A taskset by its id. Options that are not named here are settings of the taskset."""

    def __init__(
        self,
        taskset_id: str,
        /,
        *,
        max_tokens: int = 64,
        message: str = MESSAGE,
        opening: str = OPENING,
        **options: Any,
    ) -> None:
        self._v1: Any = importlib.import_module("verifiers.v1")
        settings = {"id": taskset_id, **options}
        config = self._v1.taskset_config_type(taskset_id).model_validate(settings)
        taskset = self._v1.load_taskset(config)
        self._tasks = list(taskset if taskset.bounded else taskset.take(_MAX_TASKS))
        self._runner = asyncio.Runner()
        self.max_tokens = max_tokens
        listed = []
        for row, task in enumerate(self._tasks):
            self._check(taskset_id, task)
            text = as_text(self._messages(task.data), message, opening)
            answer = getattr(task.data, "answer", None)
            listed.append(Task(text, "" if answer is None else str(answer), {"row": row}))
        self._list = TaskList(listed)

    def task(self, seed: int, purpose: Purpose) -> Task:
        """One of its tasks."""
        return self._list.task(seed, purpose)

    def score(self, task: Task, turns: Sequence[str], pieces: Sequence[str]) -> Score:  # noqa: ARG002
        """What the task's own rewards say."""
        reward = self._runner.run(self._reward(self._tasks[task.facts["row"]], "".join(turns)))
        return Score(reward, exact=reward >= 1.0)

    async def _reward(self, task: Any, said: str) -> float:
        v1 = self._v1
        messages = [
            (v1.SystemMessage if role == "system" else v1.UserMessage)(content=content)
            for role, content in self._messages(task.data)
        ]
        nodes = [
            v1.MessageNode(message=each, parent=place - 1 if place else None)
            for place, each in enumerate(messages)
        ]
        last = v1.AssistantMessage(content=said)
        nodes.append(v1.MessageNode(message=last, parent=len(nodes) - 1, sampled=True))
        trace = v1.Trace(
            task=v1.TraceTask(type=type(task).__name__, data=task.data),
            agent=v1.AgentInfo(config=v1.AgentConfig()),
            nodes=nodes,
        )
        await task.score(trace)
        return float(trace.reward)

    def _messages(self, data: Any) -> list[tuple[str, str]]:
        found = [("system", data.system_prompt)] if data.system_prompt else []
        if isinstance(data.prompt, str):
            return [*found, ("user", data.prompt)]
        return found + [(each.role, _content(each.content)) for each in data.prompt or []]

    def _check(self, taskset_id: str, task: Any) -> None:
        base, rewards = self._v1.Task, task.hooks("reward")
        roles = {role for role, _ in self._messages(task.data)}
        for wrong, what in (
            (task.NEEDS_CONTAINER, "needs a container"),
            (type(task).toolsets(task.config), "has tools"),
            (type(task).setup is not base.setup, "has a set-up of its own"),
            (not roles or roles - {"system", "user"}, "has no prompt of a user's alone"),
            (not rewards and not task.config.judges, "has no reward"),
            (any(map(_needs_runtime, rewards)), "has a reward that looks into a sandbox"),
        ):
            if wrong:
                raise Mistake(f"verifiers:{taskset_id} {what}, which is not supported here")


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(getattr(part, "text", "") for part in content or [])


def _needs_runtime(reward: Any) -> bool:
    wanted = inspect.signature(reward).parameters.get("runtime")
    return wanted is not None and wanted.default is inspect.Parameter.empty
