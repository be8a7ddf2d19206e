"""A killed run of before: `--resume` takes it to its end."""

import json
from pathlib import Path
from typing import Any

import pytest

from compat.sides import Side, facts, unpack


@pytest.mark.timeout(600)
def test_a_killed_run_goes_on(tmp_path: Path, new: Side) -> None:
    """It ends; what was recorded before the kill is as it was; the checker finds nothing.

    Bits hold on one type of CPU only, so what is compared is what must hold anywhere: the steps
    that had been done when it was killed. On another type of CPU a lost sample cannot be made
    again: then the run ends and says so.
    """
    folder = unpack("run", tmp_path)
    killed = folder / "killed"
    told = json.loads((killed / "run.json").read_text())
    told["cwd"] = str(folder)  # where the path of its model begins
    (killed / "run.json").write_text(json.dumps(told))
    before = (killed / "metrics.jsonl").read_bytes()
    url = f"sqlite:///{killed}/ledger.db"
    prefix = f"/runs/{facts(folder)['run']}/steps/"
    recorded = _values(new, url, prefix)
    assert len(before.splitlines()) >= 2, "the fixture was killed too early"
    try:
        said = new.command("run", "--plain", "--resume", str(killed))
    except AssertionError as ended:  # the samples of step 4 are made again: other bits here
        if "came out differently" not in str(ended):
            raise
        assert recorded.items() <= _values(new, url, prefix).items()
        return
    after = (killed / "metrics.jsonl").read_bytes()
    assert after.startswith(before)
    steps = [one["step"] for one in map(json.loads, after.splitlines()) if "loss" in one]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert recorded.items() <= _values(new, url, prefix).items()
    final = json.loads((killed / "final.json").read_text())
    assert final["weights"] in said
    new.command("check", str(killed))
    assert not (Path("/dev/shm") / facts(folder)["run"]).exists()


def _values(side: Side, url: str, prefix: str) -> dict[str, Any]:
    return {one["key"]: one["value"] for one in side.told("ledger", "ls", url, prefix, "--json")}
