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
from kids import alive, stat
from patience import auntil

TREE = Path(__file__).with_name("tree_child.py")


async def lives(file: Path, count: int) -> list[tuple[list[Path], list[int]]]:
    """What each server that was started leaves, and its pids, when there were so many."""
    await auntil(lambda: file.exists() and file.read_text().count("\n") >= count)
    lines = [line.split() for line in file.read_text().splitlines()]
    return [([Path(one) for one in line[:2]], [int(pid) for pid in line[2:]]) for line in lines]


async def gone(pids: list[int]) -> None:
    await auntil(lambda: not any(map(alive, pids)))


def server(file: Path) -> ServerProcess:
    return ServerProcess([sys.executable, str(TREE), str(file)], log=file.with_suffix(".log"))


@pytest.mark.parametrize("victim", ["server", "keeper", "told", "us"])
async def test_what_is_left_of_a_server_is_ended(tmp_path: Path, victim: str) -> None:
    """The server is killed, or what starts it, or we want a new one, or we die: all its processes
    end, also those that ignore the death of their parent, and a whole new server is started.
    Shared memory and sockets, which a killed server cannot remove, go with it; of a killed keeper
    the sockets do."""
    ends: list[int] = []
    process = server(tmp_path / "pids")
    async with process.running(lambda: ends.append(1)):
        [(left, first)] = await lives(tmp_path / "pids", 1)
        assert all(stat(pid) for pid in first)
        assert all(one.exists() for one in left)
        keeper = int(stat(first[0])[1])
        if victim == "told":
            process.end()
        elif victim == "us":
            os.kill(keeper, signal.SIGHUP)  # as the kernel does when we die
        else:
            os.kill(first[0] if victim == "server" else keeper, signal.SIGKILL)
        await gone([*first, keeper])
        memory, place = left
        await auntil(lambda: not place.exists())
        if victim == "keeper":
            memory.unlink()
        await auntil(lambda: not memory.exists())
        _, (_, second) = await lives(tmp_path / "pids", 2)
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
        [(_, tree)] = await lives(tmp_path / "pids", 1)
        keeper = int(stat(tree[0])[1])
        os.kill(agent.pid, signal.SIGKILL)
        await gone([*tree, keeper])


async def test_a_server_that_ends_by_itself_is_told_of(tmp_path: Path) -> None:
    """Its exit code stands in the log, and SIGTERM of the group is for the server itself."""
    ends: list[int] = []
    code = "import os, signal; os.kill(0, signal.SIGTERM)"
    process = ServerProcess([sys.executable, "-c", code], log=tmp_path / "log")
    async with process.running(lambda: ends.append(1)):
        await auntil(lambda: ends == [1])
    assert "ended with code -15" in (tmp_path / "log").read_text()


async def test_what_cannot_be_started_is_told(tmp_path: Path) -> None:
    """A program that is not there is told at once; a log that cannot be written ends it all."""
    with pytest.raises(MissingPackage, match="vllm"):
        ServerProcess(["no-such-program"])
    process = ServerProcess([sys.executable], log=tmp_path)
    with pytest.raises(Mistake, match="Is a directory"):
        async with process.running():
            await asyncio.Event().wait()
