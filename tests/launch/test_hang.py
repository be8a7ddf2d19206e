"""Hangs: who is late, who is excused, who is named; and stacks of everybody."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from holdfast.launch.hang import Learnt, Limits, dump, judge
from holdfast.progress import Beat, Section
from kids import state
from launch.node import make_spec, script, started
from patience import HANG_S, auntil

TEN = Limits(beat_s=10.0)


def beat(step: int, at_s: float, *, longest_s: float = 1.0, beats: int = 20) -> Beat:
    return Beat(step, at_s, beats, longest_s)


def inside(step: int, at_s: float, since_s: float, limit_s: float) -> Beat:
    return Beat(step, at_s, 20, 1.0, Section("save", limit_s, since_s))


@pytest.mark.parametrize(
    ("beats", "limits", "named"),
    [
        pytest.param({}, TEN, None, id="nobody has begun"),
        pytest.param({0: beat(5, 91), 1: beat(5, 90)}, TEN, None, id="just in time"),
        pytest.param({0: beat(5, 91), 1: beat(5, 89)}, TEN, (1, ()), id="one is late"),
        pytest.param({0: beat(6, 80), 1: beat(5, 85)}, TEN, (1, (0,)), id="lowest step is behind"),
        pytest.param({0: beat(5, 81), 1: beat(5, 80)}, TEN, (1, (0,)), id="then oldest beat"),
        pytest.param({0: beat(5, 10)}, Limits(), None, id="no limit"),
        pytest.param({0: inside(5, 10, 60, 50)}, TEN, None, id="a section may last"),
        pytest.param({0: inside(5, 10, 60, 30)}, TEN, (0, ()), id="a section may not last"),
        pytest.param({0: inside(5, 99, 60, 30)}, Limits(), (0, ()), id="sections always count"),
        pytest.param({0: inside(5, 10, 60, 50), 1: beat(5, 10)}, TEN, None, id="waits for one"),
        pytest.param({0: inside(5, 10, 60, 50), 1: beat(4, 10)}, TEN, (1, ()), id="is behind it"),
        pytest.param({0: inside(5, 10, 60, 30), 1: beat(5, 10)}, TEN, (0, (1,)), id="both late"),
        pytest.param({0: Beat(-1, 0, 0, 0)}, TEN, None, id="sections only, none open"),
    ],
)
def test_judge(
    beats: dict[int, Beat], limits: Limits, named: tuple[int, tuple[int, ...]] | None
) -> None:
    """At second 100."""
    hang = judge(beats, 100.0, limits)
    assert (None if hang is None else (hang.rank, hang.waiting)) == named


@pytest.mark.parametrize(
    ("learnt", "limit_s"),
    [
        (Learnt(factor=3, min_s=1), 12.0),
        (Learnt(factor=3, min_s=20), 20.0),
        (Learnt(factor=3, min_s=1, after=21), None),
        (Learnt(factor=30, min_s=1), 50.0),
    ],
)
def test_a_limit_can_be_learnt(learnt: Learnt, limit_s: float | None) -> None:
    """From the longest pause of any rank in the run; a fixed limit stays an upper bound."""
    beats = {0: beat(5, 0.0, longest_s=2), 1: beat(5, 1000.0, longest_s=4)}
    fixed = None if limit_s is None else 50.0
    limits = Limits(beat_s=fixed, learnt=learnt, longest_s=3)
    hang = judge(beats, 1000.0, limits)
    assert (None if hang is None else hang.limit_s) == limit_s


def test_a_pause_of_everybody_is_no_hang() -> None:
    """After the node was stopped, limits count from when somebody could look again."""
    beats = {0: beat(5, 10), 1: inside(5, 10, 10, 30)}
    assert judge(beats, 100.0, TEN, awake_since_s=95.0) is None
    late = judge(beats, 106.0, TEN, awake_since_s=95.0)
    assert late is None, "rank 0 waits for rank 1, which has 30 s from the end of the pause"
    assert judge({0: beats[0]}, 106.0, TEN, awake_since_s=95.0) is not None


STUCK = """
import ctypes, os, time
from holdfast import progress
rank = int(os.environ["RANK"])
def stuck_here():
    # Sleeps with the GIL held: no Python code could say where it is.
    while True:  # a signal ends a sleep
        ctypes.PyDLL(None).sleep(600)
def waits_for_all():
    time.sleep(600)
progress.beat(1)
if rank == 2:
    stuck_here()
progress.beat(2)
waits_for_all()
"""


async def test_the_dump_names_the_one_that_is_stuck(tmp_path: Path) -> None:
    """Real workers: the stuck rank is judged and comes first, with its stack; others are one."""
    path = script(tmp_path, STUCK)
    async with started(make_spec(path, slots=4), tmp_path) as workers:
        await auntil(lambda: [b.step for b in workers.beats().values()] == [2, 2, 1, 2])
        await auntil(lambda: judge(workers.beats(), time.monotonic(), Limits(beat_s=0.5)))
        # After this pause all are late; the one that is behind is named.
        await asyncio.sleep(0.6)
        hang = judge(workers.beats(), time.monotonic(), Limits(beat_s=0.5))
        assert hang is not None
        assert (hang.rank, hang.step, sorted(hang.waiting)) == (2, 1, [0, 1, 3])
        began = time.monotonic()
        text = await dump(workers.workers)
        assert time.monotonic() - began < HANG_S
        again = await dump(workers.workers)
        assert all(worker.running() for worker in workers.workers)
    print(text)
    for told in (text, again):
        overview, first, second = told.split("\n\n")[:3]
        assert overview.splitlines()[1].startswith(f"  rank 2 (pid {workers.pids[2]}): last beat")
        assert first.startswith("rank 2:")
        assert "in stuck_here" in first
        assert second.startswith("ranks 0, 1, 3:")
        assert "in waits_for_all" in second


async def test_the_dump_does_not_wait_for_ever(tmp_path: Path) -> None:
    """One that is stopped cannot answer: its state is told. One that ended is left out."""
    text = "import os, time\nif os.environ['RANK'] == '1': os._exit(0)\ntime.sleep(600)"
    async with started(make_spec(script(tmp_path, text), slots=3), tmp_path) as workers:
        await auntil(lambda: not workers.workers[1].running())
        stacks = workers.workers[2].stacks
        assert stacks is not None
        await auntil(stacks.exists)
        os.kill(workers.pids[0], signal.SIGSTOP)
        began = time.monotonic()
        told = await dump(workers.workers, limit_s=1.0)
        assert time.monotonic() - began < HANG_S
    assert "no stacks within 1 s; the kernel has it as stopped" in told
    assert "rank 0 (pid" in told
    assert "rank 1 " not in told
    assert "rank 2:" in told


async def test_a_program_has_no_stacks_and_survives(tmp_path: Path) -> None:
    """SIGUSR2 would end a program that does not expect it: it is not sent."""
    spec = make_spec("sleep", "600", kind="program")
    async with started(spec, tmp_path) as workers:
        name = Path(f"/proc/{workers.pids[0]}/comm")
        await auntil(lambda: name.read_text() == "sleep\n" and state(workers.pids[0]) == "S")
        told = await dump(workers.workers)
        assert workers.workers[0].running()
    assert "not a Python worker; the kernel has it as sleeping" in told
