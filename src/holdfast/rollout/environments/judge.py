"""Asking an environment without trusting it with this process.

Whatever the environment does (raise, return nonsense, hang, exit, crash), the caller gets `Spoilt`
within a limit and goes on. Those that are shipped are pure and quick and run right here; a plug-in
runs in a process of its own, see `outside`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from holdfast.errors import Mistake
from holdfast.rollout.environments.base import Limits, Purpose, Score, Spoilt, Task, limits_of
from holdfast.rollout.environments.loading import is_plugin, load_environment
from holdfast.rollout.environments.outside import Outside
from holdfast.rollout.environments.wire import Ask, AskReply, AskScores, AskTasks, answer, blame

__all__ = ["Judge"]

_T = TypeVar("_T")


class Judge:
    """An environment, from the outside.

    `limit_s` bounds each question: all the tasks of a call, all the scores of a group, one reply.
    A plug-in is loaded when it is first asked, from the thread that asks; a `Mistake` tells that
    it does not load.
    """

    def __init__(self, name: str, options: Mapping[str, Any], *, limit_s: float = 10.0) -> None:
        if not 0 < limit_s < math.inf:
            raise Mistake(f"limit_s is {limit_s}: it must be a number of seconds above 0")
        self._environment: Outside | _Inside
        if is_plugin(name):
            self._environment = Outside(name, options, limit_s)
        else:
            self._environment = _Inside(name, options)

    async def limits(self) -> Limits:
        """How much a model may say."""
        return await self._environment.limits()

    async def tasks(self, seeds: Sequence[int], purpose: Purpose) -> list[Task]:
        """The tasks of these seeds, in order."""
        tasks = await self._environment.ask(AskTasks(list(seeds), purpose), list[Task])
        return _all("tasks", tasks, len(seeds))

    async def scores(
        self, task: Task, episodes: Sequence[tuple[Sequence[str], Sequence[str]]]
    ) -> list[Score]:
        """What each episode of a group is worth; an episode is its turns and its pieces."""
        ask = AskScores(task, [(list(turns), list(pieces)) for turns, pieces in episodes])
        scores = await self._environment.ask(ask, list[Score])
        return _all("scores", scores, len(episodes))

    async def reply(self, task: Task, turns: Sequence[str]) -> str | None:
        """What the environment says next; None when the episode is over."""
        kind: Any = str | None
        said: str | None = await self._environment.ask(AskReply(task, list(turns)), kind)
        return said

    async def close(self) -> None:
        """End the environment's process, if it has one."""
        await self._environment.close()


class _Inside:
    """A shipped environment, in this process."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self._environment = load_environment(name, options)

    async def limits(self) -> Limits:
        return limits_of(self._environment)

    async def ask(self, ask: Ask, kind: type[_T]) -> _T:  # noqa: ARG002
        try:
            result: _T = answer(self._environment, ask)
        except (Exception, SystemExit) as error:
            raise Spoilt(blame(error)) from error
        return result

    async def close(self) -> None:
        pass


def _all(what: str, found: list[_T], wanted: int) -> list[_T]:
    if len(found) != wanted:
        raise Spoilt(f"the environment gave {len(found)} {what} where {wanted} were asked for")
    return found
