"""The shipped tasks on numbers."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.rollout.environments import Environment, Task, load_environment
from holdfast.rollout.environments.base import check_score

RIGHT: dict[str, Callable[[str], str]] = {
    "copy": lambda text: text,
    "increment": lambda text: f"{int(text) + 1:0{len(text)}}",
    "reverse": lambda text: text[::-1],
}


def environment(name: str, digits: int = 5) -> Environment:
    return load_environment(name, {"digits": digits})


@pytest.mark.parametrize("name", RIGHT)
def test_tasks_are_what_they_say(name: str) -> None:
    """The answer is right, has as many digits as the number, and fits into the turn."""
    for digits in (2, 5, 18):
        made = environment(name, digits)
        for seed in range(300):
            task = made.task(seed, "train")
            text = task.prompt[:-1]
            assert task.answer == RIGHT[name](text)
            assert len(text) == len(task.answer) == digits == made.max_tokens
            assert made.score(task, [task.answer], list(task.answer)).exact


@pytest.mark.parametrize("which", [*RIGHT, "guess"])
def test_held_out(which: str) -> None:
    """Every number is for one purpose: about one in ten for evaluation, none for both."""
    made = load_environment(which, {"digits": 2} if which in RIGHT else {})
    train = {made.task(seed, "train").answer for seed in range(2000)}
    held = {made.task(seed, "eval").answer for seed in range(2000)}
    assert not train & held
    assert len(train | held) == (99 if which == "increment" else 100)
    assert 3 <= len(held) <= 20


def test_tasks_never_change() -> None:
    """A task is a function of its seed, on every machine and in every version."""
    made = environment("reverse")
    assert made.task(0, "train") == Task("77827>", "72877")
    assert made.task(7, "eval") == Task("28923>", "32982")


SCORES = {
    "all right": (["3", "1", "2", "8", "4"], 1.0, True, (1, 1, 1, 1, 1)),
    "one wrong": (["3", "1", "0", "8", "4"], 0.8, False, (1, 1, 0, 1, 1)),
    "nothing": ([], 0.0, False, ()),
    "too short": (["3", "1"], 0.4, False, (1, 1)),
    "too long": (["3", "1", "2", "8", "4", "4"], 5 / 6, False, (1, 1, 1, 1, 1, 0)),
    "an end that is right": (["3", "1", "2", "8", "4", ""], 1.0, True, (1, 1, 1, 1, 1, 1)),
    "an end too early": (["3", ""], 0.2, False, (1, 0)),
    "larger tokens": (["312", "94"], 0.8, False, (1, 0.5)),
    "no digits": (["x", "⟨unknown⟩"], 0.0, False, (0, 0)),
}


@pytest.mark.parametrize("case", SCORES)
def test_credit_by_place(case: str) -> None:
    """Each token has the credit of its own places; the reward is the share of all of them."""
    pieces, reward, exact, credit = SCORES[case]
    score = environment("reverse").score(Task("48213>", "31284"), ["".join(pieces)], pieces)
    assert score.reward == pytest.approx(reward)
    assert (score.exact, score.per_token) == (exact, credit)


@given(st.lists(st.text(max_size=4), max_size=12), st.integers(0, 2**62))
def test_any_text_has_a_score(pieces: list[str], seed: int) -> None:
    """Whatever a model says is scored: one number per token, and 1 only for what is exact."""
    made = environment("reverse")
    task = made.task(seed, "train")
    score = check_score(made.score(task, ["".join(pieces)], pieces), pieces)
    assert 0 <= score.reward <= 1
    assert score.exact == (score.reward == 1) == ("".join(pieces) == task.answer)
