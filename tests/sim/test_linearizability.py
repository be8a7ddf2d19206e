"""The checker agrees with brute force, knows the shipped histories, and is quick."""

import itertools
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import Corrupt, Mistake
from holdfast.sim.history import Answer, Call, Value
from holdfast.sim.linearizability import (
    Cas,
    Multi,
    Operation,
    Read,
    Remove,
    Verdict,
    Write,
    check,
    check_revisions,
    load,
    main,
    save,
)
from patience import HANG_S

SHIPPED = Path(str(resources.files("holdfast.sim")))
BAD = sorted((SHIPPED / "bad_histories").glob("*.jsonl"))
GOOD = sorted((SHIPPED / "good_histories").glob("*.jsonl"))
assert len(BAD) >= 12, "they come with the package"
assert len(GOOD) >= 8

State = dict[str, Value]


# ---- the shipped histories ---------------------------------------------------------------


@pytest.mark.parametrize("path", [*BAD, *GOOD], ids=lambda path: path.stem)
def test_a_shipped_history_is_judged(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A good one is possible however suspicious it looks; a bad one is rejected by exactly one of
    the two checks, which names the keys and what could not be placed."""
    history = load(path)
    rejected = [one for one in (check(history), check_revisions(history)) if not one.ok]
    if path in GOOD:
        assert rejected == []
        assert main([str(path)]) == 0
        assert "linearizable" in capsys.readouterr().out
        return
    (verdict,) = rejected
    assert verdict.outcome == "violated"
    assert verdict.keys
    assert verdict.stuck
    assert all(one in history for one in verdict.stuck)
    assert main([str(path)]) == 1
    assert str(verdict) in capsys.readouterr().out


# ---- against brute force -----------------------------------------------------------------


def _truth(state: State, call: Call) -> Answer:
    """Apply the call to the state, and find the answer that is right."""
    match call:
        case Read(key):
            return state.get(key)
        case Write(key, value):
            state[key] = value
            return None
        case Cas(key, expected, value):
            fits = state.get(key) == expected
            if fits:
                state[key] = value
            return fits
        case Remove(key):
            return state.pop(key, None) is not None
        case Multi(reads, writes, expect):
            if any(state.get(key) != value for key, value in expect.items()):
                return False
            answer = tuple(state.get(key) for key in reads)
            for key, new in writes.items():
                if new is None:
                    state.pop(key, None)
                else:
                    state[key] = new
            return answer


def _play(state: State, one: Operation) -> bool:
    """Do what the call says; whether its answer could be that. Changes `state`."""
    answer = _truth(state, one.call)
    unasked = isinstance(one.call, Remove) and one.answer is None
    right = answer == one.answer and type(answer) is type(one.answer)
    return one.returned is None or unasked or right


def _keeps_time(order: Sequence[Operation]) -> bool:
    return not any(
        later.returned is not None and later.returned < earlier.invoked
        for earlier, later in itertools.combinations(order, 2)
    )


def _orders(history: list[Operation]) -> Iterator[Sequence[Operation]]:
    known = [one for one in history if one.returned is not None]
    unknown = [one for one in history if one.returned is None]
    for size in range(len(unknown) + 1):
        for effective in itertools.combinations(unknown, size):
            yield from itertools.permutations([*known, *effective])


def brute_force(history: list[Operation]) -> bool:
    """Try every order of every choice of unknown operations."""
    for order in _orders(history):
        state: State = {}
        if _keeps_time(order) and all(_play(state, one) for one in order):
            return True
    return False


keys, values = st.sampled_from(["x", "y"]), st.integers(0, 1)
maybe = st.none() | values
maps = st.dictionaries(keys, maybe, max_size=2)
calls_on_one_key = st.one_of(
    st.builds(Read, keys),
    st.builds(Write, keys, values),
    st.builds(Cas, keys, maybe, values),
    st.builds(Remove, keys),
)
multis = st.builds(Multi, st.lists(keys, unique=True).map(tuple), maps, maps)


@st.composite
def histories(draw: st.DrawFn) -> list[Operation]:
    """Small histories, most of them nearly right: answers come from a real order, some lie."""
    calls = calls_on_one_key | multis if draw(st.booleans()) else calls_on_one_key
    history, state, doubt = list[Operation](), State(), draw(st.integers(1, 4))
    for number in range(draw(st.integers(1, 6))):
        call: Call = draw(calls)
        moment = 4 * number
        invoked = moment - draw(st.integers(0, 12))
        returned = moment + draw(st.integers(0, 12)) if draw(st.integers(0, doubt)) else None
        answer = None
        if returned is not None:
            answer = _truth(state, call)
            if not draw(st.integers(0, 5)):
                answer = draw(_lies(call))
        elif draw(st.booleans()):
            _truth(state, call)
        history.append(Operation(f"p{number}", invoked, returned, call, answer))
    return draw(st.permutations(history))


def _lies(call: Call) -> st.SearchStrategy[Answer]:
    match call:
        case Read():
            return maybe
        case Cas():
            return st.booleans()
        case Remove():
            return st.booleans() | st.none()
        case Multi(reads):
            return st.just(False) | st.tuples(*[maybe for _ in reads])
    return st.none()


@settings(max_examples=400, deadline=None, derandomize=True, database=None, print_blob=True)
@given(histories())
def test_the_checker_agrees_with_brute_force(history: list[Operation]) -> None:
    """On every small history both say the same."""
    verdict = check(history)
    assert verdict.outcome == ("linearizable" if brute_force(history) else "violated")
    if verdict.outcome == "violated":
        _explains(verdict, history)


@pytest.mark.long
@pytest.mark.timeout(900)
@settings(max_examples=20_000, deadline=None, database=None, print_blob=True)
@given(histories())
def test_the_checker_agrees_with_brute_force_at_length(history: list[Operation]) -> None:
    """The same on many more, other ones each time."""
    assert check(history).ok == brute_force(history)


def _explains(verdict: Verdict, history: list[Operation]) -> None:
    """The prefix is a possible order; what was stuck was complete and not in it."""
    state: State = {}
    assert _keeps_time(verdict.prefix)
    assert all(_play(state, one) for one in verdict.prefix)
    assert verdict.stuck
    for one in verdict.stuck:
        assert one in history
        assert one.returned is not None
        assert one not in verdict.prefix or history.count(one) > 1


def _revisions_by_pairs(history: list[Operation]) -> bool:
    """What `check_revisions` promises, said as plainly as possible for writes and reads."""
    for one, other in itertools.permutations(history, 2):
        wrote = isinstance(other.call, Write)
        if wrote and isinstance(one.call, Write) and one.revision == other.revision:
            return False
        assert one.returned is not None
        if one.returned < other.invoked and one.revision + wrote > other.revision:
            return False
    return True


stamps = st.builds(
    lambda invoked, takes, call, revision: Operation(
        "p", invoked, invoked + takes, call, None, revision
    ),
    st.integers(0, 20),
    st.integers(0, 10),
    st.sampled_from([Read("x"), Write("x", 1)]),
    st.integers(1, 8),
)


@pytest.mark.long
@settings(max_examples=1000, deadline=None, derandomize=True, database=None)
@given(st.lists(stamps, max_size=5))
def test_revisions_agree_with_every_pair(history: list[Operation]) -> None:
    """The sweep over sorted times finds what looking at every pair finds."""
    assert check_revisions(history).ok == _revisions_by_pairs(history)


# ---- size, budget, files -----------------------------------------------------------------


def recorded(seed: int, count: int, processes: int, names: int) -> list[Operation]:
    """A correct history of overlapping operations, some with unknown outcomes."""
    rng, state, history = random.Random(seed), State(), list[Operation]()
    free, moments = [0] * processes, list[tuple[int, int, int, int]]()
    for _ in range(count):
        process = min(range(processes), key=lambda one: free[one])
        invoked = free[process] + rng.randrange(1, 1000)
        moment = invoked + rng.randrange(10_000)
        free[process] = moment + rng.randrange(10_000)
        moments.append((moment, invoked, free[process], process))
    for _, invoked, returned, process in sorted(moments):
        key, value = f"k{rng.randrange(names)}", rng.randrange(8)
        expected = state.get(key) if rng.random() < 0.7 else rng.randrange(8)
        choices: list[Call] = [Read(key), Read(key), Write(key, value), Remove(key)]
        call = rng.choice([*choices, Cas(key, expected, value), Cas(key, expected, value)])
        if rng.random() < 0.01:
            if rng.random() < 0.5:
                _truth(state, call)
            history.append(Operation(f"p{process}", invoked, None, call))
        else:
            answer = _truth(state, call)
            history.append(Operation(f"p{process}", invoked, returned, call, answer))
    return history


def test_ten_thousand_operations_are_not_too_many() -> None:
    """10 processes, 20 keys; also when one answer near the end is wrong."""
    began_s = time.process_time()
    history = recorded(1, 10_000, 10, 20)
    assert check(history).ok
    at = max(n for n, one in enumerate(history) if isinstance(one.call, Read) and one.returned)
    history[at] = msgspec.structs.replace(history[at], answer=99)
    verdict = check(history)
    assert verdict.outcome == "violated"
    assert verdict.keys == (history[at].call.key,)  # type: ignore[union-attr]  # it is a Read
    assert history[at] in verdict.stuck
    assert time.process_time() - began_s < HANG_S, "a check that explodes takes hours"


def test_a_spent_budget_is_not_a_verdict() -> None:
    """Whatever the history, too small a budget says "undecided" and never more than it knows."""
    history = recorded(2, 300, 10, 1)
    needed = check(history).explored
    for budget in (0, 1, needed // 2, needed - 1):
        verdict = check(history, budget_states=budget)
        assert verdict.outcome == "undecided"
        assert verdict.explored <= budget
        assert "budget" in str(verdict)
    assert check(history, budget_states=needed).ok


def test_one_bad_key_is_enough_even_if_another_is_undecided() -> None:
    """A violation that was found stands, whatever was not looked at."""
    bad = load(SHIPPED / "bad_histories" / "stale_read.jsonl")
    good = [Operation("p", n, 1000, Write("other", n)) for n in range(8)]
    good.append(Operation("p", 2000, 2001, Read("other"), 9))
    assert check(good, budget_states=50).outcome == "undecided"
    assert check([*bad, *good], budget_states=53).outcome == "violated"
    assert check([*good, *bad], budget_states=10_000).outcome == "violated"


def test_impossible_records_are_mistakes() -> None:
    """They would make the verdict meaningless."""
    with pytest.raises(Mistake):
        Operation("p", 2, 1, Read("x"))
    for call in (Cas("x", None, 1), Multi(reads=("x", "y"))):
        with pytest.raises(Mistake):
            check([Operation("p", 1, 2, call, None)])


def test_a_saved_history_is_the_same(tmp_path: Path) -> None:
    """Every kind of call and answer survives."""
    history = recorded(3, 200, 5, 3)
    history += [
        Operation("é", 1, 2, Multi(("x",), {"y": None, "z": 1}, {"x": "v"}), ("v",), 7),
        Operation("p", 1, 2, Multi(expect={"x": 1}), False, 7),
        Operation("p", 1, 2, Read("x"), "text"),
    ]
    save(tmp_path / "history.jsonl", history)
    assert load(tmp_path / "history.jsonl") == history


@pytest.mark.parametrize("text", ["{", "[]", '{"process":"p"}', "\xff"])
def test_what_is_not_a_history_is_corrupt(tmp_path: Path, text: str) -> None:
    """And the program says so instead of giving a verdict."""
    path = tmp_path / "history.jsonl"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(Corrupt):
        load(path)
    assert main([str(path)]) == 2
    assert main([str(tmp_path / "missing")]) == 2


def test_it_is_a_program() -> None:
    """`python -m holdfast.sim.linearizability FILE` tells, and ends with 1 for a bad history."""
    command = [sys.executable, "-m", "holdfast.sim.linearizability", str(BAD[0])]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert BAD[0].name in done.stdout
