"""A fork server forks programs that are their parent's own; its death costs nothing but time."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from holdfast import faults, proc
from holdfast.proc import forkserver
from holdfast.proc.forkserver import ForkServer
from kids import alive
from patience import HANG_S, until


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules can be run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    )
    return tmp_path


@pytest.fixture
def warm(place: Path) -> Iterator[ForkServer]:
    """A fork server that has imported what the tests run, and something that is not there."""
    write(place, "slow", "import time; IMPORTED = time.monotonic()")
    one = ForkServer(["slow", "there.is.no.such"])
    try:
        assert one.wait(HANG_S)
        yield one
    finally:
        one.close()


def write(place: Path, name: str, text: str) -> None:
    """A module."""
    (place / f"{name}.py").write_text(textwrap.dedent(text))


STAYS = "import time\ndef main():\n    time.sleep(600)"


def python(module: str, *words: str) -> list[str]:
    """How it is started."""
    return [sys.executable, "-m", module, *words]


def start(
    warm: ForkServer, log: Path, *argv: str, env: dict[str, str] | None = None
) -> proc.Child:
    """Out of the fork server, or fail."""
    child = warm.spawn(python(*argv), log=log, env=env)
    assert child is not None
    return child


def test_it_is_what_a_plain_start_would_be(warm: ForkServer, place: Path) -> None:
    """Arguments, folder, environment, streams and name are those of `python -m`; only older."""
    write(
        place,
        "tells",
        """
        import os, sys
        import slow
        def main():
            env = os.environ
            print(sys.argv[1:], os.getcwd(), env.get("MINE"), env.get("OMP_NUM_THREADS"))
            print(slow.IMPORTED < float(sys.argv[2]), sys.stdin.read() == "")
            print("to the log", file=sys.stderr)
        """,
    )
    log = place / "deep" / "log"
    child = start(warm, log, "tells", "a b", str(time.monotonic()), env={"MINE": "yes"})
    assert child.wait(HANG_S) == 0
    first, second, third = log.read_text().splitlines()
    assert first.startswith("['a b', ")
    assert first.endswith(f"{place} yes {os.environ.get('OMP_NUM_THREADS')}")
    assert second == "True True"
    assert third == "to the log"


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("raise SystemExit(7)", 7, ""),
        ("raise SystemExit", 0, ""),
        ("raise SystemExit('no')", 1, "no\n"),
        ("raise ValueError('broken')", 1, "ValueError: broken\n"),
        ("os.kill(os.getpid(), 9)", -9, ""),
        ("atexit.register(print, 'at the end')", 0, "at the end\n"),
        ("threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()", 0, "late\n"),
    ],
)
def test_it_ends_as_a_plain_start_would(
    warm: ForkServer, place: Path, body: str, code: int, said: str
) -> None:
    """Exit codes, what is printed on the way out, threads that are waited for."""
    write(place, "ends", f"import atexit, os, threading, time\ndef main():\n    {body}")
    log = place / "log"
    with start(warm, log, "ends") as child:
        assert child.wait(HANG_S) == code
    assert log.read_text().endswith(said)


def test_a_child_is_its_parents(warm: ForkServer, place: Path) -> None:
    """Parent, session and name are a plain child's; the fork server's death is nothing to it."""
    write(place, "stays", STAYS)
    with start(warm, place / "log", "stays", "here") as child:
        seen = psutil.Process(child.pid)
        assert seen.ppid() == os.getpid()
        assert os.getsid(child.pid) == os.getpgid(child.pid) == child.pid
        until(lambda: seen.cmdline()[0] == "python -m stays here", "its name")
        os.kill(warm._child.pid, signal.SIGKILL)
        until(lambda: not warm.alive(), "the fork server's death")
        assert warm.spawn(python("stays")) is None
        assert child.alive()
        child.signal(signal.SIGTERM)
        assert child.wait(HANG_S) == -signal.SIGTERM
    warm.tend()
    assert warm.wait(HANG_S)
    with start(warm, place / "log", "stays") as child:
        assert child.alive()


def test_everybody_dies_with_the_parent(place: Path) -> None:
    """kill -9 of the parent leaves neither child nor fork server, nor one of the child's."""
    write(
        place,
        "middle",
        """
        import os, sys, time
        from holdfast.proc.forkserver import inherit
        def main():
            own = inherit()
            assert own.wait(60)
            child = own.spawn([sys.executable, "-m", "stays"])
            print(os.getpid(), own._child.pid, child.pid, flush=True)
            time.sleep(600)
        """,
    )
    write(place, "stays", STAYS)
    write(
        place,
        "top",
        """
        import sys, time
        from holdfast.proc.forkserver import ForkServer
        if __name__ == "__main__":
            one = ForkServer(["middle"])
            assert one.wait(60)
            print(one._child.pid, flush=True)
            one.spawn([sys.executable, "-m", "middle"])
            time.sleep(600)
        """,
    )
    top = proc.spawn(python("top"), stdout=subprocess.PIPE)
    with top:
        assert top.process.stdout is not None
        words = top.process.stdout.readline() + top.process.stdout.readline()
        pids = [int(word) for word in words.split()]
        assert len(pids) == 4
        assert all(map(alive, pids))
        os.kill(top.pid, signal.SIGKILL)
        until(lambda: not any(map(alive, pids)), f"the end of {pids}")


def test_a_child_that_nobody_tells_ends(warm: ForkServer) -> None:
    """Whoever asked may die before it has said what it wants: nothing is run, nobody is left."""
    ours, theirs = socket.socketpair()
    with forkserver._adopting():
        socket.send_fds(warm._line, [forkserver._WANTED], [theirs.fileno()])
        theirs.close()
        pid = int.from_bytes(ours.recv(4), "big")
    assert alive(pid)
    ours.close()
    assert os.waitpid(pid, 0)[1] == 0


def test_one_that_has_threads_is_not_used(place: Path) -> None:
    """A fork beside threads may hang: such a fork server ends, and programs start the long way."""
    write(
        place,
        "threads",
        "import threading\nthreading.Thread(target=threading.Event().wait).start()",
    )
    one = ForkServer(["threads"])
    try:
        assert not one.wait(HANG_S)
        assert one.spawn(python("json.tool", "--help")) is None
        for _ in range(10):
            one.tend()
            one.wait(HANG_S)
        assert one._revivals == forkserver._REVIVALS
    finally:
        one.close()


def test_what_is_not_ours_starts_the_long_way(warm: ForkServer) -> None:
    """Programs and scripts are not for a fork server."""
    assert warm.spawn(["/bin/true"]) is None
    assert warm.spawn([sys.executable, "script.py"]) is None


def test_fault_points_are_the_childs_own(
    warm: ForkServer, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan in the environment arms the child, though its modules were imported without it."""
    write(
        place,
        "hits",
        """
        from holdfast import faults
        def main():
            faults.declare("forks.test", "For this test.")
            faults.point("forks.test")
        """,
    )
    with start(warm, place / "log", "hits") as child:
        assert child.wait(HANG_S) == 0
    armed = {faults.PLAN_VARIABLE: "forks.test:kill"}
    with start(warm, place / "log", "hits", env=armed) as child:
        assert child.wait(HANG_S) == -signal.SIGKILL


def test_many_at_once(warm: ForkServer, place: Path) -> None:
    """A hundred children, some of which are killed at once: each is collected, none is left."""
    write(place, "quick", "import sys\ndef main():\n    sys.exit(int(sys.argv[1]))")
    children = [start(warm, place / "log", "quick", str(number)) for number in range(100)]
    for child in children[::7]:
        child.kill_group()
    codes = [child.wait(HANG_S) for child in children]
    assert all(code in (number, -9) for number, code in enumerate(codes))
    assert all(codes[number] == number for number in range(100) if number % 7)
    for child in children:
        child.kill_group()
    assert not [one for one in psutil.Process().children() if one.pid in {c.pid for c in children}]
