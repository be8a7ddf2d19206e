"""Fault points: they cost nothing when off, and hit exactly where and when they should."""

import asyncio
import contextlib
import errno
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import timeit
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast import events, faults
from holdfast.errors import Mistake, NoRoom, Unavailable
from holdfast.faults import Clause, FaultFired, Plan
from holdfast.proc import Child, die_with_parent, spawn
from patience import HANG_S

SRC = str(Path(holdfast.__file__).parents[1])
HERE = faults.declare("test.here", "where the tests fail")
THERE = faults.declare("test.there", "where they fail next")


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    faults.arm(faults.Plan(()))  # other tests may have counted something
    yield
    faults.disarm()
    events.unconfigure()


# ---- plans -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "clauses"),
    [
        ("", ()),
        (" ; ;", ()),
        ("a.b:kill", (Clause("a.b", "kill"),)),
        ("a.b:kill@3", (Clause("a.b", "kill", first=3),)),
        ("a.b:stop@2+", (Clause("a.b", "stop", first=2, onward=True),)),
        ("a.b:kill@2!", (Clause("a.b", "kill", first=2, once=True),)),
        ("a.b:delay=0.5@1+", (Clause("a.b", "delay", "0.5", onward=True),)),
        ("a.b:raise=Unavailable", (Clause("a.b", "raise", "Unavailable"),)),
        ("a.b:raise=OSError(ENOSPC)@9", (Clause("a.b", "raise", "OSError(ENOSPC)", 9),)),
        (
            " weights.publish.after_rename:kill@3 ; ledger.txn:delay=1e-1 ",
            (Clause("weights.publish.after_rename", "kill", "", 3),
             Clause("ledger.txn", "delay", "1e-1")),
        ),
    ],
)  # fmt: skip
def test_plans_are_understood(text: str, clauses: tuple[Clause, ...]) -> None:
    """A plan is read, and its text reads the same again."""
    plan = faults.parse(text)
    assert plan == Plan(clauses)
    assert faults.parse(str(plan)) == plan


@pytest.mark.parametrize(
    "text",
    [
        "kill",
        "a.b:",
        "a.b:explode",
        "a.b:kill=3",
        "a.b:kill@0",
        "a.b:kill@-1",
        "a.b:kill@99999999999999",
        "a.b:kill@1+!",
        "a.b:kill!",
        "a.b:delay",
        "a.b:delay=soon",
        "a.b:delay=nan",
        "a.b:delay=1e9",
        "a.b:raise=KeyboardInterrupt",
        "a.b:raise=ClassVar",
        "a.b:raise=BatchFailed",
        "a.b:raise=OSError(ENONSENSE)",
        "a.b:raise=OSError(errorcode)",
        "A.B:kill",
        "ab:kill",
        "a.b:kill,c.d:kill",
        "a.b:kill;c.d",
        ";".join(["a.b:kill"] * 101),
    ],
)
def test_bad_plans_are_one_mistake(text: str) -> None:
    """What is not understood is refused as a whole, and nothing is armed."""
    with pytest.raises(Mistake):
        faults.arm(text)
    faults.point("a.b")


@given(
    st.text(max_size=40) | st.from_regex(r"a\.b:(kill|delay|raise)(=.*)?(@.*)?", fullmatch=True)
)
def test_any_text_is_a_plan_or_a_mistake(text: str) -> None:
    """No text raises anything but `Mistake`."""
    try:
        plan = faults.parse(text)
    except Mistake:
        return
    assert faults.parse(str(plan)) == plan


@pytest.mark.parametrize(
    ("clause", "firing"),
    [("@1", {1}), ("@3", {3}), ("@1+", {1, 2, 3, 4, 5}), ("@4+", {4, 5}), ("", {1})],
)
def test_the_nth_hit(clause: str, firing: set[int]) -> None:
    """`@n` fires at exactly the n-th hit, `@n+` from there on."""
    faults.arm(f"test.here:raise=Unavailable{clause}")
    fired = set()
    for hit in range(1, 6):
        faults.point(THERE)
        try:
            faults.point(HERE)
        except Unavailable as error:
            assert "test.here" in str(error)  # noqa: PT017 -- it does not always fire
            fired.add(hit)
    assert fired == firing


def test_arming_and_disarming() -> None:
    """A new plan replaces the old one and counts from 0; without a plan nothing counts."""
    faults.arm("test.here:raise=Unavailable@2")
    faults.point(HERE)
    faults.arm("test.here:raise=Unavailable@2")
    faults.point(HERE)
    with pytest.raises(Unavailable):
        faults.point(HERE)
    faults.arm("test.here:raise=Unavailable@1")
    faults.disarm()
    faults.point(HERE)


def test_several_clauses_for_one_point() -> None:
    """They count the same hits and act in their order; errors of the system look real."""
    errors = "test.here:raise=Unavailable@2;test.here:raise=OSError(ENOSPC)@3"
    faults.arm(f"test.here:delay=0@1+;{errors}")
    faults.point(HERE)
    with pytest.raises(Unavailable):
        faults.point(HERE)
    with pytest.raises(OSError, match="No space left") as caught:
        faults.point(HERE)
    assert caught.value.errno == errno.ENOSPC


def test_threads_count_together() -> None:
    """Of many hits at the same time exactly one is the n-th."""
    faults.arm("test.here:raise=Unavailable@1500;test.here:raise=NoRoom@3001")
    fired: list[str] = []

    def work() -> None:
        for _ in range(500):
            try:
                faults.point(HERE)
            except Unavailable:
                fired.append(threading.current_thread().name)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert len(fired) == 1
    with pytest.raises(NoRoom):
        faults.point(HERE)  # the 3001st: none was counted twice, and none was missed


def test_a_point_that_is_off_costs_next_to_nothing() -> None:
    """Far below a microsecond; the bound is wide because the machine may be busy."""
    point = faults.point
    best = min(timeit.repeat(lambda: point(HERE), number=10_000, repeat=5)) / 10_000
    assert best < 1e-6


# ---- delays ----------------------------------------------------------------------------


def test_a_delay_blocks() -> None:
    """`point` waits as long as the plan says."""
    faults.arm("test.here:delay=0.05")
    took = timeit.timeit(lambda: faults.point(HERE), number=1)
    assert took >= 0.05


async def test_an_awaited_delay_lets_others_run() -> None:
    """`apoint` awaits: meanwhile the loop works, with the sleep that is given."""
    faults.arm("test.here:delay=7@1+;test.there:raise=Unavailable")
    asked: list[float] = []
    asleep, going = asyncio.Event(), asyncio.Event()

    async def sleep(s: float) -> None:
        asked.append(s)
        asleep.set()
        await going.wait()

    task = asyncio.ensure_future(faults.apoint(HERE, sleep))
    await asyncio.wait_for(asleep.wait(), HANG_S)
    assert (asked, task.done()) == ([7.0], False)
    going.set()
    await asyncio.wait_for(task, HANG_S)
    with pytest.raises(Unavailable):
        await faults.apoint(THERE)
    faults.disarm()
    await faults.apoint(HERE)


# ---- declared points -------------------------------------------------------------------


def test_declaring() -> None:
    """A point is declared once; the same again is the same, another text is a mistake."""
    assert faults.declare("test.here", "where the tests fail") == HERE
    with pytest.raises(Mistake, match="twice"):
        faults.declare("test.here", "somewhere else")
    for name in ("here", "Test.here", "test.here:kill", "test.", ""):
        with pytest.raises(Mistake, match="named like"):
            faults.declare(name, "x")


def test_the_catalogue_and_check() -> None:
    """The catalogue has every point; `check` finds names that are not in it."""
    assert faults.catalogue()["test.here"] == "where the tests fail"
    faults.check("test.here:kill;test.there:stop")
    with pytest.raises(Mistake, match=r"no fault point test\.hree: did you mean test\.here"):
        faults.check("test.hree:kill")
    with pytest.raises(Mistake, match="catalogue"):
        faults.check("zzz.qqq:kill")
    faults.arm("not.yet.declared:raise=Unavailable")  # arming does not ask


# ---- firings are told first ------------------------------------------------------------


def test_a_firing_is_an_event_and_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both say point, action and hit, and are written although the point then raises."""
    monkeypatch.setenv("HOLDFAST_FAULTS_LOG", str(tmp_path / "faults"))
    events.configure(tmp_path / "events", "tester")
    faults.arm("test.here:raise=Unavailable@2+")
    faults.point(HERE)
    for _ in range(2):
        with pytest.raises(Unavailable):
            faults.point(HERE)
    assert fired(tmp_path) == [("test.here", "raise", 2), ("test.here", "raise", 3)]
    monkeypatch.setenv("HOLDFAST_FAULTS_LOG", str(tmp_path / "no" / "faults"))
    with pytest.raises(Mistake, match="HOLDFAST_FAULTS_LOG"):
        faults.point(HERE)


# ---- real processes --------------------------------------------------------------------

_WORKER = """
import os, sys, threading
from pathlib import Path
from holdfast import events, faults

HERE = faults.declare("test.here", "where the tests fail")
events.configure(Path(sys.argv[1]), "worker")

def work():
    for n in range(1, 6):
        os.write(1, str(n).encode())
        faults.point(HERE)

idle = threading.Event()
threading.Thread(target=idle.wait, daemon=True).start()
if sys.argv[2] == "thread":
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
else:
    work()
os.write(1, b".")
"""


@contextlib.contextmanager
def worker(
    tmp_path: Path, plan: str, where: str = "main", log: Path | None = None
) -> Iterator[Child]:
    """A process that passes the point five times, and says so each time before."""
    plans = {"HOLDFAST_FAULTS": plan, "HOLDFAST_FAULTS_LOG": str((log or tmp_path) / "faults")}
    argv = [sys.executable, "-c", _WORKER, str(tmp_path / "events"), where]
    with spawn(argv, env={"PYTHONPATH": SRC, **plans}, stdout=subprocess.PIPE) as child:
        yield child
        assert child.process.stdout is not None
        child.process.stdout.close()


def said(child: Child, count: int) -> bytes:
    """What the child has said, `count` bytes or up to its end."""
    assert child.process.stdout is not None
    return child.process.stdout.read(count)


def fired(tmp_path: Path) -> list[tuple[str, str, int]]:
    """The firings, as the event log and the firing log agree on them."""
    told = [
        (event.point, event.action, event.hit)
        for event in events.read(tmp_path / "events")
        if isinstance(event, FaultFired)
    ]
    log = tmp_path / "faults"
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    assert told == [(one["point"], one["action"], one["hit"]) for one in lines]
    return told


@pytest.mark.parametrize("where", ["main", "thread"])
@pytest.mark.parametrize("hit", [1, 3, 5])
def test_a_process_is_killed_at_the_nth_hit(tmp_path: Path, hit: int, where: str) -> None:
    """It dies by SIGKILL before anything behind the point happens, and has told."""
    with worker(tmp_path, f"test.here:kill@{hit}", where) as child:
        assert said(child, 99) == b"12345"[:hit]
        assert child.process.wait(HANG_S) == -signal.SIGKILL
    assert fired(tmp_path) == [("test.here", "kill", hit)]


@pytest.mark.parametrize("where", ["main", "thread"])
def test_a_process_is_stopped_at_the_nth_hit(tmp_path: Path, where: str) -> None:
    """It stops right at the point, and goes on when it is continued."""
    with worker(tmp_path, "test.here:stop@3", where) as child:
        assert said(child, 3) == b"123"
        pid, status = os.waitpid(child.pid, os.WUNTRACED)  # returns when it has stopped
        assert (pid, os.WIFSTOPPED(status)) == (child.pid, True)
        assert fired(tmp_path) == [("test.here", "stop", 3)]
        os.kill(child.pid, signal.SIGCONT)
        assert said(child, 99) == b"45."
        assert child.process.wait(HANG_S) == 0


def test_only_the_first_process_is_killed(tmp_path: Path) -> None:
    """`!`: who comes to its n-th hit first is killed; who follows under the same plan is not."""
    plan = "test.here:kill@3!;test.here:kill@5!"
    for dies_at in (3, 5, None):
        with worker(tmp_path, plan) as child:
            assert said(child, 99) == (b"12345." if dies_at is None else b"12345"[:dies_at])
            assert child.process.wait(HANG_S) == (0 if dies_at is None else -signal.SIGKILL)
    assert fired(tmp_path) == [("test.here", "kill", 3), ("test.here", "kill", 5)]


def test_of_many_at_once_one_fires(tmp_path: Path) -> None:
    """Processes that come there together: exactly one fires, and only that one tells."""
    folders = [tmp_path / str(at) for at in range(4)]
    for folder in folders:
        folder.mkdir()
    with contextlib.ExitStack() as stack:
        children = [
            stack.enter_context(worker(folder, "test.here:kill@2!", log=tmp_path))
            for folder in folders
        ]
        codes = [child.process.wait(HANG_S) for child in children]
    assert sorted(codes) == [-signal.SIGKILL, 0, 0, 0]
    assert len((tmp_path / "faults").read_text().splitlines()) == 1


def test_once_is_remembered_by_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a log a clause with `!` is a mistake; a log that holds rubbish does no harm."""
    monkeypatch.delenv("HOLDFAST_FAULTS_LOG", raising=False)
    with pytest.raises(Mistake, match="HOLDFAST_FAULTS_LOG"):
        faults.arm("test.here:raise=Unavailable@1!")
    (tmp_path / "faults").write_bytes(b"\xff\n{}\n")
    monkeypatch.setenv("HOLDFAST_FAULTS_LOG", str(tmp_path / "faults"))
    faults.arm("test.here:raise=Unavailable@1!")
    with pytest.raises(Unavailable):
        faults.point(HERE)
    faults.arm("test.here:raise=Unavailable@1!")
    faults.point(HERE)


def imported(tmp_path: Path, plan: str) -> tuple[int, str]:
    """Exit code and output of a process that imports the module under a plan."""
    argv, log = [sys.executable, "-c", "import holdfast.faults"], tmp_path / "out"
    with spawn(argv, env={"PYTHONPATH": SRC, "HOLDFAST_FAULTS": plan}, log=log) as child:
        return child.process.wait(HANG_S), log.read_text()


def test_a_bad_plan_in_the_environment_is_one_mistake(tmp_path: Path) -> None:
    """The process ends at once and says which clause it does not understand."""
    code, text = imported(tmp_path, "test.here:explode")
    assert code == 1
    assert "Mistake: fault clause 'test.here:explode': 'explode' is not one of" in text


def test_a_point_that_nobody_has_is_told(tmp_path: Path) -> None:
    """A misspelt plan does nothing: that must not look like a plan that was survived."""
    plan = "weights.publish.markd:kill;weights.publish.marked:kill@9;test.here:kill"
    code, text = imported(tmp_path, plan)
    assert code == 0
    first, second = text.splitlines()
    assert first.endswith(
        "no fault point weights.publish.markd: did you mean weights.publish.marked?"
    )
    assert "no fault point test.here" in second


def test_every_point_is_found_in_the_text() -> None:
    """What the catalogue and the warning go by is what the modules declare when imported."""
    for path in Path(holdfast.__file__).parent.rglob("*.py"):
        if re.search(r"^\w+ = .*declare\(", path.read_text(), re.MULTILINE):
            importlib.import_module(".".join(path.relative_to(SRC).with_suffix("").parts))
    ours = {name: about for name, about in faults._declared.items() if name[:5] != "test."}
    assert faults.declared_in(holdfast) == ours


def test_a_forked_child_counts_for_itself() -> None:
    """Hits of the parent do not count in the child."""
    faults.arm("test.here:kill@2")
    faults.point(HERE)
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            die_with_parent(parent)
            faults.point(HERE)
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
