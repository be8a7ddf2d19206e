"""Lists of tasks: reading them, and holding some out."""

import json
from pathlib import Path

import pytest

from holdfast.errors import Mistake
from holdfast.rollout.environments import Task
from holdfast.rollout.environments.base import Purpose
from holdfast.rollout.environments.tasks import TaskList, read_tasks


def prompts(tasks: TaskList, purpose: Purpose, seeds: int = 3000) -> set[str]:
    return {tasks.task(seed, purpose).prompt for seed in range(seeds)}


@pytest.mark.parametrize("count", [2, 3, 7, 300])
def test_held_out_by_prompt(count: int) -> None:
    """Every prompt is for one purpose and both have some, also in the shortest list."""
    listed = [Task(f"{number}", answer) for number in range(count) for answer in ("a", "b")]
    tasks = TaskList(listed)
    train, held = prompts(tasks, "train"), prompts(tasks, "eval")
    assert 0 < len(train) < count
    assert len(train) + len(held) == len(train | held) == count


def test_the_order_of_the_list_does_not_matter() -> None:
    """The same tasks in another order give the same task for each seed."""
    listed = [Task(f"{number // 2}", "", {"b": number, "a": -number}) for number in range(50)]
    turned = [Task(task.prompt, "", dict(reversed(task.facts.items()))) for task in listed[::-1]]
    for seed in range(100):
        assert TaskList(listed).task(seed, "train") == TaskList(turned).task(seed, "train")


def test_ones_own_evaluation() -> None:
    """Tasks that are given for evaluation are never trained on, even if they are listed."""
    tasks = TaskList([Task("a"), Task("b"), Task("c")], [Task("c"), Task("d")])
    assert (prompts(tasks, "train"), prompts(tasks, "eval")) == ({"a", "b"}, {"c", "d"})


@pytest.mark.parametrize("listed", [[], [Task("a")], [Task("a", "1"), Task("a", "2")]])
def test_too_few(listed: list[Task]) -> None:
    """What cannot be divided is refused."""
    with pytest.raises(Mistake, match="two different prompts"):
        TaskList(listed)


def test_reading(tmp_path: Path) -> None:
    """A file of JSON lines, empty ones skipped, or the tasks themselves."""
    file = tmp_path / "tasks.jsonl"
    rows = [{"prompt": "é", "answer": "1"}, {"prompt": "b", "facts": {"n": [1]}}]
    file.write_text("\n\n".join(map(json.dumps, rows)))
    for source in (str(file), rows):
        assert read_tasks("tasks", source) == [Task("é", "1"), Task("b", "", {"n": [1]})]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"prompt": "a"}\n{"promt": "b"}\n', "line 2.*promt"),
        ('{"prompt": 3}', "line 1.*str"),
        ("prompt", "line 1"),
        ('{"prompt": "a"}\n\n{', "line 3"),
        (b"\xff\xfe", "line 1"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, text: str | bytes, told: str) -> None:
    """A line that is no task is a mistake that says which line, and what a task is."""
    file = tmp_path / "tasks.jsonl"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(Mistake, match=f"tasks: {told}.*a task is"):
        read_tasks("tasks", str(file))


@pytest.mark.parametrize(
    ("source", "told"), [("none.jsonl", r"none\.jsonl"), (".", "cannot be read"), (7, "tasks: ")]
)
def test_no_file(source: object, told: str) -> None:
    """What is no file, and no list of tasks, is told as such."""
    with pytest.raises(Mistake, match=told):
        read_tasks("tasks", source)
