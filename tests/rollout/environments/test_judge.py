"""A judge: whatever somebody's environment does, it costs one group and nothing else."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import HoldfastError, MissingPackage, Mistake, NotFound
from holdfast.rollout.environments import Judge, Limits, Score, Spoilt, Task
from kids import alive
from patience import HANG_S, auntil

PLUGIN = """
import ctypes, os, signal, subprocess, sys, time
from holdfast.rollout.environments import Environment, Score, Task

def no(text):
    raise ValueError(text)

def child():
    started = subprocess.Popen(["sleep", "600"])
    with open("grandchild", "w") as file:
        file.write(str(started.pid))
    time.sleep(600)

def loud():
    print('{"number": 1}', flush=True)
    os.write(1, b"x" * 100_000)
    subprocess.run(["echo", "from a child"])
    return 1.0, sys.stdin.read()

class Odd(Exception):
    def __str__(self):
        raise RuntimeError("no text either")

def odd():
    raise Odd

class Wild(Environment):
    max_tokens = 5
    max_turns = 2
    def task(self, seed, purpose):
        return {0: Task("plain", "a", {"n": 1}), 1: "no task", 2: Task("x", facts={"f": object}),
                3: Task(7)}[seed]
    def score(self, task, turns, pieces):
        said = turns[0]
        return eval(said) if said.startswith("Score") or "(" in said else Score(0.5, True)
    def reply(self, task, turns):
        return eval(turns[-1])
"""
TASK = Task("prompt")
Make = Callable[..., Judge]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "wild.py").write_text(PLUGIN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
async def make(folder: Path) -> AsyncIterator[Make]:
    """Makes judges, of the wild environment if no other is named, and closes them."""
    async with contextlib.AsyncExitStack() as stack:

        def make(name: str = "wild:Wild", limit_s: float = 20.0) -> Judge:
            judge = Judge(name, {}, limit_s=limit_s)
            stack.push_async_callback(judge.close)
            return judge

        yield make


@pytest.fixture
def judge(make: Make) -> Judge:
    return make()


def said(text: str, *pieces: str) -> tuple[list[str], list[str]]:
    return [text], list(pieces) or [text]


def pid_of(judge: Judge) -> int | None:
    """The process that runs the environment, if it has one of its own now."""
    process = getattr(judge._environment, "_process", None)
    return None if process is None else int(process.child.pid)


async def fine(judge: Judge) -> bool:
    return await judge.scores(TASK, [said("fine"), said("too")]) == [Score(0.5, True)] * 2


async def gone(pid: int | None) -> None:
    """Wait until a process has ended; one that only waits to be collected has."""
    assert pid is not None
    await auntil(lambda: not alive(pid), f"the end of process {pid}")


NONSENSE = {
    "no('what is wrong')": "ValueError: what is wrong.*wild.py:6",
    "odd()": "wild.py",
    "sys.exit(3)": "SystemExit: 3",
    "Score(float('nan'))": "a reward of nan",
    "Score(float('-inf'))": "a reward of -inf",
    "Score('0.5')": "a reward of '0.5'",
    "Score(None)": "a reward of None",
    "Score([1.0])": r"a reward of \[1.0\]",
    "Score(1, exact='yes')": "exact='yes'",
    "Score(1, per_token=(1.0,))": "1 numbers for 2 generated tokens",
    "Score(1, per_token=(1.0, float('inf')))": "per_token of inf",
    "Score(1, per_token=7)": "7 for per_token",
    "str(3)": "'3' for a score",
    "'x' * (1 << 20) + str()": r"… \(str\) for a score",
    "(yield_ := 1)": "1 for a score",
    "loud()": r"\(1.0, ''\) for a score",
}


async def test_nonsense_costs_the_group(judge: Judge) -> None:
    """What raises or is no score is told as such; the same process goes on."""
    assert await fine(judge)
    pid = pid_of(judge)
    for text, told in NONSENSE.items():
        with pytest.raises(Spoilt, match=told):
            await judge.scores(TASK, [said("fine"), said(text, "a", "b")])
        assert await fine(judge), text
    assert pid_of(judge) == pid is not None


async def test_scores_arrive_whole(judge: Judge) -> None:
    """Numbers come back as they were, those of numpy's types and whole ones as floats."""
    both = (
        "Score(__import__('numpy').float32(0.1), True, [1, __import__('numpy').float64(1e-300)])"
    )
    (score,) = await judge.scores(TASK, [said(both, "a", "b")])
    assert score == Score(0.10000000149011612, True, (1.0, 1e-300))
    assert await judge.scores(TASK, []) == []


ENDINGS = {
    "os._exit(7)": "ended with code 7",
    "ctypes.string_at(0)": "ended with code -11",
    "os.kill(os.getpid(), signal.SIGKILL)": "ended with code -9",
    "os.closerange(3, 100)": "ended with code|no proper answer",
}


async def test_a_death_costs_the_group(judge: Judge) -> None:
    """An environment that ends its process is started again for the next group."""
    for text, told in ENDINGS.items():
        assert await fine(judge)
        pid = pid_of(judge)
        with pytest.raises(Spoilt, match=told):
            await judge.scores(TASK, [said(text)])
        assert pid_of(judge) is None
        await gone(pid)
    assert await fine(judge)


async def test_a_hang_costs_the_group(make: Make, folder: Path) -> None:
    """One that hangs is killed after its time, with what it started; the next group is fine."""
    judge = make(limit_s=1.5)
    for text in ("child()", "(lambda: [0 for _ in iter(int, 1)])()"):
        assert await fine(judge)
        pid = pid_of(judge)
        begun = time.monotonic()
        with pytest.raises(Spoilt, match=r"did not answer within 1\.5 s"):
            await judge.scores(TASK, [said(text)])
        assert time.monotonic() - begun > 1.4
        await gone(pid)
    await gone(int((folder / "grandchild").read_text()))
    assert await fine(judge)


async def test_others_wait_their_turn(make: Make) -> None:
    """Groups asked at once are answered one by one: one that hangs or dies spoils no other."""
    judge = make(limit_s=1.5)
    assert await fine(judge)
    hang, death = said("time.sleep(600)"), said("os._exit(1)")
    asked = [fine(judge), judge.scores(TASK, [hang]), fine(judge), judge.scores(TASK, [death])]
    results = await asyncio.gather(*asked, fine(judge), return_exceptions=True)
    kinds = [result is True or type(result) for result in results]
    assert kinds == [True, Spoilt, True, Spoilt, True]


async def test_a_late_answer_is_nobodys(judge: Judge) -> None:
    """After a question that was given up, the next one gets its own answer."""
    assert await fine(judge)
    asking = asyncio.create_task(judge.scores(TASK, [said("time.sleep(0.2) or Score(0.9)")]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert await fine(judge)


async def test_tasks_and_replies(judge: Judge) -> None:
    """Tasks and replies are checked like scores."""
    assert await judge.limits() == Limits(5, 2)
    assert await judge.tasks([0, 0], "train") == [Task("plain", "a", {"n": 1})] * 2
    wrong = {1: "'no task' for a task", 2: "not JSON", 3: "not JSON.*prompt", 4: "KeyError"}
    for seed, told in wrong.items():
        with pytest.raises(Spoilt, match=told):
            await judge.tasks([0, seed], "eval")
    assert await judge.reply(TASK, ["'more'"]) == "more"
    assert await judge.reply(TASK, ["None"]) is None
    with pytest.raises(Spoilt, match="a int for a reply"):
        await judge.reply(TASK, ["5"])


async def test_lines_are_bounded(judge: Judge) -> None:
    """Neither a question nor an answer may be too large, and neither ends the process."""
    assert await fine(judge)
    pid = pid_of(judge)
    with pytest.raises(Spoilt, match="question is larger than 16 MiB"):
        await judge.scores(TASK, [said("x" * (17 << 20))])
    with pytest.raises(Spoilt, match="answer is larger than 16 MiB"):
        await judge.reply(TASK, ["'x' * (17 << 20)"])
    assert len(await judge.reply(TASK, ["'x' * (15 << 20)"]) or "") == 15 << 20
    assert await fine(judge)
    assert pid_of(judge) == pid


@pytest.mark.parametrize(
    ("name", "kind", "told"),
    [
        ("wild:Wilt", NotFound, "did you mean Wild"),
        ("bad:x", Mistake, "does not load: ZeroDivisionError"),
        ("ending:x", Mistake, "does not load: .*ended with code 4"),
        ("verifiers:x", MissingPackage, "pip install"),
    ],
)
async def test_what_does_not_load_is_a_mistake(
    name: str, kind: type[HoldfastError], told: str, make: Make, folder: Path
) -> None:
    """An environment that never loaded is a mistake in the configuration, told as one."""
    (folder / "bad.py").write_text("1 / 0")
    (folder / "ending.py").write_text("import os; os._exit(4)")
    (folder / "verifiers.py").write_text("raise ModuleNotFoundError(name='verifiers')")
    judge = make(name)
    with pytest.raises(kind, match=told):
        await judge.limits()
    assert pid_of(judge) is None


async def test_what_loaded_before_is_spoilt(judge: Judge, folder: Path) -> None:
    """One that loaded and does not any more costs groups, not the run, and may come back."""
    assert await fine(judge)
    (folder / "wild.py").write_text("1 / 0")
    for text in ("os._exit(1)", "fine"):
        with pytest.raises(Spoilt):
            await judge.scores(TASK, [said(text)])
    (folder / "wild.py").write_text(PLUGIN)
    assert await fine(judge)


async def test_closing_leaves_nothing(judge: Judge, folder: Path) -> None:
    """Closing ends the process at once, also under a question; nothing is asked afterwards."""
    assert await fine(judge)
    pid = pid_of(judge)
    asking = asyncio.create_task(judge.scores(TASK, [said("child()")]))
    file = folder / "grandchild"
    await auntil(lambda: file.exists() and file.read_text())
    await judge.close()
    with pytest.raises(Spoilt):
        await asyncio.wait_for(asking, HANG_S)
    await gone(pid)
    await gone(int(file.read_text()))
    with pytest.raises(Mistake, match="closed"):
        await judge.limits()
    await judge.close()


PARENT = """
import asyncio, sys
from holdfast.rollout.environments import Judge, Task

async def main():
    judge = Judge("wild:Wild", {}, limit_s=600)
    await judge.limits()
    print(judge._environment._process.child.pid, flush=True)
    await judge.scores(Task(""), [(["time.sleep(600)"], [])])

asyncio.run(main())
"""


async def test_it_dies_with_its_parent(folder: Path) -> None:
    """A judge's process that is killed takes the environment's process with it."""
    argv = [sys.executable, "-c", PARENT]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(await asyncio.wait_for(asyncio.to_thread(parent.stdout.readline), HANG_S))
        os.kill(pid, 0)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        await gone(pid)


async def test_in_this_process() -> None:
    """Shipped ones need no process; what they cannot answer is the same `Spoilt`."""
    judge = Judge("reverse", {"digits": 3})
    assert pid_of(judge) is None
    assert await judge.limits() == Limits(3, 1)
    (task,) = await judge.tasks([5], "eval")
    (score,) = await judge.scores(task, [([task.answer], list(task.answer))])
    assert score == Score(1.0, True, (1.0, 1.0, 1.0))
    assert await judge.reply(task, ["x"]) is None
    nothing: Any = [5]
    with pytest.raises(Spoilt, match="TypeError"):
        await judge.scores(task, [(nothing, nothing)])
    await judge.close()
    with pytest.raises(Mistake, match="limit_s"):
        Judge("reverse", {}, limit_s=0)


async def test_shipped_ones_give_the_same_outside(make: Make) -> None:
    """Where an environment runs makes no difference to what it says."""
    here, outside = make("increment"), make("holdfast.rollout.environments.digits:Increment")
    tasks = await here.tasks(range(50), "train")
    assert tasks == await outside.tasks(range(50), "train")
    episodes = [said("12345", *"12345"), said(tasks[0].answer, *tasks[0].answer)]
    assert await here.scores(tasks[0], episodes) == await outside.scores(tasks[0], episodes)
