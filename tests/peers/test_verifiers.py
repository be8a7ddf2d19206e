"""Environments of the real library `verifiers`, asked by a judge in a process of their own.

Its versions 0.1 load environments, newer ones tasksets: the tests of the other form are skipped.
`make test-peers` runs this file in an environment for each (`scripts/setup-peers verifiers` and
`verifiers-0.1`).
"""

import contextlib
import importlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from holdfast.errors import Mistake
from holdfast.rollout.environments import Judge, Spoilt

verifiers = importlib.import_module("verifiers")
OLD = hasattr(verifiers, "load_environment")
old = pytest.mark.skipif(not OLD, reason="needs verifiers<0.2")
new = pytest.mark.skipif(OLD, reason="needs verifiers>=0.4")

ENVIRONMENTS = """
import verifiers as vf
from datasets import Dataset

ROWS = [{"question": f"What is {n}+{n}?", "answer": str(2 * n)} for n in range(40)]

async def right(completion, answer):
    return 1.0 if completion[-1]["content"] == answer else 0.25

class Hotter(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        said = messages[-1]["content"]
        state["tries"] = state.get("tries", 0) + 1
        if said == "error":
            raise vf.Error("the environment's own error")
        if said == state["answer"]:
            state["final_env_response"] = [{"role": "user", "content": "yes"}]
            return state["final_env_response"]
        return [{"role": "user", "content": f"no, that was try {state['tries']}"}]

async def early(state, completion, answer):
    said = [each["content"] for each in completion if each["role"] == "assistant"]
    return 1.0 / len(said) if said[-1] == answer else 0.0

def load_environment(kind="single", rows=40, separate=False):
    data = dict(dataset=Dataset.from_list(ROWS[:rows]))
    if separate:
        data["eval_dataset"] = Dataset.from_list(ROWS[:3])
    if kind == "group":
        def grouped(completions) -> list[float]:
            return [0.0 for _ in completions]
        return vf.SingleTurnEnv(rubric=vf.Rubric(funcs=[grouped]), **data)
    if kind == "single":
        rubric = vf.Rubric(funcs=[right], weights=[1.0])
        return vf.SingleTurnEnv(system_prompt="Be brief.", rubric=rubric, **data)
    return Hotter(rubric=vf.Rubric(funcs=[early]), **data)
"""


TASKSETS = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str = ""

class Sum(vf.Task[Data]):
    @vf.reward
    async def right(self, trace):
        if trace.last_reply == "error":
            raise ValueError("what is wrong")
        assert trace.messages[0].content == "Be brief."
        return 1.0 if trace.last_reply == self.data.answer else 0.25

class Config(vf.TasksetConfig):
    rows: int = 40
    kind: str = "plain"

class Looking(Sum):
    @vf.reward
    async def looks(self, runtime):
        return 1.0

class Prepared(Sum):
    async def setup(self, trace, runtime):
        pass

class Worthless(vf.Task[Data]):
    pass

KINDS = {"plain": Sum, "looking": Looking, "prepared": Prepared, "worthless": Worthless}

class Sums(vf.Taskset[Sum, Config]):
    INFINITE = True

    def load(self):
        for n in range(self.config.rows):
            data = Data(prompt=f"What is {n}+{n}?", answer=str(2 * n), system_prompt="Be brief.")
            yield KINDS[self.config.kind](data, self.config.task)

__all__ = ["Sums"]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environments are a module in the current folder."""
    (tmp_path / "sums_for_test.py").write_text(ENVIRONMENTS if OLD else TASKSETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
async def make() -> AsyncIterator[Callable[..., Judge]]:
    """Makes judges, and closes them."""
    async with contextlib.AsyncExitStack() as stack:

        def make(name: str = "sums-for-test", **options: object) -> Judge:
            judge = Judge(f"verifiers:{name}", options, limit_s=30)
            stack.push_async_callback(judge.close)
            return judge

        yield make


async def test_single_turn(make: Callable[..., Judge]) -> None:
    """Its rows are the tasks, its own rewards score; what is held out is never trained on."""
    judge = make(rows=30, message="<{role}>{content}\n", opening="<assistant>")
    limits = await judge.limits()
    assert (limits.max_tokens, limits.max_turns) == (64, 1)
    tasks = await judge.tasks(range(300), "train")
    held = await judge.tasks(range(300), "eval")
    assert tasks == await judge.tasks(range(300), "train")
    assert not {task.prompt for task in tasks} & {task.prompt for task in held}
    assert len({task.prompt for task in tasks + held}) == 30
    task = tasks[0]
    number = int(task.answer) // 2
    assert task.prompt == f"<system>Be brief.\n<user>What is {number}+{number}?\n<assistant>"
    scores = await judge.scores(task, [([task.answer], [task.answer]), (["no"], ["n", "o"])])
    assert [(score.reward, score.exact) for score in scores] == [(1.0, True), (0.25, False)]


@old
async def test_several_turns(make: Callable[..., Judge]) -> None:
    """Each question replays the episode: its replies, its end and its score come out right."""
    judge = make(kind="multi", max_turns=3)
    assert (await judge.limits()).max_turns == 3
    (task,) = await judge.tasks([1], "train")
    assert await judge.reply(task, ["x"]) == "no, that was try 1\n"
    assert await judge.reply(task, ["x", "y"]) == "no, that was try 2\n"
    assert await judge.reply(task, ["x", task.answer]) is None
    (second, never) = await judge.scores(
        task, [(["x", task.answer], ["x", task.answer]), (["x", "y", "z"], ["x", "y", "z"])]
    )
    assert (second.reward, never.reward) == (0.5, 0.0)
    with pytest.raises(Spoilt, match="own error"):
        await judge.reply(task, ["error"])


@old
async def test_its_own_evaluation(make: Callable[..., Judge]) -> None:
    """Where it has a data set for evaluation that one is used, and left out of training."""
    judge = make(separate=True)
    answers = {task.answer for task in await judge.tasks(range(60), "eval")}
    assert answers == {"0", "2", "4"}
    assert not answers & {task.answer for task in await judge.tasks(range(200), "train")}


@old
async def test_what_does_not_load(make: Callable[..., Judge]) -> None:
    """Group rewards, options that it does not know and names that are not there are mistakes."""
    with pytest.raises(Mistake, match="whole groups"):
        await make(kind="group").limits()
    with pytest.raises(Mistake, match="colour"):
        await make(colour="red").limits()
    with pytest.raises(Mistake, match="there-is-none"):
        await make("there-is-none").limits()


@new
async def test_a_reward_that_raises(make: Callable[..., Judge]) -> None:
    """A reward that raises spoils the group."""
    judge = make()
    (task,) = await judge.tasks([1], "train")
    with pytest.raises(Spoilt, match="what is wrong"):
        await judge.scores(task, [(["error"], ["error"])])


@new
@pytest.mark.parametrize(
    ("option", "told"),
    [
        ({"kind": "looking"}, "looks into a sandbox"),
        ({"kind": "prepared"}, "set-up of its own"),
        ({"kind": "worthless"}, "has no reward"),
        ({"colour": "red"}, "colour"),
    ],
)
async def test_tasksets_that_need_more(
    make: Callable[..., Judge], option: dict[str, str], told: str
) -> None:
    """What would be worth 0 without a word is refused, and so is an option that it has not."""
    with pytest.raises(Mistake, match=told):
        await make(**option).limits()
