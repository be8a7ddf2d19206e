"""Real `torchrun`: torch's agent, plain torch scripts on gloo, processes killed.

Nodes are processes on addresses of their own. A script without torch stands in for training where
only exit codes matter.
"""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast import proc
from rendezvous.torchrun.cluster import Cluster

START_S = 60.0
"""Three interpreters that import torch, on two busy cores."""


def cluster(tmp_path: Path, nnodes: str) -> Cluster:
    return Cluster(tmp_path, f"sqlite:///{tmp_path}/ledger.db", nnodes=nnodes)


def script(folder: Path, body: str) -> list[str]:
    """A program without torch, for torchrun to start."""
    path = folder / "work.py"
    path.write_text(
        "import os, pathlib, sys, time\nfrom holdfast.proc import die_with_parent\n"
        f"die_with_parent(os.getppid())\n{body}\n"
    )
    return [str(path)]


def whole(cluster: Cluster, steps: int) -> None:
    """The training has done every step, and no rank was held twice in a cycle."""
    assert cluster.checkpoint() == {"step": steps, "sum": steps * (steps + 1) // 2}
    holders: dict[tuple[str, int], set[int]] = {}
    for line in cluster.lines():
        holders.setdefault((line["cycle"], line["rank"]), set()).add(line["pid"])
    assert all(len(pids) == 1 for pids in holders.values())


def until_step(cluster: Cluster, step: int, **wanted: Any) -> dict[str, Any]:
    found = cluster.until(f"step {step}", lambda: cluster.seen(step=step, **wanted), START_S)
    line: dict[str, Any] = found[0]
    return line


def until_next(cluster: Cluster, moment: float, cycle: int) -> float:
    """Wait for the first all-reduce of a later cycle; how long after a moment it was."""
    found = cluster.until(
        f"all-reduce after cycle {cycle}",
        lambda: [line for line in cluster.after(moment) if int(line["cycle"]) > cycle],
        START_S,
    )
    return float(found[0]["at"]) - moment


def spare_of(nodes: list[proc.Child], cluster: Cluster) -> proc.Child:
    """The node none of whose workers has worked."""
    workers_of = {line["agent"] for line in cluster.lines()}
    (spare,) = [node for node in nodes if node.pid not in workers_of]
    return spare


@pytest.mark.long
def test_a_killed_worker_costs_one_cycle(tmp_path: Path) -> None:
    """Two nodes with two workers each; kill -9 of one worker: all go on from the checkpoint.

    torchrun's own back end never comes back from this: workers find the dead one's address in a
    store that outlives the cycle. Here every cycle has a store and a port of its own.
    """
    with cluster(tmp_path, "2") as nodes:
        both = [nodes.train(25, 0.1) for _ in range(2)]
        victim = until_step(nodes, 3, rank=2)
        moment = nodes.kill(victim["pid"])
        took_s = until_next(nodes, moment, 1)
        assert nodes.codes(*both, timeout_s=START_S) == [0, 0]
        assert nodes.cycle().state == "succeeded"
        assert len({line["port"] for line in nodes.lines()}) == nodes.cycle().number == 2
        whole(nodes, 25)
        print(f"kill of a worker to the next all-reduce: {took_s:.2f} s")


@pytest.mark.long
def test_a_killed_rank_0_agent_is_replaced_by_a_spare(tmp_path: Path) -> None:
    """Two active nodes and a spare; kill -9 of the agent that hosts the store: one cycle."""
    with cluster(tmp_path, "2") as nodes:
        conf = "last_call_timeout=0.2,lease=3"
        three = [nodes.train(25, 0.1, workers=1, conf=conf) for _ in range(3)]
        victim = until_step(nodes, 3, rank=0)
        spare = spare_of(three, nodes)
        moment = nodes.kill(victim["agent"])
        took_s = until_next(nodes, moment, 1)
        alive = [node for node in three if node.pid != victim["agent"]]
        assert nodes.codes(*alive, timeout_s=START_S) == [0, 0]
        assert nodes.seen(agent=spare.pid, cycle="2")
        assert nodes.cycle().number == 2
        whole(nodes, 25)
        print(f"kill of rank 0's agent to the next all-reduce: {took_s:.2f} s")


@pytest.mark.long
def test_a_second_node_is_taken_in(tmp_path: Path) -> None:
    """With 1:2 a node trains alone until another one comes; then they train together."""
    with cluster(tmp_path, "1:2") as nodes:
        first = nodes.train(20, 0.1, world=2, workers=1)
        assert until_step(nodes, 1)["world"] == 1
        second = nodes.train(20, 0.1, world=2, workers=1)
        nodes.until("second node", lambda: nodes.seen(world=2, rank=1), START_S)
        assert nodes.codes(first, second, timeout_s=START_S) == [0, 0]
        cause = nodes.cycle().cause
        assert cause is not None
        assert cause.kind == "grew"
        whole(nodes, 20)


@pytest.mark.long
def test_exit_codes_of_a_run_that_succeeds(tmp_path: Path) -> None:
    """Active nodes, a spare and a late comer all exit with 0, at once and without a trace.

    On the way: `holdfast.cycle`, for workers that want to be safe after a pause, works here too.
    """
    with cluster(tmp_path, "2") as nodes:
        program = script(
            tmp_path,
            "from holdfast import cycle\n"
            "cycle.commit({'rank' + os.environ['RANK']: cycle.number()})\n"
            "while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.05)",
        )
        three = [nodes.start(*program, str(tmp_path / "go"), workers=1) for _ in range(3)]
        nodes.until("run with a spare", lambda: nodes.gathered(3), START_S)
        (tmp_path / "go").touch()
        began = time.monotonic()
        assert nodes.codes(*three) == [0, 0, 0]
        took_s = time.monotonic() - began
        late = nodes.start(*program, str(tmp_path / "go"), workers=1)
        assert nodes.codes(late, timeout_s=START_S) == [0]
        assert nodes.cycle().state == "succeeded"
        assert nodes.committed() == {"rank0": 1, "rank1": 1}
        assert "Traceback" not in nodes.story()
        assert late.log is not None
        assert "NOTHING WAS STARTED: the run 'r' succeeded" in late.log.read_text()
        spares = [node for node in three if node.log and "without" in node.log.read_text()]
        assert len(spares) == 1
        print(f"everybody had left {took_s:.2f} s after the workers were told to end")


@pytest.mark.long
def test_exit_codes_of_a_run_that_fails(tmp_path: Path) -> None:
    """When an agent has used up its restarts and no spare is left, no node exits with 0."""
    with cluster(tmp_path, "2") as nodes:
        program = script(
            tmp_path, "sys.exit(3) if os.environ['GROUP_RANK'] == '1' else time.sleep(600)"
        )
        flags = ["--max-restarts", "1"]
        three = [nodes.start(*program, workers=1, flags=flags) for _ in range(3)]
        assert 0 not in nodes.codes(*three, timeout_s=START_S)
        cycle = nodes.cycle()
        assert cycle.state == "failed"
        assert "ended with 3" in str(cycle.cause)
        nodes_that_failed = [cause.node for cause in cycle.history]
        assert len(nodes_that_failed) == 3  # one node twice, then the spare that took its rank
        assert nodes_that_failed[0] == nodes_that_failed[1] != nodes_that_failed[2]
        late = nodes.start(*program, workers=1, flags=flags)
        assert nodes.codes(late, timeout_s=START_S) != [0]
        assert "NOTHING WAS STARTED: the run 'r' failed" in nodes.story()[-1500:]


@pytest.mark.long
def test_a_killed_agent_of_another_rank_is_replaced_by_a_spare(tmp_path: Path) -> None:
    """As with rank 0, and the store stays where it is until the cycle is over."""
    with cluster(tmp_path, "2") as nodes:
        conf = "last_call_timeout=0.2,lease=3"
        three = [nodes.train(25, 0.1, workers=1, conf=conf) for _ in range(3)]
        victim = until_step(nodes, 3, rank=1)
        moment = nodes.kill(victim["agent"])
        took_s = until_next(nodes, moment, 1)
        alive = [node for node in three if node.pid != victim["agent"]]
        assert nodes.codes(*alive, timeout_s=START_S) == [0, 0]
        whole(nodes, 25)
        print(f"kill of an agent to the next all-reduce: {took_s:.2f} s")


@pytest.mark.long
def test_an_agent_that_is_told_to_end_is_replaced_without_waiting_for_its_lease(
    tmp_path: Path,
) -> None:
    """SIGTERM: torch shuts no handler down then, but this one says goodbye all the same."""
    with cluster(tmp_path, "2") as nodes:
        conf = "last_call_timeout=0.2,lease=60"
        three = [nodes.train(25, 0.1, workers=1, conf=conf) for _ in range(3)]
        victim = until_step(nodes, 3, rank=1)
        moment = time.time()
        os.kill(victim["agent"], signal.SIGTERM)
        until_next(nodes, moment, 1)
        alive = [node for node in three if node.pid != victim["agent"]]
        left = [node for node in three if node.pid == victim["agent"]]
        assert nodes.codes(*alive, timeout_s=START_S) == [0, 0]
        assert nodes.codes(*left) != [0]
        assert nodes.cycle().history[0].kind == "withdrew"
        whole(nodes, 25)


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_an_agent_that_was_paused_beyond_its_lease_comes_back_as_a_spare(
    tmp_path: Path, rank: int
) -> None:
    """It finds its place taken, stops its workers, parks, and exits with 0 with the others."""
    with cluster(tmp_path, "2") as nodes:
        conf = "last_call_timeout=0.2,lease=2"
        three = [nodes.train(200, 0.1, workers=1, conf=conf) for _ in range(3)]
        victim = until_step(nodes, 3, rank=rank)
        moment = time.time()
        os.kill(victim["agent"], signal.SIGSTOP)
        until_next(nodes, moment, 1)
        os.kill(victim["agent"], signal.SIGCONT)
        nodes.until("return", lambda: nodes.gathered(3), START_S)
        assert nodes.codes(*three, timeout_s=START_S) == [0, 0, 0]
        assert nodes.cycle().number == 2
        whole(nodes, 200)


@pytest.mark.long
def test_a_storm(tmp_path: Path) -> None:
    """Workers and agents are killed in turn; dead agents are started again; the sum is right."""
    seed = random.randrange(10_000)
    print(f"seed {seed}")
    luck = random.Random(seed)
    with cluster(tmp_path, "2") as nodes:
        conf, flags = "last_call_timeout=0.2,lease=3", ["--max-restarts", "50"]
        living = [nodes.train(120, 0.1, workers=1, conf=conf, flags=flags) for _ in range(3)]
        until_step(nodes, 3)
        for _ in range(8):
            line = nodes.lines()[-1]
            what = luck.choice(["pid", "agent"])
            moment = nodes.kill(line[what])
            if what == "agent":
                living = [node for node in living if node.pid != line["agent"]]
                living.append(nodes.train(120, 0.1, workers=1, conf=conf, flags=flags))
            until_next(nodes, moment, int(line["cycle"]))
            time.sleep(luck.uniform(0.0, 1.0))
        assert set(nodes.codes(*living, timeout_s=120.0)) == {0}
        whole(nodes, 120)
