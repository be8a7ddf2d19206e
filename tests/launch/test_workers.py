"""Workers: what they run, how their end is told, and that nothing is left of them."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from descriptors import held_below
from holdfast.errors import NotFound
from holdfast.launch.warm import Budget
from holdfast.launch.workers import check
from kids import alive
from launch.node import (
    GRANDCHILD,
    ended,
    failed,
    kept_warm,
    make_seat,
    make_spec,
    numbers,
    printed,
    script,
    started,
)
from patience import HANG_S, auntil

FOREVER = "import time\ntime.sleep(600)\n"


async def test_all_exit_0(tmp_path: Path) -> None:
    """Success is when every worker has exited 0; each has seen its own place."""
    path = script(
        tmp_path,
        "import os, sys\n"
        "print(os.environ['RANK'], os.environ['LOCAL_RANK'], sys.argv[1:], flush=True)",
    )
    spec = make_spec(path, "--slot=${local_rank}", slots=2)
    seat = make_seat(2, first_rank=4, world_size=8)
    async with started(spec, tmp_path, seat=seat) as workers:
        outcome = await ended(workers)
        assert outcome.success
        assert outcome.failures == ()
        assert [start.why for start in workers.starts] == ["warm starts are off"] * 2
    assert printed(workers, 0) == "4 0 ['--slot=0']\n"
    assert printed(workers, 1) == "5 1 ['--slot=1']\n"


async def test_an_end_that_comes_while_another_is_told_is_a_failure(tmp_path: Path) -> None:
    """The kill is seen in the same turn of the loop in which the waiter is woken for another
    reason: it waits for the rest of the story instead of telling half of it."""
    loop = asyncio.get_running_loop()
    reading, writing = os.pipe()
    async with started(make_spec(script(tmp_path, FOREVER)), tmp_path) as workers:
        waiting = asyncio.ensure_future(workers.wait())
        await asyncio.sleep(0)
        loop.add_reader(reading, workers._changed.set)
        os.write(writing, b"x")  # the loop hears of this first, and of the kill in the same turn
        os.kill(workers.pids[0], signal.SIGKILL)
        os.waitid(os.P_PID, workers.pids[0], os.WEXITED | os.WNOWAIT)
        async with asyncio.timeout(HANG_S):
            outcome = await waiting
        loop.remove_reader(reading)
    os.close(reading)
    os.close(writing)
    assert outcome.first is not None
    assert outcome.first.code == -9


ENDINGS = {
    "raise": ("raise ValueError('oh é')", 1, "ValueError: oh é"),
    "exit 3": ("import sys; sys.exit(3)", 3, ""),
    "exit text": ("import sys; sys.exit('why not')", 1, "why not"),
    "_exit": ("import os; os._exit(7)", 7, ""),
    "kill": ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
    "segv": ("import ctypes; ctypes.string_at(0)", -11, ""),
    "interrupt": ("raise KeyboardInterrupt", -2, "KeyboardInterrupt"),
    "syntax": ("def f(:\n  pass", 1, "SyntaxError: invalid syntax"),
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("warm", [False, True])
async def test_an_end_is_that_of_a_plain_start(tmp_path: Path, ending: str, warm: bool) -> None:
    """Exit code and stderr are those of `python -u`, and the reason reaches the outcome."""
    text, code, reason = ENDINGS[ending]
    path = script(tmp_path, "import sys\nprint('before', file=sys.stderr)\n" + text)
    spec = make_spec(path)
    plain = subprocess.run(
        [sys.executable, "-u", str(path)], timeout=30, check=False, capture_output=True
    )
    assert plain.returncode == code
    async with (
        kept_warm(spec, ready=int(warm)) as pool,
        started(spec, tmp_path, pool=pool) as here,
    ):
        assert [start.warm for start in here.starts] == [warm]
        failure = await failed(here)
        assert not here.outcome().success
        assert (failure.rank, failure.code, failure.pid) == (0, code, here.pids[0])
        assert reason in failure.reason
        assert abs(failure.at - time.time()) < 30
        stderr = here.workers[0].files.stderr
        assert stderr is not None
        assert stderr.read_bytes() == plain.stderr


async def test_the_error_file_is_torchs(tmp_path: Path) -> None:
    """Without torch's `record` the exception is on file all the same, in torch's form."""
    path = script(tmp_path, "def f():\n    1 / 0\nf()")
    async with started(make_spec(path), tmp_path) as workers:
        failure = await failed(workers)
        assert failure.reason == "ZeroDivisionError: division by zero"
        assert failure.error_file is not None
        message = json.loads(failure.error_file.read_text())["message"]
        assert message["message"] == "ZeroDivisionError: division by zero"
        assert "in f\n" in message["extraInfo"]["py_callstack"]
        assert "child.py" not in message["extraInfo"]["py_callstack"]
        assert abs(int(message["extraInfo"]["timestamp"]) - time.time()) < 30


async def test_the_error_file_of_the_user_stays(tmp_path: Path) -> None:
    """What the user's code (or torch's `record`) wrote is not written over."""
    path = script(
        tmp_path,
        "import json, os\n"
        "with open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w') as f:\n"
        "    json.dump({'message': {'message': 'mine', 'errorCode': 3}}, f)\n"
        "raise ValueError('theirs')",
    )
    async with started(make_spec(path), tmp_path) as workers:
        assert (await failed(workers)).reason == "mine"


async def test_the_first_failure_is_the_one_that_the_others_followed(tmp_path: Path) -> None:
    """A rank that failed first but took long to end is named before one that ended sooner."""
    path = script(
        tmp_path,
        "import os, sys, time, atexit, pathlib\n"
        "mark = pathlib.Path(sys.argv[1]) / 'mark'\n"
        "if os.environ['RANK'] == '1':\n"
        "    def slow():\n"
        "        mark.touch(); time.sleep(600)\n"
        "    atexit.register(slow)\n"
        "    raise ValueError('the cause')\n"
        "while not mark.exists(): time.sleep(0.01)\n"
        "raise ConnectionError('a consequence')\n",
    )
    async with started(make_spec(path, str(tmp_path), slots=2), tmp_path) as workers:
        outcome = await ended(workers)
        assert [failure.rank for failure in outcome.failures] == [1, 0]
        assert outcome.failures[0].reason == "ValueError: the cause"
        assert outcome.failures[0].code is None


async def test_what_a_worker_started_dies_with_it(tmp_path: Path) -> None:
    """Also what an ended worker left behind, and what does not listen to SIGTERM."""
    path = script(
        tmp_path,
        "import os, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        + GRANDCHILD
        + "if os.environ['RANK'] == '1': time.sleep(600)",
    )
    async with started(make_spec(path, str(tmp_path), slots=2), tmp_path, grace_s=0.3) as workers:
        grandchildren = await asyncio.to_thread(numbers, tmp_path / "pids", 2)
        await auntil(lambda: not workers.workers[0].running())
        assert all(map(alive, grandchildren))
        everybody = [*workers.pids, *grandchildren]
    assert not any(map(alive, everybody))
    outcome = workers.outcome()
    assert not outcome.success, "workers that were stopped have not succeeded"
    assert outcome.failures == ()


async def test_stop_gives_time_to_end(tmp_path: Path) -> None:
    """SIGTERM comes first; who ends by itself is not killed, and it is no failure."""
    path = script(
        tmp_path,
        "import signal, sys, time\n"
        "def end(*_):\n    print('saved', flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\nprint('up', flush=True)\ntime.sleep(600)",
    )
    async with started(make_spec(path), tmp_path, grace_s=60) as workers:
        await auntil(lambda: printed(workers) == "up\n")
        began = time.monotonic()
    assert time.monotonic() - began < 20, "it was not waited for until the grace was over"
    assert printed(workers) == "up\nsaved\n"
    assert (await workers.wait()).failures == ()


async def test_stop_kills_a_stopped_worker(tmp_path: Path) -> None:
    """A worker that is SIGSTOPped cannot hear SIGTERM, and is gone after the grace."""
    async with started(make_spec(script(tmp_path, FOREVER)), tmp_path, grace_s=0.2) as workers:
        os.kill(workers.pids[0], signal.SIGSTOP)
    assert not alive(workers.pids[0])


async def test_a_program_is_itself(tmp_path: Path) -> None:
    """A program gets arguments and environment, a clean set of signals, and its own code."""
    shell = 'echo "$RANK $1 $0"; grep SigIgn /proc/self/status; kill -USR2 $$'
    spec = make_spec("sh", "-c", shell, "zero", "one", kind="program")
    async with (
        kept_warm(make_spec("x"), ready=0) as pool,
        started(spec, tmp_path, pool=pool) as workers,
    ):
        assert (await failed(workers)).code == -signal.SIGUSR2
        assert workers.starts[0].why == "the worker is not a Python program"
        first, second = printed(workers).splitlines()
        assert first == "0 one zero"
        ignored = int(second.split()[1], 16)
        assert not ignored & (1 << (signal.SIGUSR2 - 1) | 1 << (signal.SIGPIPE - 1))


async def test_no_user_code_runs_before_the_guard(tmp_path: Path) -> None:
    """The guard hears all pids while every worker still waits; if it refuses, nothing ran."""
    path = script(tmp_path, "import sys; open(sys.argv[1] + '/ran', 'w').close()")
    heard: list[int] = []

    def refuse(pids: object) -> None:
        assert isinstance(pids, list)
        heard.extend(pids)
        time.sleep(0.5)  # an eager worker would have run by now
        assert not (tmp_path / "ran").exists()
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        async with started(make_spec(path, str(tmp_path), slots=2), tmp_path, guard=refuse):
            pass
    assert len(heard) == 2
    assert not any(map(alive, heard))
    assert not (tmp_path / "ran").exists()


def test_plain_mistakes_are_told_at_once(tmp_path: Path) -> None:
    """A script or program that is not there: one clear line, and nothing was started."""
    with pytest.raises(NotFound, match=r"there is no script .*nope\.py"):
        check(make_spec(tmp_path / "nope.py"))
    with pytest.raises(NotFound, match="the program holdfast-nope was not found"):
        check(make_spec("holdfast-nope", kind="program"))


async def test_files_are_not_left_open(tmp_path: Path) -> None:
    """Ten cycles do not hold a descriptor each.

    Descriptors that earlier tests left to the garbage collector may be closed meanwhile.
    """
    fds = Path("/proc/self/fd")
    spec = make_spec("true", kind="program")
    counts = []
    for _ in range(10):
        async with started(spec, tmp_path) as workers:
            assert (await ended(workers)).success
        counts.append(len(list(fds.iterdir())))
    assert held_below(tmp_path) == []
    assert counts[-1] - counts[0] < len(counts) - 1, counts


@pytest.mark.long
async def test_a_storm_leaves_nothing(tmp_path: Path) -> None:
    """Fifty cycles, each ended by a kill at a random moment: warm, told right, nothing left."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    luck = random.Random(seed)
    path = script(tmp_path, GRANDCHILD + "time.sleep(600)")
    spec = make_spec(path, str(tmp_path), slots=2)
    everybody: set[int] = set()
    async with kept_warm(spec, ready=0, preload=("json",), budget=Budget(1000)) as pool:
        for cycle in range(50):
            pool.refill()
            seat = make_seat(2, cycle=cycle)
            async with started(spec, tmp_path, pool=pool, seat=seat) as workers:
                everybody.update(workers.pids)
                await asyncio.sleep(luck.random() * 0.2)
                victim = luck.randrange(2)
                os.kill(workers.pids[victim], signal.SIGKILL)
                outcome = await ended(workers)
                assert [(f.rank, f.code) for f in outcome.failures] == [(victim, -9)]
    everybody.update(map(int, (tmp_path / "pids").read_text().split()))
    assert not any(map(alive, everybody))
