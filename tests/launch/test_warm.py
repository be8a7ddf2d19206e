"""Warm interpreters: as a plain start, only sooner; and never more of them than is good."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast import events
from holdfast.launch import warm
from holdfast.launch.spec import PER_SEAT, Order, Spec, environment
from holdfast.launch.warm import Budget, WarmLost, WarmOff, WarmPool
from holdfast.proc.preload import USER
from kids import alive
from launch.node import ended, kept_warm, make_seat, make_spec, printed, script, started
from patience import auntil

PROBE = """
'''Its own docstring.'''
import json, os, sys, threading
import __main__
seen = sorted(k for k in list(vars(__main__)) if k.startswith("__"))
about = {
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "cwd": os.getcwd(),
    "name": __name__, "file": globals().get("__file__"), "package": __package__,
    "spec": getattr(__spec__, "name", None), "loader": type(__loader__).__name__,
    "cached": globals().get("__cached__"), "doc": __doc__, "main": seen,
    "same": vars(__main__) is globals(), "builtins": type(__builtins__).__name__,
    "flags": str(sys.flags), "env": dict(os.environ), "threads": threading.active_count(),
    "hook": sys.excepthook is sys.__excepthook__, "line_buffering": sys.stdout.line_buffering,
    "write_through": sys.stdout.write_through, "executable": sys.executable,
    "annotations": __annotations__, "encoding": [sys.stdout.encoding, sys.stderr.errors],
    "term": str(__import__("signal").getsignal(15)), "int": str(__import__("signal").getsignal(2)),
}
print(json.dumps(about))
"""
CLUSTER = """
import multiprocessing, pickle, sys
class Thing:
    def __init__(self, n): self.n = n
def double(thing): return Thing(thing.n * 2)
if __name__ == "__main__":
    assert pickle.loads(pickle.dumps(Thing(3))).n == 3
    for method in ("spawn", "fork", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(method, pool.map(double, [Thing(1), Thing(2)])[1].n, flush=True)
"""


async def run(spec: Spec, folder: Path, pool: WarmPool | None) -> str:
    """Run one worker to its end; give its output."""
    async with started(spec, folder, pool=pool) as workers:
        assert workers.starts[0].warm == (pool is not None), workers.starts
        outcome = await ended(workers)
        files = workers.workers[0].files
        text = printed(workers)
        assert outcome.success, (text, files.last_lines())
        for path in (files.stdout, files.stderr):
            assert path is not None
            path.unlink()
        return text


@pytest.mark.parametrize("kind", ["script", "symlink", "module", "folder", "pyc"])
async def test_the_users_code_cannot_tell(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`__main__`, argv, path, flags, environment: equal in a plain, a cold and a warm start."""
    home = tmp_path / "home"
    package = home / "pkg"
    package.mkdir(parents=True)
    monkeypatch.chdir(home)
    script(package, PROBE, "mod.py")
    script(package, "", "__init__.py")
    entry = {"script": "pkg/mod.py", "module": "pkg.mod", "folder": "app", "pyc": "mod.pyc"}
    if kind == "symlink":
        (home / "link.py").symlink_to("pkg/mod.py")
        entry["symlink"] = "link.py"
    elif kind == "folder":
        (home / "app").mkdir()
        script(home / "app", PROBE, "__main__.py")
    elif kind == "pyc":
        compiling = "import py_compile, sys; py_compile.compile(sys.argv[1], cfile=sys.argv[2])"
        subprocess.run(
            [sys.executable, "-c", compiling, "pkg/mod.py", "mod.pyc"], check=True, timeout=30
        )
    made: dict[str, Any] = {"kind": "module"} if kind == "module" else {}
    spec = make_spec(entry[kind], "a b", "--x", **made)
    async with kept_warm(spec, preload=("json",)) as pool:
        warmed = json.loads(await run(spec, tmp_path, pool))
    cold = json.loads(await run(spec, tmp_path, None))
    plain_argv = ["-m", entry[kind]] if kind == "module" else [entry[kind]]
    plain = json.loads(
        subprocess.run(
            [sys.executable, "-u", *plain_argv, "a b", "--x"],
            env=environment(spec, make_seat(1), 0, error_file="/e", beat="/b"),
            check=True,
            timeout=30,
            capture_output=True,
        ).stdout
    )
    for told in (warmed, cold, plain):
        for name in ("HOLDFAST_BEAT", "TORCHELASTIC_ERROR_FILE"):
            assert told["env"].pop(name)
    assert cold == plain
    assert warmed == plain


async def test_children_of_main_work(tmp_path: Path) -> None:
    """multiprocessing finds classes and functions of `__main__`, however it starts processes."""
    spec = make_spec(script(tmp_path, CLUSTER))
    async with kept_warm(spec, preload=("multiprocessing",)) as pool:
        assert await run(spec, tmp_path, pool) == "spawn 4\nfork 4\nforkserver 4\n"


@pytest.mark.long
def test_importing_torch_reads_nothing_of_a_seat() -> None:
    """The rule for starting early rests on this: no variable of a seat counts at import."""
    code = f"""
import os, sys
read = set()
kind = type(os.environ)
def watched(self, name, get=kind.__getitem__):
    read.add(name)
    return get(self, name)
kind.__getitem__ = watched
for name in {USER!r}: __import__(name)
print(len(read), sorted(read & set({sorted(PER_SEAT)!r})), len(os.listdir("/proc/self/task")))
"""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    out = subprocess.run(
        [sys.executable, "-c", code], env=env, check=True, timeout=100, capture_output=True
    )
    count, rest = out.stdout.decode().split(" ", 1)
    assert int(count) > 20, "the reading was not watched"
    assert rest == "[] 1\n"


async def test_what_differs_at_import_is_started_cold(tmp_path: Path) -> None:
    """Another variable or another folder: no interpreter is given, and the reason is told."""
    spec = make_spec(script(tmp_path, ""), env={"OMP_NUM_THREADS": "1"})
    other = make_spec(script(tmp_path, ""), env={"OMP_NUM_THREADS": "2", "NEW": "1"})
    async with kept_warm(spec) as pool:
        async with started(other, tmp_path, pool=pool) as workers:
            why = workers.starts[0].why
            assert why == "variables that count at import differ: NEW, OMP_NUM_THREADS"
            assert (await ended(workers)).success
        async with started(spec, tmp_path, pool=pool, cwd=tmp_path) as workers:
            assert workers.starts[0].why.startswith(f"it was to run in {tmp_path}, not in ")
            assert (await ended(workers)).success
        assert pool.ready == 1, "the refused orders took nothing"
        async with started(spec, tmp_path, pool=pool) as workers:
            assert workers.starts[0].warm


def order(spec: Spec) -> Order:
    env = environment(spec, make_seat(spec.slots), 0, error_file="/e", beat="/b")
    return Order(entry=spec.entry, kind=spec.kind, args=(), env=env, cwd=str(Path.cwd()))


async def test_one_that_is_still_importing_is_given_too(tmp_path: Path) -> None:
    """It is ahead of a cold start all the same; a ready one comes first."""
    script(tmp_path, "import time; time.sleep(1)", "slow_thing.py")
    spec = make_spec(script(tmp_path, "print(1)"), env={"PYTHONPATH": str(tmp_path)})
    async with kept_warm(spec, ready=0, preload=("slow_thing",)) as pool:
        pool.fill()
        assert await run(spec, tmp_path, pool) == "1\n"


async def test_never_more_than_slots_wait() -> None:
    """However often it is asked to fill up."""
    async with kept_warm(make_spec("x", slots=3), ready=0) as pool:
        for _ in range(5):
            pool.fill()
            pool.refill()
        assert pool.waiting == 3
        await auntil(lambda: pool.ready == 3)
        assert pool.started == 3
        pids = [blank.process.pid for blank in pool._blanks]
    assert not any(map(alive, pids))


async def test_a_crash_loop_cannot_drain_the_machine() -> None:
    """Workers that die at once, a hundred cycles: the budget bounds the starts."""
    spec = make_spec("x")
    cold = 0
    async with kept_warm(spec, ready=0, budget=Budget(4, window_s=600)) as pool:
        for _ in range(100):
            pool.refill()
            blank, why = pool.take(order(spec))
            if blank is None:
                assert why == "no interpreter was ready"
                cold += 1
            else:
                await blank.discard(10)
        assert (pool.started, cold) == (4, 96)


@pytest.mark.parametrize(
    ("begun", "now", "wait_s"),
    [([], 0, 0), ([1], 1, 0), ([1, 2], 5, 6), ([1, 2], 11, 0), ([1, 2, 9], 10, 2)],
)
def test_budget(begun: list[float], now: float, wait_s: float) -> None:
    """Two starts in ten seconds."""
    assert Budget(2, 10).wait_s(begun, now) == wait_s


async def test_one_that_dies_while_waiting_is_replaced() -> None:
    """And it is told; within the budget."""
    told: list[events.Event] = []
    async with kept_warm(make_spec("x"), tell=told.append) as pool:
        first = pool._blanks[0].process.pid
        os.kill(first, signal.SIGKILL)
        await auntil(lambda: pool.ready == 1 and pool._blanks[0].process.pid != first)
    lost = [event for event in told if isinstance(event, WarmLost)]
    assert [(event.child_pid, event.reason) for event in lost] == [(first, "it ended with -9")]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("import os; os.abort()", "it ended with -6 while importing"),
        (
            "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start()",
            "importing bad_thing started a thread",
        ),
    ],
)
async def test_a_broken_import_turns_it_off(tmp_path: Path, body: str, reason: str) -> None:
    """Three in a row that are not fit, and no more are started; starts are cold from then on."""
    script(tmp_path, body, "bad_thing.py")
    spec = make_spec(script(tmp_path, "print(2)"), env={"PYTHONPATH": str(tmp_path)})
    told: list[events.Event] = []
    async with kept_warm(spec, ready=0, preload=("bad_thing",), tell=told.append) as pool:
        pool.fill()
        await auntil(lambda: pool.off)
        off = told[-1]
        assert isinstance(off, WarmOff)
        assert reason in off.reason
        assert pool.started == warm.MAX_FAILURES
        async with started(spec, tmp_path, pool=pool) as workers:
            assert workers.starts[0].why == pool.off
            assert (await ended(workers)).success


async def test_a_module_that_is_not_there_is_no_trouble() -> None:
    """Where torch is not installed, an interpreter without it is kept."""
    async with kept_warm(make_spec("x"), preload=("holdfast_has_no_such_package",)) as pool:
        assert not pool.off


@pytest.mark.long
async def test_a_gentle_fill_is_one_at_a_time_and_low(tmp_path: Path) -> None:
    """Low priority while importing, in nice and in the autogroup; as usual once ready."""
    script(tmp_path, "import time; time.sleep(0.5)", "slow_thing.py")
    spec = make_spec("x", slots=2, env={"PYTHONPATH": str(tmp_path)})
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    async with kept_warm(spec, ready=0, preload=("slow_thing",)) as pool:
        pool.refill()
        assert pool.waiting == 1, "one at a time"
        pid = pool._blanks[0].process.pid

        def priority() -> list[str]:
            found = [str(os.getpriority(os.PRIO_PROCESS, pid))]
            group = Path(f"/proc/{pid}/autogroup")
            return found + ([group.read_text().split()[-1]] if group.exists() else [])

        assert "19" in priority() or not (warm._nice_can_be_taken_back() or len(priority()) > 1)
        await auntil(lambda: pool.ready == 2, "both")
        await auntil(lambda: priority() in ([str(usual), "0"], [str(usual)]), "usual priority")


async def test_patience_ends(tmp_path: Path) -> None:
    """On a machine that is busy for ever an import still comes to an end."""
    script(tmp_path, "import time; time.sleep(60)", "slow_thing.py")
    spec = make_spec("x", env={"PYTHONPATH": str(tmp_path)})
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    async with kept_warm(spec, ready=0, preload=("slow_thing",), patience_s=0.2) as pool:
        pool.refill()
        pid = pool._blanks[0].process.pid
        await auntil(lambda: os.getpriority(os.PRIO_PROCESS, pid) == usual and not pool._low)
    assert not alive(pid)
