"""A list of tasks: where it comes from, and which of them are held out.

Invariants: the same tasks give the same task for a seed, in whatever order they are listed. A
prompt that is for evaluation is not for training, whatever its answer. There is at least one task
for each purpose, or an error.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from holdfast.engine.noise import seed_of
from holdfast.errors import Denied, Mistake, NotFound, TooLarge
from holdfast.rollout.environments.base import Purpose, Task, held_out

__all__ = ["TaskList", "read_tasks"]

_MAX_BYTES = 256 << 20


class _Row(Task, frozen=True, forbid_unknown_fields=True):
    """What a line of the file may say: a task, and nothing else."""


class TaskList:
    """Tasks by seed. Without `evaluation` one prompt in ten is held out, by its hash."""

    def __init__(self, tasks: Sequence[Task], evaluation: Sequence[Task] | None = None) -> None:
        if evaluation is None:
            kept = _kept({task.prompt for task in tasks})
            evaluation = [task for task in tasks if task.prompt in kept]
        else:
            kept = {task.prompt for task in evaluation}
        training = [task for task in tasks if task.prompt not in kept]
        if not training or not evaluation:
            purpose = "evaluation" if training else "training"
            raise Mistake(
                f"no task is left for {purpose}: at least two different prompts are needed"
            )
        self._tasks = {"train": _sorted(training), "eval": _sorted(evaluation)}

    def task(self, seed: int, purpose: Purpose) -> Task:
        """The task of a seed."""
        tasks = self._tasks[purpose]
        return tasks[seed_of("task", seed, purpose) % len(tasks)]


def read_tasks(option: str, source: object) -> list[Task]:
    """The tasks of an option: the path of a file of JSON lines, or the tasks themselves."""
    try:
        if isinstance(source, str):
            rows = [_row(place, line) for place, line in enumerate(_lines(Path(source)), 1)]
        else:
            rows = msgspec.convert(source, list[_Row])
    except msgspec.ValidationError as error:
        raise Mistake(
            f'{option}: {error}; a task is {{"prompt": …, "answer": …, "facts": {{…}}}}'
        ) from None
    return [Task(row.prompt, row.answer, row.facts) for row in rows if row is not None]


def _kept(prompts: set[str]) -> set[str]:
    kept = {prompt for prompt in prompts if held_out(prompt)}
    # A short list may have no such prompt, or no other.
    if not kept:
        return set(sorted(prompts, key=seed_of)[:1])
    return kept if kept != prompts else set(sorted(prompts, key=seed_of)[1:])


def _sorted(tasks: Iterable[Task]) -> list[Task]:
    return sorted(tasks, key=msgspec.json.Encoder(order="deterministic").encode)


def _lines(path: Path) -> list[bytes]:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise TooLarge(f"{path} is larger than {_MAX_BYTES >> 20} MiB")
        return path.read_bytes().splitlines()
    except FileNotFoundError:
        raise NotFound(f"there is no file {path} in {Path.cwd()}") from None
    except PermissionError:
        raise Denied(f"{path} may not be read") from None
    except OSError as error:
        raise Mistake(f"{path} cannot be read: {error.strerror}") from None


def _row(place: int, line: bytes) -> _Row | None:
    if not line.strip():
        return None
    try:
        return msgspec.json.decode(line, type=_Row)
    except msgspec.DecodeError as error:
        raise msgspec.ValidationError(f"line {place}: {error}") from None
