"""Every fault of the plan's language, one at a time; storms; and one's own model and reward."""

import json
from pathlib import Path

import pytest

from holdfast.engine.tiny import make_tiny
from trainer.disks import small

from . import runs

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

SINGLE = (
    "supervisor@step 3",
    "orchestrator@step 3",
    "gateway@step 3",
    "host@step 3",
    "trainer.agent@step 3",
    "trainer.rank0@step 3",
    "trainer.rank1@step 3",
    "replica0@step 3",
    "replica1@step 3",
    "gateway@8s",
    "orchestrator: pause 6s@step 3",
    "gateway: pause 4s@step 3",
    "replica0: pause 6s@step 3",
    "trainer.rank0: pause 5s@step 3",
    "trainer.rank1: pause 5s@step 3",
    "host: pause 8s@step 3",
    "gateway: cut 3s@step 3",
    "ledger: cut 4s@step 3",
    "store: corrupt@step 3",
    "orchestrator@run.step.sampled 2",
    "orchestrator@run.step.committed 2",
    "orchestrator@run.step.submitted 2",
    "orchestrator@run.step.promised 2",
    "orchestrator@run.step.done 2",
    "replica0@rollout.make.before 3",
    "replica0@rollout.make.after 3",
    "replica0@rollout.make.put 3",
    "replica0@rollout.load.after 2",
    "trainer.rank0@trainer.journal.after 9",
    "trainer.rank0@trainer.publish.kept 3",
)


def same(calm: Path, hurt: Path, least: int = 1) -> None:
    """Two runs are the same, and so many faults were made."""
    told = [one for one in runs.events(hurt) if one["type"].startswith("chaos.")]
    assert [one for one in told if one["type"] == "chaos.missed"] == []
    struck = [one for one in told if one["type"] == "chaos.struck"]
    print([(one["clause"], one["step"], one["point"]) for one in struck])
    assert len(struck) >= least
    runs.is_same(calm, hurt)


@pytest.mark.parametrize("clause", SINGLE)
def test_one_fault(calm: Path, tmp_path: Path, clause: str) -> None:
    """One fault of any kind changes nothing."""
    runs.run(tmp_path / "hurt", "--chaos", clause)
    same(calm, tmp_path / "hurt")


def test_a_full_disk(calm: Path, tmp_path: Path) -> None:
    """A file system of its own runs full, and there is room again: nothing is lost."""
    with small(tmp_path / "small", 200 << 20) as place:
        runs.run(place / "run", "--chaos", "disk: full 5s@step 3")
        same(calm, place / "run")


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_storm(tmp_path: Path, seed: int) -> None:
    """Twenty faults and more, everybody dies: calm and storm end with the same bits."""
    proof = tmp_path / "proof"
    told = runs.holdfast("run", "--prove", "--seed", str(seed), "--out", proof, limit_s=880)
    print(told[-4000:])
    assert "the same weights, bit for bit" in told
    same(proof / "calm", proof / "storm", 20)


def test_ones_own_reward_and_model(tmp_path: Path) -> None:
    """A Hugging Face directory and a reward function of one's own, by configuration alone; a
    reward that crashes costs its group, and the run goes on."""
    model = make_tiny(tmp_path / "model", hidden=64, layers=1, heads=2, context=64)
    (tmp_path / "mine.py").write_text(
        "def reward(prompt, answer, completion):\n"
        "    if answer == '3':\n"
        "        raise ValueError('a bad day')\n"
        "    return float(answer in completion)\n"
    )
    tasks = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(9)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(one) + "\n" for one in tasks))
    (tmp_path / "run.toml").write_text(
        f'steps = 4\nmodel.directory = "{model}"\n'
        'environment = {name = "mine:reward", options = {tasks = "tasks.jsonl", max_tokens = 3}}\n'
        "rollout = {groups = 8, samples = 4}\ntrain = {ranks = 1, spares = 0}\n"
        "evaluate.prompts = 4\n"
    )
    runs.holdfast("run", "run.toml", "--plain", "--out", "out", cwd=tmp_path)
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    dropped = [one for line in lines for one in json.loads(line).get("dropped", [])]
    assert dropped, "no group met the bad day"
    runs.holdfast("check", tmp_path / "out")
