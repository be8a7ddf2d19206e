"""Scripts as PyTorch's tutorials have them, started warm: they end, every time."""

from pathlib import Path

import pytest

from .cluster import Cluster

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

SCRIPT = str(Path(__file__).with_name("tutorial.py"))
FLAGS = ["--nproc-per-node", "2"]
RUNS = 20


def run(folder: Path, *args: str) -> None:
    """One run to its end, warm, which takes some 6 s."""
    folder.mkdir()
    with Cluster(folder, f"sqlite:///{folder}/ledger.db", nnodes="1", flags=FLAGS) as here:
        here.start("n0", SCRIPT, "20", str(folder / "snapshot.pt"), *args)
        assert here.codes("n0", timeout_s=90) == [0], here.story()
        events = "".join(path.read_text() for path in folder.rglob("events/*.jsonl"))
        assert '"warm":true' in events


def test_a_ddp_tutorial_ends_every_time(tmp_path: Path) -> None:
    """torch 2.13 deadlocks in ~ProcessGroupGloo when torch._dynamo was imported early: 4 of 10."""
    for number in range(RUNS):
        run(tmp_path / str(number), "destroy")


@pytest.mark.parametrize("end", ["destroy", "forget"])
def test_a_ddp_tutorial_whose_worker_is_killed_ends(tmp_path: Path, end: str) -> None:
    """The second cycle's workers are warm as well; so are those of a script that forgets."""
    for number in range(3):
        run(tmp_path / str(number), end, str(tmp_path / f"{number}.killed"))
        assert (tmp_path / f"{number}.killed").exists()
