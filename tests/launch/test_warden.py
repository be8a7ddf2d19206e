"""The warden: whatever happens to the agent, its workers do not go on without it."""

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import Mistake, Unavailable
from holdfast.launch import warden_process
from holdfast.launch.warden import Warden, boottime_s
from holdfast.proc import spawn
from kids import alive, state
from launch import node
from launch.node import failed, make_spec, numbers, script, started
from patience import HANG_S, auntil, until

# Rank 1 ends at once and leaves a child behind; rank 0 goes on.
FAMILY = f"""{node.GRANDCHILD}
if os.environ["RANK"] == "0":
    while True: pass
"""


class Agent:
    """A real agent process with two workers (see node.py)."""

    def __init__(self, folder: Path, lease_s: float) -> None:
        argv = [node.__file__, str(folder), str(script(folder, FAMILY)), "2", str(lease_s)]
        self.process = spawn(
            [sys.executable, *argv],
            stdout=subprocess.PIPE,
            env={"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self.pid = self.process.pid
        facts = self.read()
        self.warden, self.workers, self.warm = facts["warden"], facts["workers"], facts["warm"]
        self.grandchildren = numbers(folder / "pids", 2)
        until(lambda: state(self.workers[1]) == "Z", "rank 1 ends")
        self.renewed = folder / "renewed"

    @property
    def everybody(self) -> list[int]:
        return [self.warden, *self.workers, *self.warm, *self.grandchildren]

    def read(self) -> dict[str, Any]:
        """What it says next."""
        assert self.process.process.stdout is not None
        said: dict[str, Any] = json.loads(self.process.process.stdout.readline())
        return said


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path, lease_s=1.5)
    with agent.process:
        yield agent
    until(lambda: not any(map(alive, agent.everybody)), "everybody is gone")


def test_kill_9_of_the_agent_leaves_nothing(agent: Agent) -> None:
    """Workers, what they started, what an ended worker left, warm interpreters, the warden."""
    assert [alive(pid) for pid in agent.everybody] == [True, True, False, True, True, True]
    os.kill(agent.pid, signal.SIGKILL)
    until(lambda: not any(map(alive, agent.everybody)), "everybody is gone", HANG_S)


def test_a_stopped_agent_loses_its_workers_in_time(agent: Agent) -> None:
    """SIGSTOP of the agent alone: at the deadline its workers are gone, and it hears of it."""
    os.kill(agent.pid, signal.SIGSTOP)
    until(lambda: state(agent.pid) == "T")
    stopped = time.monotonic()
    assert alive(agent.workers[0])
    gone = [*agent.workers, *agent.grandchildren]
    until(lambda: not any(map(alive, gone)), "the workers are gone", HANG_S)
    took_s = time.monotonic() - stopped
    print(f"killed {took_s:.2f} s after the stop, with a deadline of 1.5 s")
    assert state(agent.pid) == "T", "the agent was not needed for it"
    assert alive(agent.warden)
    os.kill(agent.pid, signal.SIGCONT)
    assert agent.read() == {"codes": [-9], "fired": 1}


def test_a_late_renewal_saves_nobody(agent: Agent) -> None:
    """The whole node stops for longer than the deadline. The agent wakes first, and renews."""
    for pid in (agent.pid, agent.warden, agent.workers[0]):
        os.kill(pid, signal.SIGSTOP)
    until(lambda: state(agent.pid) == state(agent.warden) == state(agent.workers[0]) == "T")
    time.sleep(1.7)  # the pause itself: longer than the deadline
    before = agent.renewed.read_text()
    os.kill(agent.pid, signal.SIGCONT)
    until(lambda: agent.renewed.read_text() not in ("", before), "a renewal")
    assert state(agent.workers[0]) == "T"
    os.kill(agent.warden, signal.SIGCONT)
    until(lambda: not alive(agent.workers[0]), "the worker is killed")
    assert agent.read() == {"codes": [-9], "fired": 1}


def test_the_agent_hears_of_the_wardens_death(agent: Agent) -> None:
    """Workers without a warden are not safe: the agent is told at once, and can stop them."""
    os.kill(agent.warden, signal.SIGKILL)
    assert agent.read() == {"failed": "the warden ended with -9"}
    assert agent.process.wait(HANG_S) == 0


async def test_renewed_workers_live(tmp_path: Path) -> None:
    """Also past the first deadline; released ones are not touched at all."""
    warden = Warden()
    warden.renew(boottime_s() + 20)
    spec = make_spec("sleep", "600", kind="program")
    async with started(spec, tmp_path, guard=warden.guard) as workers:
        for _ in range(25):  # 2.5 s, and no pause of a busy machine takes 2 s of them
            warden.renew(boottime_s() + 2.0)
            await asyncio.sleep(0.1)
        assert workers.workers[0].running()
        warden.release()
        warden.renew(boottime_s() + 0.1)
        await asyncio.sleep(0.5)
        assert workers.workers[0].running()
        assert warden.fired == 0
        warden.guard(workers.pids)  # the deadline has passed: whoever is guarded now dies
        assert (await failed(workers)).code == -9
        await auntil(lambda: warden.fired == 1)
        warden.release()
    await warden.close()
    assert not alive(warden.pid)
    assert warden.failed.done()
    with pytest.raises(Unavailable, match="the warden"):
        warden.renew(boottime_s())


async def test_closing_kills_who_is_still_guarded(tmp_path: Path) -> None:
    """An agent that ends in disorder leaves nobody behind."""
    warden = Warden()
    spec = make_spec("sleep", "600", kind="program")
    async with started(spec, tmp_path, guard=warden.guard) as workers:
        await warden.close()
        assert (await failed(workers)).code == -9


async def test_a_warden_that_does_not_answer_is_given_up() -> None:
    """A stopped warden guards nobody: the agent finds out while renewing."""
    warden = Warden(silence_s=0.3)
    warden.renew(boottime_s() + 60)
    await auntil(lambda: not warden._unanswered, "an answer")
    os.kill(warden.pid, signal.SIGSTOP)

    def given_up() -> bool:
        if not warden.failed.done():
            warden.renew(boottime_s() + 60)
        return warden.failed.done()

    with pytest.raises(Unavailable, match="has not answered for"):
        await auntil(given_up)
    assert "has not answered for" in warden.failed.result()
    await warden.close()


@pytest.mark.long
async def test_many_workers_are_guarded(tmp_path: Path) -> None:
    """More than fit one message."""
    warden = Warden()
    warden.renew(boottime_s() + 60)
    spec = make_spec("sleep", "600", kind="program", slots=70)
    async with started(spec, tmp_path, guard=warden.guard) as workers:
        warden.renew(boottime_s())
        await auntil(lambda: not any(worker.running() for worker in workers.workers))
        warden.release()
    await warden.close()


async def test_only_children_can_be_guarded() -> None:
    """A pid that was collected may be anybody's."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    warden = Warden()
    with pytest.raises(Mistake, match="not collected"):
        warden.guard([ended.pid])
    await warden.close()


@pytest.mark.parametrize("ours", [True, False])
def test_an_old_kernel_hits_no_stranger(monkeypatch: pytest.MonkeyPatch, ours: bool) -> None:
    """Before 6.9 the group's number is used, if the process that has it is still the same one."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EINVAL, "invalid")

    with spawn(["sleep", "600"]) as child:
        start = warden_process.start_time(child.pid)
        assert start
        group = warden_process._Group(child.pid, start if ours else "1", os.pidfd_open(child.pid))
        monkeypatch.setattr(signal, "pidfd_send_signal", refuse)
        group.kill()
        if ours:
            assert child.wait(HANG_S) == -9
        else:
            time.sleep(0.1)
            assert child.alive()
