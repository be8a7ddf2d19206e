"""Whether a node is reached at its address, and whether the holder of a name lives."""

import asyncio
import os
import subprocess
import sys

import pytest

from holdfast.rendezvous.address import listen
from holdfast.rendezvous.probe import ProbeServer, is_alive, trouble
from holdfast.rendezvous.records import Node


def record(port: int, pid: int = 0, host: str = "elsewhere") -> Node:
    return Node(cycle=1, address="127.0.0.1", port=1, slots=1, host=host, pid=pid, probe_port=port)


async def test_a_node_is_told_from_another_program_at_its_address() -> None:
    """127.0.0.1 leads every machine to itself: whatever answers there is asked for its name."""
    async with ProbeServer("127.0.0.1", "r", "n0") as server:
        assert await trouble("127.0.0.1", server.port, "r", "n0") == ""
        for run, name in (("r", "n1"), ("s", "n0")):
            why = await trouble("127.0.0.1", server.port, run, name, refused_s=0.0)
            assert why.endswith("another program answers there")
    why = await trouble("127.0.0.1", server.port, "r", "n0", refused_s=0.0)
    assert "refused" in why


async def test_a_node_that_says_nothing_is_not_reached() -> None:
    """It is asked for a limited time."""
    with listen("127.0.0.1") as silent:
        why = await trouble("127.0.0.1", silent.getsockname()[1], "r", "n0", limit_s=0.2)
        assert why.endswith("no answer")


async def test_a_name_is_taken_by_a_node_that_answers_and_by_no_other() -> None:
    """Dead: its process is gone, or it was this agent. Not known: it does not answer."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    await asyncio.to_thread(gone.wait)
    async with ProbeServer("127.0.0.1", "r", "n0") as server:
        mine = record(1, os.getpid(), "here")
        for other, lives in (
            (record(server.port), True),
            (record(server.port, os.getpid(), "here"), True),
            (record(server.port, gone.pid, "here"), False),
            (mine, False),
            (record(0), None),
        ):
            assert await is_alive("r", "n0", other, mine) is lives
    assert await is_alive("r", "n0", record(server.port), mine) is None


@pytest.mark.parametrize("count", [50])
async def test_callers_that_say_nothing_hold_nothing(count: int) -> None:
    """A connection is answered and closed at once, whatever the caller does."""
    async with ProbeServer("127.0.0.1", "r", "n0") as server:
        pairs = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(count)]
        for reader, writer in pairs:
            assert len(await reader.read()) == 32  # until the other side has closed it
            writer.close()
