"""Kills and pauses: the plan is a function of its seed, the signals reach the right ones."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.chaos.processes import (
    KINDS,
    Action,
    Identity,
    Outcome,
    carry_out,
    identify,
    plan,
    protected_pids,
)
from holdfast.errors import Gone, Mistake
from holdfast.proc import Child, spawn
from kids import state
from patience import auntil

from .wires import LIMIT_S


@pytest.fixture
def sleeper() -> Iterator[Child]:
    with spawn(["sleep", "600"]) as child:
        yield child


# ---- the plan ----------------------------------------------------------------------


@settings(deadline=None)
@given(
    seed=st.integers(0, 10_000),
    names=st.lists(st.sampled_from("abcdef"), min_size=1, unique=True),
    kinds=st.sampled_from([("kill",), ("pause",), KINDS]),
    every_s=st.floats(0.1, 10.0),
    respawn=st.booleans(),
)
def test_what_every_plan_keeps(
    seed: int, names: list[str], kinds: tuple[str, ...], every_s: float, respawn: bool
) -> None:
    """Same seed, same plan; in order and in time; pauses end in time and are not disturbed;
    the dead are left alone."""
    duration_s = 60.0

    def made() -> tuple[Action, ...]:
        return plan(seed, names, duration_s, kinds, every_s=every_s, respawn=respawn)  # type: ignore[arg-type]

    actions = made()
    assert actions == made()
    assert [one.at_s for one in actions] == sorted(one.at_s for one in actions)
    busy_until = dict.fromkeys(names, 0.0)
    for one in actions:
        assert 0 < one.at_s < duration_s
        assert one.kind in kinds
        assert one.at_s >= busy_until[one.target]
        if one.kind == "pause":
            assert 0 < one.pause_s <= 3.0
            assert one.at_s + one.pause_s <= duration_s + 1e-9
            busy_until[one.target] = one.at_s + one.pause_s
        elif not respawn:
            busy_until[one.target] = duration_s + 1.0
    if respawn and kinds == ("kill",):
        assert len(actions) >= int(duration_s / (1.5 * every_s))


def test_seeds_differ() -> None:
    """Other seeds make other plans, and each kind and target has its turn."""
    plans = [plan(seed, ["a", "b"], 60.0, respawn=True) for seed in range(20)]
    assert len(set(plans)) == 20
    done = {(one.kind, one.target) for actions in plans for one in actions}
    assert done == {(kind, name) for kind in KINDS for name in "ab"}


@pytest.mark.parametrize(
    "arguments",
    [
        {"targets": []},
        {"kinds": []},
        {"kinds": ["explode"]},
        {"duration_s": 0},
        {"every_s": 0},
        {"every_s": 1e-9},
        {"pause_s": (2.0, 1.0)},
    ],
)
def test_a_senseless_plan_is_refused(arguments: dict[str, object]) -> None:
    """No empty loop and no silent nothing."""
    usual: dict[str, object] = {"seed": 0, "targets": ["a"], "duration_s": 1.0}
    with pytest.raises(Mistake):
        plan(**(usual | arguments))  # type: ignore[arg-type]


async def test_a_kill_kills_that_process_and_no_other(sleeper: Child) -> None:
    """SIGKILL reaches the one named; the report says so."""
    with spawn(["sleep", "600"]) as other:
        told: list[Outcome] = []
        targets = {"a": identify(sleeper.pid), "b": identify(other.pid)}
        outcomes = await carry_out([Action(0.0, "kill", "a")], targets, told.append)
        assert sleeper.wait(LIMIT_S) == -signal.SIGKILL
        assert other.alive()
        assert outcomes == tuple(told)
        assert [(one.result, one.pid) for one in told] == [("done", sleeper.pid)]


# ---- carrying it out ------------------------------------------------------------------


async def test_a_failing_listener_leaves_nobody_stopped(sleeper: Child) -> None:
    """An error in the caller's own callback does not keep SIGCONT from being sent."""

    def fail(_: Outcome) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await carry_out([Action(0.0, "pause", "a", 600.0)], {"a": identify(sleeper.pid)}, fail)
    await auntil(lambda: state(sleeper.pid) != "T")


async def test_a_reused_pid_is_not_touched(sleeper: Child) -> None:
    """A process that started at another time is another process, whatever its pid."""
    real = identify(sleeper.pid)
    former = Identity(real.pid, real.started_ticks - 1)
    actions = [Action(0.0, "kill", "a"), Action(0.0, "pause", "a", 0.01)]
    outcomes = await carry_out(actions, {"a": former})
    assert [one.result for one in outcomes] == ["gone", "gone"]
    assert sleeper.alive()
    assert state(sleeper.pid) != "T"


async def test_what_has_ended_is_gone(sleeper: Child) -> None:
    """Dead processes, zombies and unknown names are reported, and nothing is signalled."""
    identity = identify(sleeper.pid)
    os.kill(sleeper.pid, signal.SIGKILL)
    await auntil(lambda: state(sleeper.pid) == "Z")
    with pytest.raises(Gone):
        identify(sleeper.pid)
    for _ in range(2):  # as a zombie, then not there at all
        outcomes = await carry_out(
            [Action(0.0, "kill", "a"), Action(0.0, "kill", "nobody")], {"a": identity}
        )
        assert [one.result for one in outcomes] == ["gone", "gone"]
        sleeper.kill_group()
    with pytest.raises(Gone):
        identify(sleeper.pid)


async def test_a_victim_that_dies_while_paused_does_no_harm(sleeper: Child) -> None:
    """There is nobody to continue, and no error."""

    def kill(_: Outcome) -> None:
        os.kill(sleeper.pid, signal.SIGKILL)

    outcomes = await carry_out(
        [Action(0.0, "pause", "a", 0.1)], {"a": identify(sleeper.pid)}, kill
    )
    assert [one.result for one in outcomes] == ["done"]


async def test_a_restarted_target_is_found_under_its_new_pid() -> None:
    """A function is asked each time: kill, restart, kill again."""
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(spawn(["sleep", "600"]))]

        def restart(outcome: Outcome) -> None:
            assert outcome.pid == children[-1].pid
            children.append(stack.enter_context(spawn(["sleep", "600"])))

        actions = [Action(0.0, "kill", "worker"), Action(0.01, "kill", "worker")]
        await carry_out(actions, lambda _: identify(children[-1].pid), restart)
        assert [one.wait(LIMIT_S) for one in children[:2]] == [-signal.SIGKILL] * 2
        assert children[2].alive()


async def test_the_first_process_ourselves_and_our_ancestors_are_never_touched() -> None:
    """Refused before anything is done, also when the name is resolved late."""
    assert {1, os.getpid(), os.getppid()} <= protected_pids()
    for pid in protected_pids():
        identity = Identity(pid, 0)
        for targets in ({"a": identity}, lambda _, found=identity: found):
            with pytest.raises(Mistake, match="never touched"):
                await carry_out([Action(0.0, "pause", "a", 1.0)], targets)


# ---- a real storm ---------------------------------------------------------------------


async def test_a_planned_storm_on_real_processes() -> None:
    """Every planned action happens at its time or is reported; survivors run on."""
    seed = 42
    with contextlib.ExitStack() as stack:
        children = {name: stack.enter_context(spawn(["sleep", "600"])) for name in "abcdef"}
        actions = plan(seed, list(children), 1.5, every_s=0.1, pause_s=(0.02, 0.1))
        targets = {name: identify(child.pid) for name, child in children.items()}
        start = time.monotonic()
        outcomes = await carry_out(actions, targets)
        assert time.monotonic() - start < LIMIT_S
        assert {one.result for one in outcomes} == {"done", "continued"}, f"seed {seed}"
        for one in outcomes:
            length_s = one.action.pause_s if one.result == "continued" else 0.0
            assert one.at_s >= one.action.at_s + length_s
            assert one.pid == children[one.action.target].pid
        killed = {one.target for one in actions if one.kind == "kill"}
        for name, child in children.items():
            if name in killed:
                assert child.wait(LIMIT_S) == -signal.SIGKILL, f"seed {seed}"
            else:
                assert child.alive()
                assert state(child.pid) != "T", f"seed {seed}"
