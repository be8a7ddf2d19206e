"""`holdfast launch` on real processes: exit codes, kills, spares, bad calls."""

import os
import signal
from pathlib import Path

import pytest

from .cluster import SCRIPT, Cluster, Commits, descendants, holdfast, there

THREE = ("n0", "n1", "n2")
SPARE = ["--spares", "1"]
QUICK = ["--lease", "2", "--last-call", "1", "--grace", "2", "--no-warm"]


def shell(text: str) -> tuple[str, ...]:
    return ("--no-python", "sh", "-c", text)


def until_go(folder: Path, before: str = "") -> tuple[str, ...]:
    """A worker that ends with success when the test says so."""
    return shell(f"{before}until [ -e {folder}/go ]; do sleep 0.05; done")


# ---- the contract of exit codes -----------------------------------------------------


def test_exit_codes_of_a_run_that_succeeds(tmp_path: Path, url: str) -> None:
    """Active, spare and late joiner exit 0; nothing is left of any of them."""
    program = until_go(tmp_path, f"touch {tmp_path}/began; ")
    with Cluster(tmp_path, url, nnodes="2:3", flags=[*SPARE, *QUICK]) as here:
        here.begin(*program)
        here.until("workers", (tmp_path / "began").exists)
        below = here.below()
        (tmp_path / "go").touch()
        assert here.codes(*THREE) == [0, 0, 0]
        here.start("n7", *program)
        assert here.codes("n7") == [0]
        assert not there(below)
        assert "has succeeded after 1 cycle" in here.said("n0")
        said = here.said("n7")
        assert "NOTHING WAS STARTED: the run 'r' succeeded" in said
        assert " UTC) after 1 cycle" in said
        assert "give another name: --run NAME" in said
        assert here.cycle().state == "succeeded"


def test_exit_codes_of_a_run_that_fails(tmp_path: Path, url: str) -> None:
    """A rank that exits at once on every node uses up the budget; all hear which, how and why."""
    flags = [*SPARE, "--max-restarts", "1", *QUICK]
    program = shell('echo "rank $RANK has had enough" >&2; [ $RANK = 0 ] || sleep 60; exit 7')
    with Cluster(tmp_path, url, nnodes="2:3", flags=flags) as here:
        here.begin(*program)
        assert here.codes(*THREE, timeout_s=40) == [1, 1, 1]
        for name in THREE:
            said = here.said(name)
            assert "has failed after 4 cycles" in said  # two tries on n0, two on the spare
            assert "rank 0" in said
            assert "exit code 7" in said
            assert "rank 0 has had enough" in said
        here.start("n7", *program)
        assert here.codes("n7") == [1]
        said = here.said("n7")
        assert "NOTHING WAS STARTED: the run 'r' failed" in said
        assert "exit code 7" in said


def test_a_node_whose_workers_always_fail_gives_its_rank_to_a_spare(
    tmp_path: Path, url: str
) -> None:
    """It costs two failures and nothing of the budget; the run ends with 0 on every node."""
    flags = [*SPARE, "--max-restarts", "1", *QUICK]
    began = tmp_path / "began"
    program = until_go(tmp_path, f'[ -z "$BAD" ] || exit 7; echo $HOLDFAST_NODE >> {began}; ')
    with Cluster(tmp_path, url, nnodes="2:3", flags=flags) as here:
        here.begin(*program, bad="n0")
        here.until("spare", lambda: began.exists() and "n2" in began.read_text())
        shown = holdfast("status", "r", url=url).stdout
        assert "1 parked" in shown
        assert "0 of 1 restarts used" in shown
        assert "n0: its workers were the first to fail, twice in a row" in shown
        (tmp_path / "go").touch()
        assert here.codes(*THREE) == [0, 0, 0]
        said = here.said("n0")
        assert "this node comes after all spares from now on" in said
        assert "exit code 7" in said
        assert "has succeeded after 3 cycles" in said


@pytest.mark.long
@pytest.mark.timeout(240)
def test_the_node_that_breaks_a_group_is_blamed_and_not_its_peers(
    tmp_path: Path, url: str
) -> None:
    """Its exception breaks gloo for all; the peers' errors, which follow from it, come later."""
    script = tmp_path / "breaks.py"
    script.write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "for step in range(6):\n"
        "    if os.environ.get('BAD') and step == 3 and os.environ['LOCAL_RANK'] == '1':\n"
        "        raise RuntimeError('this node is no good')\n"
        "    dist.all_reduce(torch.ones(1))\n"
        "dist.destroy_process_group()\n"
    )
    flags = ["--spares", "1", "--last-call", "60", "--nproc-per-node", "2"]
    with Cluster(tmp_path, url, nnodes="2:3", flags=flags) as here:
        here.begin(str(script), bad="n1")
        assert here.codes(*THREE, timeout_s=120) == [0, 0, 0], here.story()
        assert [cause.node for cause in here.cycle().history] == ["n1", "n1"]
        assert here.members() == ["n0", "n2"]
        assert here.cycle().restarts == ()


def test_a_second_node_of_one_name_hears_so_at_once(tmp_path: Path, url: str) -> None:
    """It exits 2 and says which node has the name; the first does not notice."""
    program = until_go(tmp_path, f"touch {tmp_path}/began; ")
    with Cluster(tmp_path, url, nnodes="1", flags=[*QUICK, "--lease", "600"]) as here:
        first = here.start("n0", *program)
        here.until("workers", (tmp_path / "began").exists)
        here.start("n0", *program)
        assert here.codes("n0", timeout_s=60) == [2]
        assert "a node named 'n0' already runs on this machine" in here.said("n0")
        here.start("n0", *program, flags=["--log-dir", str(tmp_path / "elsewhere")])
        assert here.codes("n0", timeout_s=60) == [2]  # not after three leases of ten minutes
        said = here.said("n0")
        assert "a node named 'n0' is already in this run (host " in said
        assert f"pid {first.pid}): end it, or give this node another name: --node-name" in said
        assert here.cycle().state == "running"
        (tmp_path / "go").touch()
        assert first.wait(20) == 0
        assert here.cycle().number == 1


def test_a_node_that_is_terminated_leaves_and_the_run_goes_on(tmp_path: Path, url: str) -> None:
    """143 for it, its worker gets the time to end in peace, a spare takes its rank."""
    before = f"trap 'touch {tmp_path}/saved; exit 0' TERM; "
    program = until_go(tmp_path, before + f"touch {tmp_path}/began-$RANK-$HOLDFAST_NODE; ")
    with Cluster(tmp_path, url, nnodes="2:3", flags=[*SPARE, *QUICK]) as here:
        here.begin(*program)
        here.until("workers", (tmp_path / "began-0-n0").exists)
        os.kill(here.agents["n0"].pid, signal.SIGTERM)
        assert here.codes("n0") == [143]
        assert (tmp_path / "saved").exists()
        here.until("the spare", (tmp_path / "began-0-n2").exists)
        (tmp_path / "go").touch()
        assert here.codes("n1", "n2") == [0, 0]


def test_a_second_signal_kills(tmp_path: Path, url: str) -> None:
    """A worker that ignores SIGTERM is not waited for twice."""
    program = shell(f"trap '' TERM; touch {tmp_path}/began; while :; do sleep 0.05; done")
    flags = ["--lease", "2", "--grace", "60", "--no-warm"]
    with Cluster(tmp_path, url, nnodes="1", flags=flags) as here:
        agent = here.start("n0", *program)
        here.until("a worker", (tmp_path / "began").exists)
        os.kill(agent.pid, signal.SIGINT)
        here.until("an answer", lambda: "once more to kill" in here.said("n0"))
        os.kill(agent.pid, signal.SIGINT)
        assert here.codes("n0") == [130]


def test_an_unhealthy_node_does_not_join(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says why and exits 10; the run does not hear of it."""
    monkeypatch.setenv("HOLDFAST_LEAST_DISK_MIB", str(1 << 40))
    with Cluster(tmp_path, url, nnodes="1", flags=QUICK) as here:
        here.start("n0", *shell("true"))
        assert here.codes("n0") == [10]
        assert "disk:" in here.said("n0")
        assert here.status() == {}


@pytest.mark.parametrize(
    ("flags", "code", "told"),
    [
        (["--nnodes", "3:2", "--run", "x", "true.py"], 2, "the minimum is at least 1"),
        (["--nnodes", "two", "x.py"], 2, "write N or MIN:MAX"),
        (["--nnodes", "2", "x.py"], 2, "--run NAME"),
        (["--run", "a/b", "x.py"], 2, "letters, digits"),
        (["--spares", "2", "x.py"], 2, "keep back at most 0"),
        (["nowhere.py"], 4, "there is no script nowhere.py"),
        (["--no-python", "no-such-program"], 4, "was not found"),
        (["-m", "--no-python", "x"], 2, "exclude each other"),
        (["--nproc-per-node", "many", "x.py"], 2, "a number, gpu, cpu or auto"),
        (["--local-addr", "192.0.2.1", "--no-python", "true"], 2, "cannot listen on 192.0.2.1"),
        (["--ledger", "etcd://127.0.0.1:9", "--no-python", "true"], 3, "127.0.0.1:9"),
        (["--lease", "0.1", "x.py"], 2, "at least 0.5 s"),
        (["--rdzv-endpoint", "host:29500", "x.py"], 2, "there is no store host here"),
        (["--ledger", "ftp://x", "--no-python", "true"], 2, "no ledger is called"),
    ],
)
def test_bad_calls_get_one_clear_line(
    tmp_path: Path, url: str, flags: list[str], code: int, told: str
) -> None:
    """No traceback, no half-started run."""
    found = holdfast("launch", "--log-dir", str(tmp_path / "logs"), *flags, url=url)
    assert found.returncode == code, found.stderr
    assert told in found.stderr
    assert "Traceback" not in found.stderr
    assert len(found.stderr.strip().splitlines()) <= 3


@pytest.mark.long
def test_draining_a_node(tmp_path: Path, url: str) -> None:
    """It holds no rank from the next cycle on; undrained it may again."""
    program = until_go(tmp_path)
    drained_states = {"n2": "active", "n1": "active", "n0": "drained"}
    with Cluster(tmp_path, url, nnodes="2:3", flags=[*SPARE, *QUICK]) as here:
        here.begin(*program)
        here.until("cycle 1", lambda: "active" in here.states().values())
        assert holdfast("nodes", "drain", "n9", "--run", "r", url=url).returncode == 4
        drained = holdfast("nodes", "drain", "n0", "--run", "r", "--now", url=url)
        assert drained.returncode == 0, drained.stderr
        here.until("cycle 2", lambda: here.states() == drained_states)
        assert holdfast("nodes", "undrain", "n0", "--run", "r", url=url).returncode == 0
        (tmp_path / "go").touch()
        assert here.codes(*THREE) == [0, 0, 0]


# ---- training, killed ------------------------------------------------------------------


@pytest.mark.timeout(240)
def test_a_training_run_survives_a_worker_and_an_agent(tmp_path: Path, url: str) -> None:
    """Two active nodes and a spare; a worker is killed, then rank 0's agent; it ends right."""
    flags = ["--spares", "1", "--lease", "3", "--last-call", "20"]
    with Cluster(tmp_path, url, nnodes="2:3", flags=flags) as here:
        commits = Commits(url)
        here.begin(SCRIPT, "40", "0.1")
        here.until_step(2)
        os.kill(here.workers("n1")[1], signal.SIGKILL)
        here.until("cycle 2", lambda: here.committed("rank_0")["cycle"] == 2)
        below = descendants(here.agents["n0"].pid)
        os.kill(here.agents["n0"].pid, signal.SIGKILL)
        here.until("cycle 3", lambda: here.committed("rank_0")["cycle"] == 3)
        here.until("orphans gone", lambda: not there(below))
        assert here.codes("n1", "n2", timeout_s=90) == [0, 0], here.story()
        here.trained(40)
        commits.close()
        assert here.cycle().history[0].kind == "failed"
