"""`holdfast launch` on real processes: exit codes, kills, spares, bad calls."""

import json
import os
import signal
from pathlib import Path

import pytest

from .cluster import SCRIPT, Cluster, Commits, descendants, holdfast

QUICK = ["--lease", "2", "--last-call", "1", "--grace", "2", "--no-warm"]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/ledger.db"


def shell(text: str) -> tuple[str, ...]:
    return ("--no-python", "sh", "-c", text)


# ---- the contract of exit codes -----------------------------------------------------


def test_exit_codes_of_a_run_that_succeeds(tmp_path: Path, url: str) -> None:
    """Active, spare and late joiner exit 0; nothing is left of any of them."""
    program = shell(f"touch {tmp_path}/began; until [ -e {tmp_path}/go ]; do sleep 0.05; done")
    with Cluster(tmp_path, url, nnodes="2:3", flags=["--spares", "1", *QUICK]) as here:
        for name in ("n0", "n1", "n2"):
            here.start(name, *program)
        here.until("workers", (tmp_path / "began").exists)
        below = [pid for agent in here.all for pid in descendants(agent.pid)]
        (tmp_path / "go").touch()
        assert [here.agents[name].code(20) for name in ("n0", "n1", "n2")] == [0, 0, 0]
        assert here.start("n7", *program).code(20) == 0
        assert not [pid for pid in below if Path(f"/proc/{pid}").exists()]
        assert "has succeeded after 1 cycle" in here.agents["n0"].log.read_text()
        said = here.agents["n7"].log.read_text()
        assert "NOTHING WAS STARTED: the run 'r' succeeded" in said
        assert " UTC) after 1 cycle" in said
        assert "give another name: --run NAME" in said
        assert here.status()["cycle"]["state"] == "succeeded"


def test_exit_codes_of_a_run_that_fails(tmp_path: Path, url: str) -> None:
    """A rank that exits at once on every node uses up the budget; all hear which, how and why."""
    flags = ["--spares", "1", "--max-restarts", "1", *QUICK]
    program = shell('echo "rank $RANK has had enough" >&2; [ $RANK = 0 ] || sleep 60; exit 7')
    with Cluster(tmp_path, url, nnodes="2:3", flags=flags) as here:
        for name in ("n0", "n1", "n2"):
            here.start(name, *program)
        assert [here.agents[name].code(40) for name in ("n0", "n1", "n2")] == [1, 1, 1]
        for name in ("n0", "n1", "n2"):
            said = here.agents[name].log.read_text()
            assert "has failed after 4 cycles" in said  # two tries on n0, two on the spare
            assert "rank 0" in said
            assert "exit code 7" in said
            assert "rank 0 has had enough" in said
        assert here.start("n7", *program).code(20) == 1
        said = here.agents["n7"].log.read_text()
        assert "NOTHING WAS STARTED: the run 'r' failed" in said
        assert "exit code 7" in said


def test_a_node_whose_workers_always_fail_gives_its_rank_to_a_spare(
    tmp_path: Path, url: str
) -> None:
    """It costs two failures and nothing of the budget; the run ends with 0 on every node."""
    flags = ["--spares", "1", "--max-restarts", "1", *QUICK]
    program = shell(
        f'[ -z "$BAD" ] || exit 7; echo $HOLDFAST_NODE >> {tmp_path}/began; '
        f"until [ -e {tmp_path}/go ]; do sleep 0.05; done"
    )
    with Cluster(tmp_path, url, nnodes="2:3", flags=flags) as here:
        for name in ("n0", "n1", "n2"):
            here.start(name, *program, env={"BAD": "1"} if name == "n0" else {})
        began = tmp_path / "began"
        here.until("spare", lambda: began.exists() and "n2" in began.read_text())
        shown = holdfast("status", "r", url=url).stdout
        assert "1 parked" in shown
        assert "0 of 1 restarts used" in shown
        assert "n0: its workers were the first to fail, twice in a row" in shown
        (tmp_path / "go").touch()
        assert [here.agents[name].code(20) for name in ("n0", "n1", "n2")] == [0, 0, 0]
        said = here.agents["n0"].log.read_text()
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
        for name in ("n0", "n1", "n2"):
            here.start(name, str(script), env={"BAD": "1"} if name == "n1" else {})
        codes = [here.agents[name].code(120) for name in ("n0", "n1", "n2")]
        assert codes == [0, 0, 0], here.story()
        cycle = here.status()["cycle"]
        assert [cause["node"] for cause in cycle["history"]] == ["n1", "n1"]
        assert [member[0] for member in cycle["members"]] == ["n0", "n2"]
        assert cycle["restarts"] == []


def test_a_second_node_of_one_name_hears_so_at_once(tmp_path: Path, url: str) -> None:
    """It exits 2 and says which node has the name; the first does not notice."""
    program = shell(f"touch {tmp_path}/began; until [ -e {tmp_path}/go ]; do sleep 0.05; done")
    with Cluster(tmp_path, url, nnodes="1", flags=[*QUICK, "--lease", "600"]) as here:
        first = here.start("n0", *program)
        here.until("workers", (tmp_path / "began").exists)
        near = here.start("n0", *program)
        assert near.code(60) == 2
        assert "a node named 'n0' already runs on this machine" in near.log.read_text()
        second = here.start("n0", *program, flags=["--log-dir", str(tmp_path / "elsewhere")])
        assert second.code(60) == 2  # not after three leases of ten minutes
        said = second.log.read_text()
        assert "a node named 'n0' is already in this run (host " in said
        assert f"pid {first.pid}): end it, or give this node another name: --node-name" in said
        assert here.status()["cycle"]["state"] == "running"
        (tmp_path / "go").touch()
        assert first.code(20) == 0
        assert "after 1 cycle" in first.log.read_text()


def test_a_node_that_is_terminated_leaves_and_the_run_goes_on(tmp_path: Path, url: str) -> None:
    """143 for it, its worker gets the time to end in peace, a spare takes its rank."""
    program = shell(
        f"trap 'touch {tmp_path}/saved; exit 0' TERM; "
        f"touch {tmp_path}/began-$RANK-$HOLDFAST_NODE; "
        f"until [ -e {tmp_path}/go ]; do sleep 0.05; done"
    )
    with Cluster(tmp_path, url, nnodes="2:3", flags=["--spares", "1", *QUICK]) as here:
        for name in ("n0", "n1", "n2"):
            here.start(name, *program)
        here.until("workers", (tmp_path / "began-0-n0").exists)
        os.kill(here.agents["n0"].pid, signal.SIGTERM)
        assert here.agents["n0"].code(20) == 143
        assert (tmp_path / "saved").exists()
        here.until("the spare", (tmp_path / "began-0-n2").exists)
        (tmp_path / "go").touch()
        assert [here.agents[name].code(20) for name in ("n1", "n2")] == [0, 0]


def test_a_second_signal_kills(tmp_path: Path, url: str) -> None:
    """A worker that ignores SIGTERM is not waited for twice."""
    program = shell(f"trap '' TERM; touch {tmp_path}/began; while :; do sleep 0.05; done")
    flags = ["--lease", "2", "--grace", "60", "--no-warm"]
    with Cluster(tmp_path, url, nnodes="1", flags=flags) as here:
        agent = here.start("n0", *program)
        here.until("a worker", (tmp_path / "began").exists)
        agent.child.process.send_signal(signal.SIGINT)
        here.until("an answer", lambda: "once more to kill" in agent.log.read_text())
        agent.child.process.send_signal(signal.SIGINT)
        assert agent.code(20) == 130


def test_an_unhealthy_node_does_not_join(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says why and exits 10; the run does not hear of it."""
    monkeypatch.setenv("HOLDFAST_LEAST_DISK_MIB", str(1 << 40))
    with Cluster(tmp_path, url, nnodes="1", flags=QUICK) as here:
        agent = here.start("n0", *shell("true"))
        assert agent.code(20) == 10
        assert "disk:" in agent.log.read_text()
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


def test_torchruns_flags_and_environment(tmp_path: Path, url: str) -> None:
    """Underscores, =, local ranks in arguments, and the variables that scripts read."""
    script = tmp_path / "show.py"
    script.write_text(
        "import json, os, sys\n"
        "names = ['RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'GROUP_RANK',\n"
        "         'MASTER_ADDR', 'MASTER_PORT', 'TORCHELASTIC_RUN_ID', 'HOLDFAST_CYCLE']\n"
        "found = {name: os.environ[name] for name in names}\n"
        f"path = {str(tmp_path)!r} + '/' + os.environ['RANK'] + '.json'\n"
        "json.dump([found, sys.argv[1:], __name__], open(path, 'w'))\n"
    )
    found = holdfast(
        *("launch", "--nproc_per_node=2", "--rdzv_id", "mine", "--max_restarts=0"),
        *("--standalone", "--master_port", "29500"),
        *("--log-dir", str(tmp_path / "logs"), str(script), "--own_flag", "-x"),
        url=url,
    )
    assert found.returncode == 0, found.stderr
    assert "--master-port is not used: a port is chosen for every cycle" in found.stderr
    for rank in (0, 1):
        env, argv, name = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"]) == (str(rank), str(rank), "2")
        assert env["TORCHELASTIC_RUN_ID"] == "mine"
        assert argv == ["--own_flag", "-x"]
        assert name == "__main__"


def test_dry_run_prints_what_was_resolved(tmp_path: Path, url: str) -> None:
    """And starts nothing."""
    found = holdfast(
        "launch", "--dry-run", "--log-dir", str(tmp_path), "--run", "r", "x.py", url=url
    )
    assert json.loads(found.stdout)["run"] == "r"
    assert holdfast("status", "r", url=url).returncode == 4


@pytest.mark.long
def test_draining_a_node(tmp_path: Path, url: str) -> None:
    """It holds no rank from the next cycle on; undrained it may again."""
    program = shell(f"until [ -e {tmp_path}/go ]; do sleep 0.05; done")
    with Cluster(tmp_path, url, nnodes="2:3", flags=["--spares", "1", *QUICK]) as here:
        for name in ("n0", "n1", "n2"):
            here.start(name, *program)
        here.until("cycle 1", lambda: here.status().get("cycle", {}).get("state") == "running")
        assert holdfast("nodes", "drain", "n9", "--run", "r", url=url).returncode == 4
        drained = holdfast("nodes", "drain", "n0", "--run", "r", "--now", url=url)
        assert drained.returncode == 0, drained.stderr
        here.until(
            "cycle 2",
            lambda: (
                [m[0] for m in here.status()["cycle"]["members"]] == ["n2", "n1"]
                and here.status()["cycle"]["state"] == "running"
            ),
        )
        text = holdfast("status", "r", url=url).stdout
        assert "drained" in text
        assert holdfast("nodes", "undrain", "n0", "--run", "r", url=url).returncode == 0
        (tmp_path / "go").touch()
        assert [here.agents[name].code(20) for name in ("n0", "n1", "n2")] == [0, 0, 0]


# ---- training, killed ------------------------------------------------------------------


@pytest.mark.timeout(240)
def test_a_training_run_survives_a_worker_and_an_agent(tmp_path: Path, url: str) -> None:
    """Two active nodes and a spare; a worker is killed, then rank 0's agent; it ends right."""
    flags = ["--spares", "1", "--lease", "3", "--last-call", "20"]
    with Cluster(tmp_path, url, nnodes="2:3", flags=flags) as here:
        commits = Commits(url, "r")
        for name in ("n0", "n1", "n2"):
            here.start(name, SCRIPT, "40", "0.1")
        here.until("step 2", lambda: here.step() >= 2, 120)
        os.kill(here.workers("n1")[1], signal.SIGKILL)
        here.until("cycle 2", lambda: here.committed("rank_0")["cycle"] == 2)
        below = descendants(here.agents["n0"].pid)
        here.agents["n0"].child.process.kill()
        here.until("cycle 3", lambda: here.committed("rank_0")["cycle"] == 3)
        here.until("orphans gone", lambda: not any(Path(f"/proc/{p}").exists() for p in below))
        assert [here.agents[name].code(90) for name in ("n1", "n2")] == [0, 0], here.story()
        assert here.committed("step") == 40
        assert here.committed("total") == 40 * 41 // 2
        commits.close()
        causes = [cause["kind"] for cause in here.status()["cycle"]["history"]]
        assert causes[0] == "failed"
