"""Real `torchrun`: torch's agent, plain torch scripts on gloo, processes killed.

Nodes are processes on addresses of their own. A script without torch stands in for training where
only exit codes matter.
"""

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launch.cluster import Commits
from rendezvous.torchrun.cluster import Cluster

pytestmark = pytest.mark.long

START_S = 60.0
"""Three interpreters that import torch, on two busy cores."""


@pytest.fixture
def nodes(tmp_path: Path, url: str) -> Iterator[Cluster]:
    """A run of two nodes."""
    with Cluster(tmp_path, url, nnodes="2") as cluster:
        yield cluster


@pytest.fixture
def commits(url: str) -> Iterator[Commits]:
    """What workers commit: every step once, and no rank is held twice in a cycle."""
    found = Commits(url)
    yield found
    found.close()


def script(folder: Path, body: str) -> str:
    """A program without torch, for torchrun to start."""
    path = folder / "work.py"
    path.write_text(
        "import os, pathlib, sys, time\nfrom holdfast.proc import die_with_parent\n"
        f"die_with_parent(os.getppid())\n{body}\n"
    )
    return str(path)


def working(nodes: Cluster, rank: int) -> dict[str, Any]:
    """A worker that has done a few steps, as it says of itself."""
    nodes.until_step(3)
    record: dict[str, Any] = nodes.committed(f"rank_{rank}")
    return record


def until_cycle(nodes: Cluster, number: int, rank: int = 0) -> dict[str, Any]:
    """Wait for the first step of a rank in a cycle, or in a later one; what it says of itself."""

    def found() -> Any:
        record = nodes.committed(f"rank_{rank}")
        return record if record["cycle"] >= number else None

    record: dict[str, Any] = nodes.until(f"cycle {number}", found, START_S)
    return record


def test_a_killed_worker_costs_one_cycle(nodes: Cluster, commits: Commits) -> None:
    """Two nodes with two workers each; kill -9 of one worker: all go on from the checkpoint.

    torchrun's own back end never comes back from this: workers find the dead one's address in a
    store that outlives the cycle. Here every cycle has a store and a port of its own.
    """
    for _ in range(2):
        nodes.train(25, workers=2)
    os.kill(working(nodes, 2)["pid"], signal.SIGKILL)
    assert nodes.codes("n0", "n1", timeout_s=2 * START_S) == [0, 0]
    assert (nodes.cycle().state, nodes.cycle().number) == ("succeeded", 2)
    nodes.trained(25)
    assert len(commits.ports) == 2


@pytest.mark.parametrize(
    ("rank", "number", "lease_s"),
    [
        pytest.param(0, signal.SIGKILL, 3, id="the host of the store is killed"),
        pytest.param(1, signal.SIGKILL, 3, id="another is killed"),
        pytest.param(1, signal.SIGTERM, 60, id="one is told to end: nobody waits for its lease"),
    ],
)
@pytest.mark.usefixtures("commits")
def test_an_agent_that_ends_is_replaced_by_a_spare(
    nodes: Cluster, rank: int, number: int, lease_s: float
) -> None:
    """Two active nodes and a spare: it costs one cycle, and the others exit with 0.

    At SIGTERM torch shuts no handler down, but this one says goodbye all the same.
    """
    for _ in range(3):
        nodes.train(25, lease_s=lease_s)
    victim = working(nodes, rank)["agent"]
    active = {working(nodes, one)["agent"] for one in (0, 1)}
    os.kill(victim, number)
    names = {agent.pid: name for name, agent in nodes.agents.items()}
    left = names.pop(victim)
    assert nodes.codes(*names.values(), timeout_s=2 * START_S) == [0, 0]
    assert nodes.codes(left) != [0]
    assert nodes.committed(f"rank_{rank}")["agent"] not in active
    assert nodes.cycle().number == 2
    # A killed agent's workers die with it: their peers may notice before its lease has ended.
    kinds = {"withdrew"} if number == signal.SIGTERM else {"lost", "failed"}
    assert nodes.cycle().history[0].kind in kinds
    nodes.trained(25)


def test_exit_codes_of_a_run_that_succeeds(nodes: Cluster, tmp_path: Path) -> None:
    """Active nodes, a spare and a late comer all exit with 0, at once and without a trace.

    On the way: `holdfast.cycle`, for workers that want to be safe after a pause, works here too.
    """
    program = script(
        tmp_path,
        "from holdfast import cycle\n"
        "cycle.commit({'rank' + os.environ['RANK']: cycle.number()})\n"
        "while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.05)",
    )
    go = tmp_path / "go"
    for _ in range(3):
        nodes.start(program, str(go))
    nodes.until("run with a spare", lambda: nodes.gathered(3), START_S)
    go.touch()
    assert nodes.codes("n0", "n1", "n2", timeout_s=30) == [0, 0, 0]
    nodes.start(program, str(go))
    assert nodes.codes("n3", timeout_s=START_S) == [0]
    assert nodes.cycle().state == "succeeded"
    assert [nodes.committed(f"rank{rank}") for rank in (0, 1)] == [1, 1]
    assert "Traceback" not in nodes.story()
    assert "NOTHING WAS STARTED: the run 'r' succeeded" in nodes.said("n3")
    assert sum("without" in nodes.said(name) for name in ("n0", "n1", "n2")) == 1, "the spare"


def test_exit_codes_of_a_run_that_fails(nodes: Cluster, tmp_path: Path) -> None:
    """When an agent has used up its restarts and no spare is left, no node exits with 0."""
    program = script(
        tmp_path, "sys.exit(3) if os.environ['GROUP_RANK'] == '1' else time.sleep(600)"
    )
    nodes.flags = ["--max-restarts", "1"]
    for _ in range(3):
        nodes.start(program)
    assert 0 not in nodes.codes("n0", "n1", "n2", timeout_s=START_S)
    cycle = nodes.cycle()
    assert cycle.state == "failed"
    assert "ended with 3" in str(cycle.cause)
    failed = [cause.node for cause in cycle.history]
    assert len(failed) == 3  # one node twice, then the spare that took its rank
    assert failed[0] == failed[1] != failed[2]
    nodes.start(program)
    assert nodes.codes("n3", timeout_s=START_S) != [0]
    assert "NOTHING WAS STARTED: the run 'r' failed" in nodes.said("n3")[-1500:]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.usefixtures("commits")
def test_an_agent_that_was_paused_beyond_its_lease_comes_back_as_a_spare(
    nodes: Cluster, rank: int
) -> None:
    """It finds its place taken, stops its workers, parks, and exits with 0 with the others."""
    for _ in range(3):
        nodes.train(200, lease_s=2)
    victim = working(nodes, rank)["agent"]
    os.kill(victim, signal.SIGSTOP)
    until_cycle(nodes, 2)
    os.kill(victim, signal.SIGCONT)
    nodes.until("return", lambda: nodes.gathered(3), START_S)
    assert nodes.codes("n0", "n1", "n2", timeout_s=START_S) == [0, 0, 0]
    assert nodes.cycle().number == 2
    nodes.trained(200)


@pytest.mark.usefixtures("commits")
def test_a_storm(nodes: Cluster) -> None:
    """Workers and agents are killed in turn; dead agents are started again; the sum is right."""
    seed = random.randrange(10_000)
    print(f"seed {seed}")
    luck = random.Random(seed)
    nodes.flags = ["--max-restarts", "50"]
    for _ in range(3):
        nodes.train(120, lease_s=3)
    nodes.until_step(3)
    cycle = 1
    for _ in range(8):
        record = until_cycle(nodes, cycle, luck.randrange(2))
        what = luck.choice(["pid", "agent"])
        os.kill(record[what], signal.SIGKILL)
        if what == "agent":
            nodes.train(120, lease_s=3)
        cycle = record["cycle"] + 1
        until_cycle(nodes, cycle)
        time.sleep(luck.uniform(0.0, 1.0))
    living = [agent for agent in nodes.all if agent.alive()]
    nodes.until("end", lambda: not any(agent.alive() for agent in living), 120.0)
    assert {agent.wait(1.0) for agent in living} == {0}
    nodes.trained(120)
