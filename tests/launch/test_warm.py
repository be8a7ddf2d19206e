"""Warm interpreters: as a plain start, only sooner; and never more of them than is good."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast import events
from holdfast.launch import warm
from holdfast.launch.spec import PER_SEAT, Order, Spec, environment
from holdfast.launch.warm import Budget, WarmLost, WarmOff, WarmPool, WarmReady
from holdfast.proc.preload import USER
from launch.node import alive, auntil, make_seat, make_spec, script, started
from patience import HANG_S

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


async def filled(pool: WarmPool, count: int) -> None:
    await auntil(lambda: pool.ready == count, f"{count} ready", limit_s=90)


async def run(spec: Spec, folder: Path, pool: WarmPool | None) -> tuple[str, str]:
    """Run one worker to its end; give its output."""
    async with started(spec, folder, pool=pool) as workers:
        assert workers.starts[0].warm == (pool is not None), workers.starts
        outcome = await asyncio.wait_for(workers.wait(), 60)
        files = workers.workers[0].files
        assert files.stdout is not None
        assert files.stderr is not None
        text = (files.stdout.read_text(), files.stderr.read_text())
        assert outcome.success, text
        files.stdout.unlink()
        files.stderr.unlink()
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
    pool = WarmPool(spec, preload=("json",))
    pool.fill()
    await filled(pool, 1)
    warmed = json.loads((await run(spec, tmp_path, pool))[0])
    cold = json.loads((await run(spec, tmp_path, None))[0])
    await pool.close()
    plain_argv = ["-m", entry[kind]] if kind == "module" else [entry[kind]]
    plain = json.loads(
        subprocess.run(
            [sys.executable, "-u", *plain_argv, "a b", "--x"],
            env=environment(spec, make_seat(1), 0),
            check=True,
            timeout=30,
            capture_output=True,
        ).stdout
    )
    for told in (warmed, cold):
        for name in ("HOLDFAST_BEAT", "TORCHELASTIC_ERROR_FILE"):
            assert told["env"].pop(name)
    assert cold == plain
    assert warmed == plain


async def test_children_of_main_work(tmp_path: Path) -> None:
    """multiprocessing finds classes and functions of `__main__`, however it starts processes."""
    spec = make_spec(script(tmp_path, CLUSTER))
    pool = WarmPool(spec, preload=("multiprocessing",))
    pool.fill()
    await filled(pool, 1)
    out, err = await run(spec, tmp_path, pool)
    assert out == "spawn 4\nfork 4\nforkserver 4\n", err
    await pool.close()


TORCH = """
import time, os, threading
began = time.time()
import torch, torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
@record
def main():
    store = dist.FileStore(os.environ["STORE_FILE"], 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    value = torch.ones(3)
    dist.all_reduce(value)
    print(time.time(), threading.active_count(), torch.get_num_threads(), flush=True)
    raise ValueError("recorded")
main()
"""


@pytest.mark.long
async def test_a_warm_start_with_torch_takes_a_fraction(tmp_path: Path) -> None:
    """Order to first all-reduce: well under a third of a cold start; `record` works in it."""
    spec = make_spec(
        script(tmp_path, TORCH), env={"STORE_FILE": str(tmp_path / "s"), "OMP_NUM_THREADS": "1"}
    )
    told: list[events.Event] = []
    pool = WarmPool(spec, tell=told.append)
    pool.fill()
    await filled(pool, 1)
    (ready,) = told
    assert isinstance(ready, WarmReady)
    assert ready.threads == 1, "importing torch started threads"
    took_s = {}
    for which in (pool, None):
        (tmp_path / "s").unlink(missing_ok=True)
        began = time.time()
        async with started(spec, tmp_path, pool=which) as workers:
            assert workers.starts[0].warm == (which is not None)
            outcome = await asyncio.wait_for(workers.wait(), 90)
            files = workers.workers[0].files
            assert files.stdout is not None
            at, *threads = files.stdout.read_text().split()
            files.stdout.unlink()
            assert threads == ["1", "1"]
            assert outcome.first is not None
            assert outcome.first.reason == "ValueError: recorded"
            took_s[which] = float(at) - began
    await pool.close()
    print(f"to the first all-reduce: warm {took_s[pool]:.2f} s, cold {took_s[None]:.2f} s")
    assert took_s[pool] < took_s[None]


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
    pool = WarmPool(spec, preload=())
    pool.fill()
    await filled(pool, 1)
    async with started(other, tmp_path, pool=pool) as workers:
        why = workers.starts[0].why
        assert why == "variables that count at import differ: NEW, OMP_NUM_THREADS"
        assert (await asyncio.wait_for(workers.wait(), HANG_S)).success
    async with started(spec, tmp_path, pool=pool, cwd=tmp_path) as workers:
        assert workers.starts[0].why.startswith(f"it was to run in {tmp_path}, not in ")
        assert (await asyncio.wait_for(workers.wait(), HANG_S)).success
    assert pool.ready == 1, "the refused orders took nothing"
    async with started(spec, tmp_path, pool=pool) as workers:
        assert workers.starts[0].warm
    await pool.close()


def order(spec: Spec) -> Order:
    env = environment(spec, make_seat(spec.slots), 0)
    return Order(entry=spec.entry, kind=spec.kind, args=(), env=env, cwd=str(Path.cwd()))


async def test_one_that_is_still_importing_is_given_too(tmp_path: Path) -> None:
    """It is ahead of a cold start all the same; a ready one comes first."""
    script(tmp_path, "import time; time.sleep(1)", "slow_thing.py")
    spec = make_spec(script(tmp_path, "print(1)"), env={"PYTHONPATH": str(tmp_path)})
    pool = WarmPool(spec, preload=("slow_thing",))
    pool.fill()
    out, _ = await run(spec, tmp_path, pool)
    assert out == "1\n"
    await pool.close()


async def test_never_more_than_slots_wait() -> None:
    """However often it is asked to fill up."""
    pool = WarmPool(make_spec("x", slots=3), preload=())
    for _ in range(5):
        pool.fill()
        pool.refill()
    assert pool.waiting == 3
    await filled(pool, 3)
    assert pool.started == 3
    pids = [blank.process.pid for blank in pool._blanks]
    await pool.close()
    assert not any(map(alive, pids))


async def test_a_crash_loop_cannot_drain_the_machine() -> None:
    """Workers that die at once, a hundred cycles: the budget bounds the starts."""
    spec = make_spec("x")
    pool = WarmPool(spec, preload=(), budget=Budget(4, window_s=600))
    cold = 0
    for _ in range(100):
        pool.refill()
        blank, why = pool.take(order(spec))
        if blank is None:
            assert why == "no interpreter was ready"
            cold += 1
        else:
            await blank.discard(10)
    assert (pool.started, cold) == (4, 96)
    await pool.close()


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
    pool = WarmPool(make_spec("x"), preload=(), tell=told.append)
    pool.fill()
    await filled(pool, 1)
    first = pool._blanks[0].process.pid
    os.kill(first, signal.SIGKILL)
    await auntil(lambda: pool.ready == 1 and pool._blanks[0].process.pid != first)
    lost = [event for event in told if isinstance(event, WarmLost)]
    assert [(event.child_pid, event.reason) for event in lost] == [(first, "it ended with -9")]
    await pool.close()


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
    pool = WarmPool(spec, preload=("bad_thing",), tell=told.append)
    pool.fill()
    await auntil(lambda: pool.off)
    off = told[-1]
    assert isinstance(off, WarmOff)
    assert reason in off.reason
    assert pool.started == warm.MAX_FAILURES
    async with started(spec, tmp_path, pool=pool) as workers:
        assert workers.starts[0].why == pool.off
        assert (await asyncio.wait_for(workers.wait(), HANG_S)).success
    await pool.close()


async def test_a_module_that_is_not_there_is_no_trouble() -> None:
    """Where torch is not installed, an interpreter without it is kept."""
    pool = WarmPool(make_spec("x"), preload=("holdfast_has_no_such_package",))
    pool.fill()
    await filled(pool, 1)
    await pool.close()


@pytest.mark.long
async def test_a_gentle_fill_is_one_at_a_time_and_low(tmp_path: Path) -> None:
    """Low priority while importing, in nice and in the autogroup; as usual once ready."""
    script(tmp_path, "import time; time.sleep(0.5)", "slow_thing.py")
    spec = make_spec("x", slots=2, env={"PYTHONPATH": str(tmp_path)})
    pool = WarmPool(spec, preload=("slow_thing",))
    pool.refill()
    assert pool.waiting == 1, "one at a time"
    pid = pool._blanks[0].process.pid

    def priority() -> list[str]:
        found = [str(os.getpriority(os.PRIO_PROCESS, pid))]
        group = Path(f"/proc/{pid}/autogroup")
        return found + ([group.read_text().split()[-1]] if group.exists() else [])

    usual = os.getpriority(os.PRIO_PROCESS, 0)
    assert "19" in priority() or not (warm._nice_can_be_taken_back() or len(priority()) > 1)
    await filled(pool, 2)
    await auntil(lambda: priority() in ([str(usual), "0"], [str(usual)]), "usual priority")
    await pool.close()


async def test_patience_ends(tmp_path: Path) -> None:
    """On a machine that is busy for ever an import still comes to an end."""
    script(tmp_path, "import time; time.sleep(60)", "slow_thing.py")
    spec = make_spec("x", env={"PYTHONPATH": str(tmp_path)})
    pool = WarmPool(spec, preload=("slow_thing",), patience_s=0.2)
    pool.refill()
    pid = pool._blanks[0].process.pid
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    await auntil(lambda: os.getpriority(os.PRIO_PROCESS, pid) == usual and not pool._low)
    await pool.close()
    assert not alive(pid)
