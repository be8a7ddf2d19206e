"""Real runs, killed: the same bits, nothing lost, nothing left behind."""

import json
import os
import signal
from pathlib import Path

import pytest

from holdfast.run.ending import differences
from patience import until

from . import runs

FAULTS = (
    "replica0@step 2; orchestrator@run.step.submitted 2; trainer.rank1@step 3; gateway@step 4;"
    "supervisor@step 5"
)


@pytest.mark.timeout(400)
def test_killed_and_the_same(calm: Path, tmp_path: Path) -> None:
    """Every kind of process dies, the supervisor too: the same weights and metrics, bit for bit;
    the checker finds nothing; no process and no shared memory is left."""
    hurt = tmp_path / "hurt"
    said = runs.run(hurt, "--chaos", FAULTS)
    struck = [one for one in runs.events(hurt) if one["type"] == "chaos.struck"]
    print([(one["clause"], one["step"]) for one in struck])
    assert {one["clause"] for one in struck} == {one.strip() for one in FAULTS.split(";")}
    final = [json.loads((one / "final.json").read_text()) for one in (calm, hurt)]
    assert final[0]["weights"] == final[1]["weights"]
    assert final[0]["weights"] in said
    assert final[1]["faults"] >= len(struck)
    for folder in (calm, hurt):
        runs.is_same(calm, folder)
        assert final[0]["weights"] in (folder / "report.html").read_text()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_another_seed_is_another_run(calm: Path, tmp_path: Path) -> None:
    """The comparison can fail: another seed gives other bits."""
    other = tmp_path / "other"
    runs.run(other, "--seed", "1")
    # The first steps may earn nothing and so learn nothing, whatever their seed.
    assert any(one.startswith("step 6: content, ") for one in differences(calm, other))


def test_differences(tmp_path: Path) -> None:
    """A line that is missing, and a bit that differs, are found and named."""
    lines = ['{"step":1,"loss":0.5}', '{"step":2,"loss":0.25}']
    for name, text in {
        "one": "\n".join(lines),
        "same": "\n".join(lines),
        "short": lines[0],
        "other": "\n".join(lines).replace("0.25", "0.2500000000000001"),
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(text + "\n")
    one = tmp_path / "one"
    assert differences(one, tmp_path / "same") == []
    assert differences(one, tmp_path / "other") == ["step 2: loss"]
    assert "2 lines" in differences(one, tmp_path / "short")[0]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_ctrl_c_and_resume(calm: Path, tmp_path: Path) -> None:
    """Ctrl-C ends everything and leaves nothing; --resume goes on, to the same end."""
    folder = tmp_path / "stopped"
    with runs.started(runs.argv(folder)) as child:
        runs.wait_for_step(folder, 3)
        os.kill(child.pid, signal.SIGINT)
        said, _ = child.communicate(timeout=60)
        assert child.returncode == 130, said
    assert "--resume" in said
    assert runs.left_over(folder) == []
    runs.holdfast("run", "--plain", "--resume", folder)
    runs.is_same(calm, folder)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_kill_the_supervisor_and_clean(tmp_path: Path) -> None:
    """kill -9 of the supervisor takes everything below it; `clean` removes what is left."""
    folder = tmp_path / "killed"
    with runs.started(runs.argv(folder)) as child:
        runs.wait_for_step(folder, 2)
        os.kill(child.pid, signal.SIGKILL)
        child.wait(timeout=30)
    until(lambda: len(runs.left_over(folder)) == 1, lambda: str(runs.left_over(folder)))
    assert runs.left_over(folder) == [str(runs.store_of(folder))]
    runs.holdfast("clean", folder, limit_s=60)
    assert runs.left_over(folder) == []


def test_refusals(tmp_path: Path) -> None:
    """A folder that is in use, or a plan that nobody understands, is refused before anything."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    for more, folder in ((["--chaos", "gatway@3s"], "new"), ([], "full")):
        runs.holdfast("run", "--out", tmp_path / folder, *more, code=2)
    assert (tmp_path / "full" / "file").read_text() == "mine"
