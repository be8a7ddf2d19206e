"""Configuration: files, settings over them, and mistakes that are told well."""

from pathlib import Path

import pytest

from holdfast.errors import Mistake
from holdfast.run.config import Config, load


def test_settings_over_a_file(tmp_path: Path) -> None:
    """Without a file there is a whole configuration; settings win over one, and words need no
    quotes."""
    assert load(None) == Config()
    path = tmp_path / "run.toml"
    path.write_text('steps = 5\n[rollout]\ngroups = 3\n[environment]\nname = "copy"\n')
    found = load(path, ["rollout.groups=4", "environment.name=increment", "train.ranks=1"])
    assert (found.steps, found.rollout.groups, found.train.ranks) == (5, 4, 1)
    assert found.environment.name == "increment"


@pytest.mark.parametrize(
    ("setting", "hint"),
    [
        ("rollout.group=4", "did you mean rollout.groups"),
        ("stepz=4", "did you mean steps"),
        ("rollout.groups=many", "rollout.groups"),
        ("rollout.lag=99", "less than or equal to 8"),
        ("steps", "key=value"),
        ("steps.more=1", "steps"),
        ("train.loss=dpo", "importance_sampling"),
        ("rollout.groups=1024 rollout.samples=256", "16384"),
    ],
)
def test_mistakes(setting: str, hint: str) -> None:
    """What is not understood is refused, with what may have been meant."""
    with pytest.raises(Mistake, match=hint):
        load(None, setting.split())


def test_bad_files(tmp_path: Path) -> None:
    """No file, and a file that is not TOML, are told apart."""
    with pytest.raises(Mistake, match="there is no file"):
        load(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("steps = = 4")
    with pytest.raises(Mistake, match="is not TOML"):
        load(tmp_path / "bad.toml")


@pytest.mark.parametrize("setting", ["model.lora_rank=4", "rollout.temperature=2.5"])
def test_what_vllm_cannot(setting: str) -> None:
    """Adapters, and temperatures that vLLM refuses, are refused before anything is started."""
    load(None, [setting])
    with pytest.raises(Mistake, match="vLLM"):
        load(None, [setting, "rollout.kind=vllm"])
