"""The table of times: its order, its errors, where it comes from, and its page in the docs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import Mistake
from holdfast.timeouts import RULES, Rule, Timeouts, purposes, table

DOC = Path(__file__).parent.parent / "docs" / "TIMEOUTS.md"


def test_the_page_and_the_code_agree() -> None:
    """The page holds exactly the table that the code makes."""
    assert f"\n\n{table()}\n" in DOC.read_text(encoding="utf-8")


def test_every_rule_speaks_of_fields_that_exist() -> None:
    """A renamed field cannot leave a rule behind; every field says its unit and purpose."""
    fields = Timeouts.model_fields
    for rule in RULES:
        assert rule.left in fields
        assert rule.right in fields
        assert rule.why
    assert list(purposes()) == list(fields)
    assert all(name.endswith("_s") and purpose for name, purpose in purposes().items())


def test_every_field_is_read_by_the_code() -> None:
    """A time that nothing reads would be set in vain. Those of the public SDKs are other
    programs' times, which the rules compare with ours."""
    code = "".join(
        path.read_text()
        for path in (DOC.parent.parent / "src" / "holdfast").rglob("*.py")
        if path.name != "timeouts.py"
    )
    theirs = {"sdk_poll_s", "sdk_submit_s"}
    assert theirs <= {name for rule in RULES for name in (rule.left, rule.right)}
    assert [name for name in set(Timeouts.model_fields) - theirs if name not in code] == []


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_each_rule_is_enforced(rule: Rule) -> None:
    """Breaking one rule is noticed, and named with both values and the reason."""
    right = getattr(Timeouts(), rule.right)
    times = Timeouts.parse({rule.left: right / rule.factor * 1.01})
    assert rule in times.broken()
    with pytest.raises(Mistake) as caught:
        times.check()
    message = str(caught.value)
    for part in (str(rule), rule.why, f"{rule.left} = ", f"{rule.right} = {right:g}"):
        assert part in message


def test_every_broken_rule_is_named() -> None:
    """Nobody has to mend them one at a time."""
    times = Timeouts(ledger_lease_s=1.0)
    assert len(times.broken()) >= 3
    with pytest.raises(Mistake) as caught:
        times.check()
    assert all(str(rule) in str(caught.value) for rule in times.broken())


@given(st.floats(min_value=0.01, max_value=100.0))
def test_order_does_not_depend_on_the_scale(factor: float) -> None:
    """What is shipped keeps its own rules, also when everything is slower or faster."""
    scaled = {name: value * factor for name, value in Timeouts().model_dump().items()}
    Timeouts.parse(scaled).check()


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"ledger_leese_s": 5}, "ledger_leese_s"),
        ({"ledger_lease_s": 0}, "ledger_lease_s"),
        ({"ledger_lease_s": float("inf")}, "ledger_lease_s"),
        ({"ledger_call_s": "soon"}, "ledger_call_s"),
    ],
)
def test_what_is_no_time_is_refused_by_name(values: dict[str, object], named: str) -> None:
    """A misspelt or senseless entry is an error, not a default."""
    with pytest.raises(Mistake, match=named):
        Timeouts.parse(values)


FILES = {
    "[timeouts]\nledger_lease_s = 20.0\n": "",
    "[other]\nx = 1\n": "",
    "[timeout]\nx = 1\n": "write [timeouts]",
    "[timeouts]\nledger_lease_s = 2.5\n": "3 × lease_keepalive_s <= ledger_lease_s",
    "[timeouts]\nleese_s = 1\n": "leese_s",
    "timeouts = 3\n": "write [timeouts]",
    "[timeouts\n": "no readable TOML file",
}


@pytest.mark.parametrize("text", FILES)
def test_a_file_is_taken_or_refused_with_its_name(tmp_path: Path, text: str) -> None:
    """What is wrong with it is said at once, whichever command reads it."""
    path = tmp_path / "times.toml"
    path.write_text(text)
    if not FILES[text]:
        assert Timeouts.read(path).ledger_lease_s == (20.0 if "ledger" in text else 10.0)
        return
    with pytest.raises(Mistake) as caught:
        Timeouts.read(path)
    assert str(path) in str(caught.value)
    assert FILES[text] in str(caught.value)


@pytest.mark.parametrize(("lease_s", "code"), [(20.0, 0), (2.5, 2)])
def test_every_part_of_a_process_uses_the_table_of_the_environment(
    tmp_path: Path, lease_s: float, code: int
) -> None:
    """Of all commands, and of the processes that they start; a bad one ends them with a line."""
    path = tmp_path / "times.toml"
    path.write_text(f"[timeouts]\nledger_lease_s = {lease_s}\n")
    words = [sys.executable, "-m", "holdfast", "ledger", "ls", f"sqlite:///{tmp_path}/x.db"]
    env = os.environ | {"HOLDFAST_TIMEOUTS": str(path)}
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    told = done.stderr.strip().splitlines()
    if code:
        assert (done.returncode, len(told)) == (2, 1), done.stderr
        assert f"{path}: time-outs out of order: 3 × lease_keepalive_s" in told[0]
    else:
        words = [sys.executable, "-c", "from holdfast.ledger import open; print(open('memory:')"]
        words[-1] += ".timeouts.ledger_lease_s)"
        assert subprocess.check_output(words, env=env, text=True) == "20.0\n"
