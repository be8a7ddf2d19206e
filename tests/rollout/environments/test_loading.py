"""Environments by name, and their options."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import Mistake
from holdfast.rollout.environments import Score, Task, load_environment

PLUGIN = """
from holdfast.rollout.environments import Environment, Score, Task, held_out

class Own(Environment):
    max_tokens = 3
    def __init__(self, word, times=1):
        self.word = word * times
    def task(self, seed, purpose):
        return Task(self.word + purpose)
    def score(self, task, turns, pieces):
        return Score(1.0)

class Wide(Own):
    def __init__(self, **options):
        super().__init__(str(sorted(options)))

class Broken(Own):
    max_turns = 0

def factory(word="made"):
    return Own(word)

def reward(completion, answer, facts, pieces):
    return len(completion) / facts["most"]

def needy(completion, colour):
    return 1.0

def nothing():
    return 5

NUMBER = 7
"""
TASKS = [{"prompt": f"{n}", "answer": "ab", "facts": {"most": 4}} for n in range(5)]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of somebody's, in the current folder."""
    name = f"plugin_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(PLUGIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def test_a_class_and_a_function_that_makes_one(module: str) -> None:
    """Both are called with the options as keyword arguments."""
    own = load_environment(f"{module}:Own", {"word": "hm", "times": 2})
    assert own.task(1, "eval") == Task("hmhmeval")
    assert load_environment(f"{module}:factory", {}).task(1, "eval") == Task("madeeval")
    wide = load_environment(f"{module}:Wide", {"a": 1, "b": 2})
    assert wide.task(1, "train").prompt == "['a', 'b']train"


def test_a_reward_function(module: str) -> None:
    """A function that asks for the completion, with a list of tasks, is an environment."""
    made = load_environment(f"{module}:reward", {"tasks": TASKS, "max_tokens": 9})
    assert (made.max_tokens, made.max_turns) == (9, 1)
    task = made.task(3, "train")
    assert made.score(task, ["ab "], ["ab", " "]) == Score(0.75, exact=True)
    assert made.score(task, ["abcd"], ["abcd"]) == Score(1.0, exact=False)


MISTAKES: dict[str, tuple[str, dict[str, Any], str]] = {
    "a typing error": ("revers", {}, "no environment revers: did you mean reverse"),
    "another name": ("poker", {}, "there are copy, guess, increment, reverse, or package"),
    "an option's typing error": ("reverse", {"digit": 5}, "no option digit: did you mean digits"),
    "an unknown option": ("guess", {"colour": 1}, "no option colour: there are none"),
    "a wrong value": ("copy", {"digits": "5"}, "digits is '5'"),
    "one digit": ("copy", {"digits": 1}, "from 2 to 18"),
    "no such module": ("nowhere.at.all:reward", {}, "no module nowhere, neither in"),
    "no module's name": (":reward", {}, "no name of a module"),
    "no such attribute": ("MODULE:rewart", {}, "has no rewart: did you mean reward"),
    "not callable": ("MODULE:NUMBER", {}, "is a int"),
    "no environment": ("MODULE:nothing", {}, "made a int"),
    "an option missing": ("MODULE:Own", {}, "needs the option word"),
    "a plug-in's option": ("MODULE:Own", {"wort": "x"}, "no option wort: did you mean word"),
    "no turn": ("MODULE:Broken", {"word": "x"}, "Broken.max_turns is 0"),
    "no tasks": ("MODULE:reward", {}, "needs the option tasks"),
    "a reward's option": ("MODULE:reward", {"task": []}, "no option task: did you mean tasks"),
    "a reward's parameter": ("MODULE:needy", {"tasks": TASKS}, "asks for colour"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_told(case: str, module: str) -> None:
    """Wrong names and options are refused, with what was probably meant."""
    name, options, told = MISTAKES[case]
    with pytest.raises(Mistake) as caught:
        load_environment(name.replace("MODULE", module), options)
    assert told in str(caught.value)


def test_what_a_module_needs_is_its_own_error(module: str, tmp_path: Path) -> None:
    """A module that is there, but asks for one that is not, is not told to be missing."""
    (tmp_path / f"{module}_2.py").write_text("import no_such_thing_at_all\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_thing_at_all"):
        load_environment(f"{module}_2:reward", {})


def test_light() -> None:
    """Environments are loaded without torch."""
    code = (
        "import sys; from holdfast.rollout.environments import load_environment\n"
        "load_environment('reverse', {}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
