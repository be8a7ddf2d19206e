"""Somebody's reward function and list of tasks, as an environment of one turn.

    def reward(prompt: str, answer: str, completion: str) -> float: ...

The parameters go by these names, and a function may leave out those it does not need. There is
also `facts`, those of the task, and `pieces`, the text of each token. It may return a whole
`Score`, too. A completion is exact when it is the answer, blanks around it aside; where a task
has no answer, when its reward is 1 or more.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from holdfast.errors import Mistake
from holdfast.rollout.environments.base import Environment, Purpose, Score, Task, check_score
from holdfast.rollout.environments.tasks import TaskList, read_tasks

__all__ = ["RewardFunction", "is_reward"]

_PARAMETERS = frozenset({"prompt", "answer", "completion", "facts", "pieces"})


def is_reward(function: Callable[..., Any]) -> bool:
    """Whether it is a reward function: one that asks for the completion."""
    return inspect.isroutine(function) and "completion" in inspect.signature(function).parameters


class RewardFunction(Environment):
    """A function and its tasks. `eval_tasks` takes the place of holding some of them out."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        tasks: object,
        eval_tasks: object = None,
        max_tokens: int = 64,
    ) -> None:
        wanted = inspect.signature(function).parameters.values()
        self._wanted = [each.name for each in wanted if each.name in _PARAMETERS]
        for each in wanted:
            if each.default is each.empty and each.name not in _PARAMETERS:
                raise Mistake(
                    f"the reward function asks for {each.name}: there is prompt, answer,"
                    " completion, facts and pieces"
                )
        self.max_tokens = max_tokens
        self._function = function
        evaluation = None if eval_tasks is None else read_tasks("eval_tasks", eval_tasks)
        self._tasks = TaskList(read_tasks("tasks", tasks), evaluation)

    def task(self, seed: int, purpose: Purpose) -> Task:
        """One of the list."""
        return self._tasks.task(seed, purpose)

    def score(self, task: Task, turns: Sequence[str], pieces: Sequence[str]) -> Score:
        """What the function says."""
        completion = "".join(turns)
        known = {
            "prompt": task.prompt,
            "answer": task.answer,
            "completion": completion,
            "facts": dict(task.facts),
            "pieces": list(pieces),
        }
        result = self._function(**{name: known[name] for name in self._wanted})
        if isinstance(result, Score):
            return result
        score = check_score(Score(result), pieces)
        same = completion.strip() == task.answer.strip()
        return Score(score.reward, same if task.answer else score.reward >= 1.0)
