"""A job's policy is checked when the job is made, not when its trainer starts."""

from typing import Any

import pytest

from holdfast.errors import Mistake
from holdfast.jobs.policy import Policy, read_policy


def test_what_is_given_counts() -> None:
    """Names that are not given have their defaults."""
    assert read_policy({}) == Policy()
    assert read_policy({"gap_s": 5}) == Policy(gap_s=5)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"gaps": 1}, r"no 'gaps'; there are: gap_s, checkpoint_s, .*upkeep_s"),
        ({"gap_s": 1, "b": 1, "a": 2}, r"no 'a', 'b'; there are: gap_s"),
        ({"x" * 10_000: 1}, r"there are: gap_s"),
        ({"gap_s": 0}, r"gap_s: .*greater than 0"),
        ({"gap_s": "soon", "max_models": 0}, r"gap_s: .*; max_models: "),
        ({"gap_s": None}, r"gap_s: "),
        ([], "an object"),
        (None, "an object"),
        ("gap_s", "an object"),
    ],
)
def test_what_is_wrong_is_named(given: Any, why: str) -> None:
    """Unknown names, with those that there are; values that cannot be used, each by its name."""
    with pytest.raises(Mistake, match=why) as caught:
        read_policy(given)
    assert len(str(caught.value)) < 1000
