"""`srun holdfast launch` on a real Slurm with two nodes. Long."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import ledger
from holdfast.ledger.records import decode
from holdfast.proc import HeldPort
from holdfast.rendezvous.records import Keys, Node
from holdfast.servers import find_program
from patience import HANG_S

from .cluster import SCRIPT, Cluster
from .slurm import Slurm

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
SRUN = ("srun", "-N2", "--kill-on-bad-exit=0", "--wait=0")
LAUNCH = (sys.executable, "-m", "holdfast", "launch")
ENV = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with Slurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running


class Step:
    """One srun of agents that share a ledger; `run` is what they call themselves."""

    def __init__(self, slurm: Slurm, folder: Path, *launch: str, tasks: int = 2) -> None:
        self.slurm = slurm
        self.url = f"sqlite:///{folder}/ledger.db"
        self.log = folder / "srun.log"
        flags = ["--ledger", self.url, "--log-dir", str(folder / "logs")]
        flags += ["--nnodes", str(tasks), "--nproc-per-node", "1", "--no-warm", "--lease", "5"]
        srun = [*SRUN, f"-n{tasks}", "-J", folder.name]
        self.child = slurm.start(*srun, *LAUNCH, *flags, *launch, log=self.log, env=ENV)
        self.job = slurm.job(folder.name)
        self.run = f"slurm-{self.job}.0"
        self.records = Cluster(folder, self.url, run=self.run, nnodes=str(tasks))

    def until(self, what: str, test: Any, timeout_s: float = 90.0) -> Any:
        """Wait for something; tells what srun said when it does not come."""
        try:
            return self.slurm.until(what, test, timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log.read_text()}") from None

    def code(self, timeout_s: float = 90.0) -> int:
        """Wait for the end of srun."""
        return self.child.wait(timeout_s)


def test_names_order_and_job_come_from_slurm(slurm: Slurm, tmp_path: Path) -> None:
    """Nothing but --nnodes is given; it trains to its end, and srun ends with 0."""
    step = Step(slurm, tmp_path, SCRIPT, "10", "0.02")
    assert step.code() == 0, step.log.read_text()
    assert step.records.committed("step") == 10
    members = [(one.name, one.domain) for one in step.records.cycle().members]
    assert members == [("n1", "top.leaf1"), ("n2", "top.leaf2")]
    assert f"{step.run} has succeeded after 1 cycle" in step.log.read_text()


def test_several_agents_on_a_node(slurm: Slurm, tmp_path: Path) -> None:
    """Two tasks per node are four nodes of the run, in the order of Slurm's tasks."""
    told = f"echo $RANK $HOLDFAST_NODE $SLURM_PROCID > {tmp_path}/told-$RANK"
    step = Step(slurm, tmp_path, "--no-python", "sh", "-c", told, tasks=4)
    assert step.code() == 0, step.log.read_text()
    assert [(tmp_path / f"told-{rank}").read_text().split() for rank in range(4)] == [
        ["0", "n1-0", "0"],
        ["1", "n1-1", "1"],
        ["2", "n2-0", "2"],
        ["3", "n2-1", "3"],
    ]


def test_a_killed_worker_is_replaced(slurm: Slurm, tmp_path: Path) -> None:
    """Slurm hears nothing of it; the second cycle ends right, and srun ends with 0."""
    step = Step(slurm, tmp_path, SCRIPT, "40", "0.1")
    record = step.until("step 2", lambda: step.records.step() >= 2 and _rank_1(step))
    os.kill(slurm.pid("n2", record["pid"]), signal.SIGKILL)
    assert step.code() == 0, step.log.read_text()
    step.records.trained(40)
    assert _rank_1(step)["cycle"] == 2
    assert [cause.kind for cause in step.records.cycle().history] == ["failed"]


def _rank_1(step: Step) -> Any:
    return step.records.committed("rank_1")


@pytest.mark.parametrize(
    "proctrack",
    [
        "pgid",  # a signal is for the task's own process group: the agent
        "linuxproc",  # a signal is for every process of the step: workers and warden, too
    ],
)
def test_scancel_lets_the_workers_end_in_peace(tmp_path: Path, proctrack: str) -> None:
    """Each worker has the time to save; the agents say why they leave, and nothing is left."""
    (tmp_path / "slurm").mkdir()
    program = (
        f"trap 'sleep 1; touch {tmp_path}/saved-$RANK; exit 0' TERM; "
        f"echo $$ > {tmp_path}/began-$RANK; while :; do sleep 0.1; done"
    )
    with Slurm(tmp_path / "slurm", proctrack=proctrack) as slurm:
        step = Step(slurm, tmp_path, "--no-python", "sh", "-c", program)
        began = [tmp_path / f"began-{rank}" for rank in (0, 1)]
        step.until("workers", lambda: all(path.exists() and path.read_text() for path in began))
        inner = [int(path.read_text()) for path in began]
        pids = [slurm.pid(node, pid) for node, pid in zip(("n1", "n2"), inner, strict=True)]
        slurm.run("scancel", step.job)
        assert step.code() == 143, step.log.read_text()
        said = step.log.read_text()
        assert said.count(f"this node has left {step.run}: SIGTERM") == 2
        assert not [pid for pid in pids if Path(f"/proc/{pid}/exe").exists()]
        assert [(tmp_path / f"saved-{rank}").exists() for rank in (0, 1)] == [True, True], said


def test_the_example_of_a_job(slurm: Slurm, tmp_path: Path) -> None:
    """deploy/slurm.sbatch as it is: its own etcd, a spare that is killed, and the job's end is 0.

    srun alone would end with the code of the node that was killed.
    """
    beside = [Path(sys.executable).parent, Path(find_program("etcd", "etcd-server")).parent]
    path = os.pathsep.join([*map(str, beside), os.environ["PATH"]])
    held = HeldPort()
    port = str(held.port)
    out, enough = tmp_path / "job.log", tmp_path / "enough"
    env = {**ENV, "PATH": path, "ETCD_HOST": "127.0.0.1", "ETCD_PORT": port, "WORKERS": "1"}
    job = ("sbatch", "-N2", "-J", tmp_path.name, "-o", str(out))
    script = (str(ROOT / "deploy" / "slurm.sbatch"), "--log-dir", str(tmp_path / "logs"))
    submitted = slurm.start(
        *job, *script, SCRIPT, "10000", "0.05", str(enough), log=tmp_path / "sbatch.log", env=env
    )
    assert submitted.wait(HANG_S) == 0, (tmp_path / "sbatch.log").read_text()
    number = slurm.job(tmp_path.name)
    here = Cluster(tmp_path, f"etcd://127.0.0.1:{port}", run=f"slurm-{number}-0", nnodes="1:2")
    try:
        slurm.until("a spare", lambda: here.states() == {"n1": "active", "n2": "spare"})
        slurm.until("training", lambda: here.step() >= 2)
        agent = _agent(slurm, here, "n2")
        os.kill(agent, signal.SIGKILL)
        slurm.until("its end", lambda: here.states() == {"n1": "active"})
        enough.touch()
        ended = slurm.until("end", lambda: _ended(slurm, number), 60)
        assert "JobState=COMPLETED" in ended
        assert "ExitCode=0:0" in ended
    except AssertionError as error:
        raise AssertionError(f"{error}\n{out.read_text() if out.exists() else ''}") from None
    assert f"slurm-{number}-0 has succeeded after 1 cycle" in out.read_text()


def _ended(slurm: Slurm, number: str) -> str:
    """What Slurm says of a job that has ended; empty before."""
    told = slurm.run("scontrol", "show", "job", number)
    return "" if "State=RUNNING" in told or "State=COMPLETING" in told else told


def _agent(slurm: Slurm, here: Cluster, node: str) -> int:
    """The agent of a node, from its record."""
    with ledger.open_sync(here.url) as opened:
        entry = opened.get(Keys(here.run).node(node))
    assert entry is not None
    return slurm.pid(node, decode(Node, entry).pid)
