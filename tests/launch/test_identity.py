"""Who a node is, as a table: what schedulers set, and what we make of it."""

import pytest

from holdfast.errors import Mistake
from holdfast.launch.identity import Identity, identify

# What Slurm 22.05 sets for a task of `srun -N2 -n2`, as far as it matters here.
TASK = {
    "SLURM_JOB_ID": "123",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
    "SLURMD_NODENAME": "gpu7",
    "SLURM_TOPOLOGY_ADDR": "gpu7",
    "SLURM_TOPOLOGY_ADDR_PATTERN": "node",
}
ONE_TASK = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}
BATCH = {name: value for name, value in TASK.items() if not name.startswith("SLURM_STEP")}
ARRAY = {"SLURM_ARRAY_JOB_ID": "120", "SLURM_ARRAY_TASK_ID": "7"}
SWITCHES = {
    "SLURM_TOPOLOGY_ADDR": "top.leaf4.gpu7",
    "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node",
}
BLOCKS = {  # as of Slurm 23.11; and a node whose name has dots
    "SLURMD_NODENAME": "gpu7.rack.example",
    "SLURM_TOPOLOGY_ADDR": "b2.gpu7.rack.example",
    "SLURM_TOPOLOGY_ADDR_PATTERN": "block.node",
}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
JOB = {**POD, "JOB_COMPLETION_INDEX": "3", "JOB_NAME": "train", "JOB_UID": "5d1f-9"}
OF_A_SET = {"POD_NAME": "set-nodes-0-3-x7k2p", "JOB_NAME": "set-nodes-0"}
"""A pod of a JobSet, whose Jobs' names end in numbers too."""


def of(env: dict[str, str], **given: str | int) -> Identity:
    return identify(env, hostname="host", token="abc123", **given)  # type: ignore[arg-type]


SLURM = "slurm-123.0"


@pytest.mark.parametrize(
    ("env", "name", "infra_rank", "domain", "run"),
    [
        ({}, "host-abc123", None, "", ""),
        ({"GROUP_RANK": "4"}, "host-abc123", 4, "", ""),
        # ---- Slurm
        (TASK, "gpu7", 1, "", SLURM),
        # the second srun of a job is a run of its own
        ({**TASK, "SLURM_STEP_ID": "1"}, "gpu7", 1, "", "slurm-123.1"),
        # a step on some of a job's nodes, one task each
        ({**TASK, "SLURM_JOB_NUM_NODES": "8", "SLURM_NTASKS": "64"}, "gpu7", 1, "", SLURM),
        ({**TASK, **ARRAY}, "gpu7", 1, "", "slurm-120_7.0"),
        ({**TASK, "SLURM_RESTART_COUNT": "2"}, "gpu7", 1, "", "slurm-123.0-2"),
        ({**TASK, "SLURM_RESTART_COUNT": "0"}, "gpu7", 1, "", SLURM),
        # a step of one task is perhaps a shell, from which many runs are started
        ({**TASK, **ONE_TASK, "SLURM_PROCID": "0"}, "gpu7", 0, "", ""),
        # the batch script itself, which may start many runs
        ({**BATCH, "SLURM_PROCID": "0"}, "gpu7", 0, "", ""),
        # a shell of salloc, on a node, and on the login host
        ({**TASK, "SLURM_STEP_ID": "4294967290"}, "gpu7", 1, "", ""),
        ({"SLURM_JOB_ID": "123", "SLURM_JOB_NUM_NODES": "2"}, "host-abc123", None, "", ""),
        ({**TASK, **SWITCHES}, "gpu7", 1, "top.leaf4", SLURM),
        ({**TASK, **BLOCKS}, "gpu7.rack.example", 1, "b2", SLURM),
        # ---- Kubernetes
        ({**JOB, "POD_NAME": "train-3-x7k2p"}, "train-3", 3, "", "train-5d1f-9"),
        ({**JOB, **OF_A_SET}, "set-nodes-0-3", 3, "", "set-nodes-0-5d1f-9"),
        (JOB, "host", 3, "", "train-5d1f-9"),
        ({**POD, "POD_NAME": "nodes-12"}, "nodes-12", 12, "", ""),
        ({**POD, "POD_NAME": ""}, "host", None, "", ""),
        ({**POD, "POD_NAME": "train-7cd9-x7k2p"}, "train-7cd9-x7k2p", None, "", ""),
        # a Job's name alone may have been that of an earlier Job
        ({**POD, "JOB_NAME": "build/12"}, "host", None, "", ""),
        ({"JOB_COMPLETION_INDEX": "3", "JOB_UID": "u"}, "host-abc123", None, "", ""),
    ],
)
def test_what_schedulers_say(
    env: dict[str, str], name: str, infra_rank: int | None, domain: str, run: str
) -> None:
    """Each environment gives one identity."""
    assert of(env) == Identity(name=name, infra_rank=infra_rank, domain=domain, run=run)


def test_what_is_given_counts_more() -> None:
    """Every part can be given, whatever the environment says; 0 and "" are given too."""
    given = of(TASK, name="mine", infra_rank=0, domain="", run="r")
    assert given == Identity(name="mine", infra_rank=0, domain="", run="r")


def test_tasks_of_a_step_differ_and_are_of_one_run() -> None:
    """Two hosts with three and two tasks: five names, five ranks, one run."""
    found = []
    for task, place in enumerate(["a0", "a1", "a2", "b0", "b1"]):
        here = {"SLURMD_NODENAME": place[0], "SLURM_LOCALID": place[1], "SLURM_PROCID": str(task)}
        found.append(of({**TASK, "SLURM_STEP_NUM_TASKS": "5", **here}))
    assert [one.name for one in found] == ["a-0", "a-1", "a-2", "b-0", "b-1"]
    assert [one.infra_rank for one in found] == [0, 1, 2, 3, 4]
    assert {one.run for one in found} == {SLURM}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"name": "a/b"}, "--node-name 'a/b'"),
        ({"name": "-a"}, "beginning with a letter"),
        ({"name": "a" * 129}, "at most 128"),
        ({"name": "a\n"}, "letters, digits"),
        ({"run": "über"}, "--run 'über'"),
        ({"infra_rank": -1}, "--infra-rank is a number from 0 on, not -1"),
    ],
)
def test_names_that_would_break_something_later(given: dict[str, str | int], told: str) -> None:
    """A name is part of keys and of paths: what it may hold is checked at once."""
    with pytest.raises(Mistake, match=told):
        of({}, **given)
