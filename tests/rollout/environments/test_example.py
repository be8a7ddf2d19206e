"""The example with one's own reward, configured as it says itself."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from holdfast.rollout.environments import Judge, Score

EXAMPLES = Path(__file__).parents[3] / "examples"


async def test_own_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tasks and its configuration, as printed, give an environment that scores."""
    script = tmp_path / "own_reward.py"
    script.write_text((EXAMPLES / "own_reward.py").read_text())
    made = subprocess.run([sys.executable, script], check=True, capture_output=True, timeout=60)
    (tmp_path / "tasks.jsonl").write_bytes(made.stdout)
    assert len([json.loads(line) for line in made.stdout.splitlines()]) == 10_000
    monkeypatch.chdir(tmp_path)
    text = script.read_text().split('"""')[1]
    settings = tomllib.loads(text[text.index("    [environment]") :])["environment"]
    judge = Judge(settings["name"], settings["options"])
    try:
        assert (await judge.limits()).max_tokens == 4
        (task,) = await judge.tasks([3], "train")
        assert task.answer == "".join(sorted(task.prompt[:-1]))
        scores = await judge.scores(task, [([task.answer], []), ([task.answer[:2] + "xx"], [])])
        assert scores == [Score(1.0, exact=True), Score(0.5)]
    finally:
        await judge.close()
