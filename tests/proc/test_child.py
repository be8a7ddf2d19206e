"""Children of holdfast.proc: they die with their parent, and nobody else is hurt."""

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from holdfast import files, proc
from holdfast.errors import MissingPackage, Mistake, TimedOut, Unavailable
from holdfast.jobs.logs import read_log
from holdfast.proc import HeldPort, spawn
from holdfast.proc import child as child_module
from kids import alive
from launch.node import numbers
from patience import HANG_S, until

PYTHON = sys.executable
SLEEP = [PYTHON, "-c", "import time; time.sleep(600)"]


def test_a_child_dies_when_its_parent_is_killed(tmp_path: Path) -> None:
    """SIGKILL of a parent, which runs no clean-up at all, ends the child as well."""
    pid_file = tmp_path / "pid"
    script = (
        "import time; from holdfast.proc import spawn\n"
        f"child = spawn({SLEEP!r})\n"
        f"open({str(pid_file)!r}, 'w').write(f'{{child.pid}}\\n')\n"
        "time.sleep(600)"
    )
    with spawn([PYTHON, "-c", script]) as parent:
        [pid] = numbers(pid_file, 1)
        assert alive(pid)
        os.kill(parent.pid, signal.SIGKILL)
        until(lambda: not alive(pid))


def test_a_child_dies_with_the_thread_that_started_it() -> None:
    """The bond is to the thread: documented, and easy to forget."""
    children = []
    leave = threading.Event()

    def work() -> None:
        children.append(spawn(SLEEP))
        leave.wait(HANG_S)

    thread = threading.Thread(target=work)
    thread.start()
    until(lambda: bool(children))
    with children[0] as child:
        assert child.alive()
        leave.set()
        thread.join()
        assert child.wait(HANG_S) == -signal.SIGKILL


def test_kill_group_ends_grandchildren_too(tmp_path: Path) -> None:
    """Whatever the child started is in its group and ends with it, also when the child
    itself has ended before."""
    pid_file = tmp_path / "pid"
    script = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen({SLEEP!r})\n"
        f"open({str(pid_file)!r}, 'w').write(f'{{child.pid}}\\n')\n"
        "child.returncode = 0  # leaves it behind, without a warning\n"
    )
    with spawn([PYTHON, "-c", script]) as child:
        pid = numbers(pid_file, 1)[0]
        assert child.wait(HANG_S) == 0
        assert not child.alive()
        assert alive(pid)
    until(lambda: not alive(pid))


def test_an_ended_child_keeps_its_pid_until_its_group_is_killed() -> None:
    """Asking and waiting do not collect the child: its pid cannot be given to another
    process that a later signal would hit."""
    child = spawn([PYTHON, "-c", ""])
    assert child.wait(HANG_S) == 0
    assert not child.alive()
    assert Path(f"/proc/{child.pid}").exists()
    child.signal(signal.SIGKILL)  # nobody is left in its group
    child.kill_group()
    assert not Path(f"/proc/{child.pid}").exists()
    child.kill_group()  # twice does no harm, and signals nobody
    assert child.stop() == 0


def test_waiting_is_bounded() -> None:
    """Neither a child that does not end nor a server that never gets ready holds its parent."""
    with spawn(SLEEP, name="sleeper") as child:
        with pytest.raises(TimedOut, match="sleeper still runs"):
            child.wait(0.05)
        with pytest.raises(TimedOut, match="sleeper was not ready"):
            child.wait_until(lambda: False, timeout_s=0.05)


def test_stop_asks_first_and_then_insists(tmp_path: Path) -> None:
    """SIGTERM gets its chance; a child that ignores it is killed after the grace."""
    polite = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(3)); "
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); "
    for script, code in ((polite, 3), (stubborn, -signal.SIGKILL)):
        ready = tmp_path / f"ready{code}"
        body = script + f"open({str(ready)!r}, 'w').close(); time.sleep(600)"
        with spawn([PYTHON, "-c", body]) as child:
            child.wait_until(ready.exists)
            assert child.stop(grace_s=20.0 if code == 3 else 0.1) == code


def test_wait_until_tells_what_the_child_said(tmp_path: Path) -> None:
    """A server that dies at start is reported at once, with the end of its log."""
    log = tmp_path / "folder" / "log"
    with (
        spawn([PYTHON, "-c", "print('no such disk'); raise SystemExit(4)"], log=log) as child,
        pytest.raises(Unavailable, match=r"code 4 .*no such disk"),
    ):
        child.wait_until(lambda: False)


def test_a_program_that_cannot_start_is_told_with_its_remedy(tmp_path: Path) -> None:
    """What to install, or which folder is missing: both are FileNotFoundError to Python."""
    with pytest.raises(MissingPackage, match=r"no-such-program.*install the package thing"):
        spawn(["no-such-program"], package="thing")
    with pytest.raises(Mistake, match="no such folder"):
        spawn(SLEEP, cwd=tmp_path / "nowhere")


def only(port: int) -> socket.socket:
    """A socket that gets this port or none, when it asks for any (IP_LOCAL_PORT_RANGE)."""
    one = socket.socket()
    try:
        one.setsockopt(socket.IPPROTO_IP, 51, struct.pack("I", port << 16 | port))
    except OSError:
        one.close()
        pytest.skip("this kernel cannot be asked for one port of any (Linux 6.3 can)")
    return one


@pytest.mark.parametrize("reuse", [0, 1])
def test_a_held_port_is_given_to_none_that_ask_for_any(reuse: int) -> None:
    """Neither to a server nor to an outgoing connection; when it is let go, to both."""
    with socket.create_server(("127.0.0.1", 0)) as elsewhere, HeldPort() as port:
        with only(port) as server, pytest.raises(OSError, match="in use"):
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
            server.bind(("127.0.0.1", 0))
        with only(port) as client, pytest.raises(OSError, match="assign requested address"):
            client.connect(elsewhere.getsockname())
    free = HeldPort()
    free.close()
    with only(free.port) as server:
        server.bind(("127.0.0.1", 0))
        assert server.getsockname()[1] == free.port


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1"])
def test_a_server_takes_the_port_that_is_held_for_it(host: str) -> None:
    """Again and again, also while connections of its last life linger; a second server cannot."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with HeldPort(host) as port:
        for _ in range(3):
            with socket.create_server((host, port), family=family) as server:
                client = socket.create_connection(server.getsockname()[:2])
                server.accept()[0].close()  # closed first: the kernel keeps this end for a minute
                assert client.recv(1) == b""
                client.close()
                with pytest.raises(OSError, match="in use"):
                    socket.create_server((host, port), family=family)


def test_a_log_takes_a_bounded_part_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older half goes while the child writes on; the end and all positions stay."""
    log = tmp_path / "child.log"
    code = "import sys\nfor n in range(60_000): print(f'{n:08}', flush=n % 1000 == 0)\n"
    code += "sys.stdin.read()\nprint('the end', flush=True)"
    with proc.spawn([sys.executable, "-c", code], log=log, stdin=subprocess.PIPE) as child:
        child.wait_until(lambda: log.stat().st_size >= 59_000 * 9, HANG_S)
        before = log.stat().st_size
        monkeypatch.setattr(child_module, "LOG_BYTES", 256 << 10)
        child.trim_log()
        assert log.stat().st_size >= before
        assert log.stat().st_blocks * 512 <= 256 << 10
        assert child.process.stdin is not None
        child.process.stdin.close()
        assert child.wait(HANG_S) == 0
        assert "the end" in child.tail()
    text = log.read_bytes()
    assert len(text) == 60_000 * 9 + 8
    assert text.lstrip(b"\0").endswith(b"00059998\n00059999\nthe end\n")
    epoch = tmp_path / "logs" / "a" / "j" / "epoch-1.log"
    epoch.parent.mkdir(parents=True)
    log.rename(epoch)
    _, piece, following = read_log(tmp_path, "a", "j", 0, 0, 1)
    assert "\0" not in piece, "a reader begins with what is there"
    assert following > 256 << 10
    assert read_log(tmp_path, "a", "j", 0, len(text), 1) == (1, "", len(text))


def test_where_there_are_no_holes_a_log_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound is kept in any case."""
    log = tmp_path / "logs" / "a" / "j" / "epoch-1.log"
    log.parent.mkdir(parents=True)
    log.write_bytes(b"x" * (1 << 20))
    monkeypatch.setattr(files, "_fallocate", lambda *_: -1)
    files.trim(log, 256 << 10)
    assert log.stat().st_size == 0
    log.write_bytes(b"anew")
    assert read_log(tmp_path, "a", "j", 0, 1 << 19, 1) == (1, "anew", 4)
