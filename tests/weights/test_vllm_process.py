"""A server of several processes that is killed from any side: nothing of it is left."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from holdfast import proc
from holdfast.contrib.vllm.process import ServerProcess
from holdfast.errors import MissingPackage, Mistake
from weights.family import until

TREE = Path(__file__).with_name("tree_child.py")


def stat(pid: int) -> list[str]:
    """State, parent, ... of a process; nothing when it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [] if fields[0] in "ZX" else fields


async def trees(file: Path, count: int) -> list[list[int]]:
    """The pids of each server that was started, when there were so many."""
    await until(lambda: file.exists() and file.read_text().count("\n") >= count)
    return [[int(pid) for pid in line.split()] for line in file.read_text().splitlines()]


async def gone(pids: list[int]) -> None:
    await until(lambda: not any(stat(pid) for pid in pids))


def server(file: Path) -> ServerProcess:
    return ServerProcess([sys.executable, str(TREE), str(file)], log=file.with_suffix(".log"))


@pytest.mark.parametrize("victim", ["server", "keeper", "told"])
async def test_what_is_left_of_a_server_is_ended(tmp_path: Path, victim: str) -> None:
    """The server is killed, or what starts it, or we want a new one: all its processes end,
    also those that ignore the death of their parent, and a whole new server is started."""
    ends: list[int] = []
    process = server(tmp_path / "pids")
    async with process.running(lambda: ends.append(1)):
        [first] = await trees(tmp_path / "pids", 1)
        assert all(stat(pid) for pid in first)
        keeper = int(stat(first[0])[1])
        if victim == "told":
            process.end()
        else:
            os.kill(first[0] if victim == "server" else keeper, signal.SIGKILL)
        await gone([*first, keeper])
        _, second = await trees(tmp_path / "pids", 2)
        assert ends == [1]
        assert not {*first} & {*second}
        assert all(stat(pid) for pid in second)
    await gone(second)


async def test_a_server_ends_with_whoever_runs_it(tmp_path: Path) -> None:
    """SIGKILL of the process that started the server ends all of the server."""
    code = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from weights.test_vllm_process import server\n"
        "async def main():\n"
        "    async with server(Path(sys.argv[1])).running():\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())"
    )
    argv = [sys.executable, "-c", code, str(tmp_path / "pids")]
    env = {"PYTHONPATH": os.pathsep.join(sys.path)}
    with proc.spawn(argv, env=env, log=tmp_path / "log") as agent:
        [tree] = await trees(tmp_path / "pids", 1)
        keeper = int(stat(tree[0])[1])
        os.kill(agent.pid, signal.SIGKILL)
        await gone([*tree, keeper])


_HOLDER = """
import os, socket, sys, time
from multiprocessing.shared_memory import SharedMemory

memory = SharedMemory(create=True, size=4096)
place = os.environ["VLLM_RPC_BASE_PATH"]
socket.socket(socket.AF_UNIX).bind(f"{place}/line")
first = os.getpid()
if os.fork() == 0:
    with open(sys.argv[1], "a") as file:
        file.write(f"{first} /dev/shm/{memory.name} {place}\\n")
time.sleep(600)
"""


@pytest.mark.parametrize("victim", ["server", "told", "us", "keeper"])
async def test_nothing_is_left_in_memory(tmp_path: Path, victim: str) -> None:
    """Shared memory and sockets, which a killed server cannot remove, go with it; sockets also
    when the keeper is killed."""
    file = tmp_path / "left"
    argv = [sys.executable, "-c", _HOLDER, str(file)]
    process = ServerProcess(argv, log=tmp_path / "log")
    async with process.running():
        await until(lambda: file.exists() and file.read_text().endswith("\n"))
        pid, *left = file.read_text().split()
        assert all(Path(one).exists() for one in left)
        if victim == "told":
            process.end()
        elif victim == "server":
            os.kill(int(pid), signal.SIGKILL)
        elif victim == "us":
            os.kill(int(stat(int(pid))[1]), signal.SIGHUP)  # as the kernel does when we die
        else:
            os.kill(int(stat(int(pid))[1]), signal.SIGKILL)
            memory = Path(left.pop(0))
        await until(lambda: not any(Path(one).exists() for one in left))
        await gone([int(pid)])
    if victim == "keeper":
        memory.unlink()


async def test_a_server_that_ends_by_itself_is_told_of(tmp_path: Path) -> None:
    """Its exit code stands in the log, and SIGTERM of the group is for the server itself."""
    ends: list[int] = []
    code = "import os, signal; os.kill(0, signal.SIGTERM)"
    process = ServerProcess([sys.executable, "-c", code], log=tmp_path / "log")
    async with process.running(lambda: ends.append(1)):
        await until(lambda: ends == [1])
    assert "ended with code -15" in (tmp_path / "log").read_text()


async def test_what_cannot_be_started_is_told(tmp_path: Path) -> None:
    """A program that is not there is told at once; a log that cannot be written ends it all."""
    with pytest.raises(MissingPackage, match="vllm"):
        ServerProcess(["no-such-program"])
    process = ServerProcess([sys.executable], log=tmp_path)
    with pytest.raises(Mistake, match="Is a directory"):
        async with process.running():
            await asyncio.Event().wait()
