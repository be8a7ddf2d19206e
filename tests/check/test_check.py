"""What is in order passes; what was killed is not accused; the command says it with its code."""

import json
import re
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

import holdfast.chaos.runs
import holdfast.check
import holdfast.gateway.front
import holdfast.jobs.host
import holdfast.launch.crew
import holdfast.rollout.happenings
import holdfast.run.happenings
import holdfast.trainer.runner
import holdfast.trainer.upkeep
from check.stories import ORCHESTRATOR, SUPERVISOR, calm, killed
from holdfast import events
from holdfast.check import check_run
from holdfast.check.commands import check
from holdfast.check.schema import SCHEMA
from holdfast.errors import NotFound


def _wrong(folder: Path) -> dict[str, list[str]]:
    report = check_run(folder)
    return {one.rule: [it.says for it in one.findings] for one in report.rules if one.findings}


def _status(folder: Path) -> dict[str, str]:
    return {one.rule: one.status for one in check_run(folder).rules}


def test_calm_run_passes(tmp_path: Path) -> None:
    """In a calm run nothing is wrong, nothing needs an explanation, and what cannot be seen is
    "not checked"."""
    report = check_run(calm().write(tmp_path))
    assert report.finished
    assert not report.findings
    assert not [one.notes for one in report.rules if one.notes]
    silent = {one.rule for one in report.rules if one.status == "not checked"}
    assert silent == {
        "routes.gone",
        "operations.replay",
        "transfer.values",
        "weights.kept",
        "run.again",
    }


def test_replicas_that_promise_no_bits(tmp_path: Path) -> None:
    """A group that vLLM makes twice may differ: that is not looked at, everything else is."""
    logs = calm()
    first = logs.one("rollout.made", step=2, group=1)
    first["repeatable"] = False
    logs.after(first, reward=0.75)
    folder = logs.write(tmp_path)
    assert not check_run(folder).findings
    assert _status(folder)["run.again"] == "not checked"


def test_killed_run_is_not_accused(tmp_path: Path) -> None:
    """A death between an effect and its event is no finding; the rule explains it."""
    report = check_run(killed().write(tmp_path))
    assert not report.findings, [one.findings for one in report.rules if one.findings]
    explained = {one.rule for one in report.rules if one.notes}
    assert explained == {"samples.made", "samples.complete", "operations.order"}


@pytest.mark.parametrize("story", [calm, killed])
def test_no_moment_of_a_run_is_accused(story: type, tmp_path: Path) -> None:
    """Whenever everything is killed at once, what the logs have by then is no finding."""
    whole = story()
    times = sorted(one["at"] for events in whole.files.values() for one in events)
    for count, until in enumerate(times):
        logs = story()
        logs.metrics = []
        for file, all in logs.files.items():
            logs.files[file] = [one for one in all if one["at"] <= until]
        wrong = _wrong(logs.write(tmp_path / str(count)))
        # The file is empty here, and a finished run has one with all steps.
        assert wrong.keys() <= ({"run.metrics"} if until == times[-1] else set()), (until, wrong)


def test_torn_lines(tmp_path: Path) -> None:
    """A torn last line is what a kill leaves; a torn line inside is a finding, and only that."""
    path = calm().write(tmp_path) / ORCHESTRATOR
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"type":"step.comm')
    assert _wrong(tmp_path) == {}
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0][:20] + b"\n", *lines[1:]]))
    assert list(_wrong(tmp_path)) == ["logs.lines"]
    lines[-1] = lines[-1].replace(b'"exact":0.25', b'"exact":"much"')
    path.write_bytes(b"".join(lines))
    assert list(_wrong(tmp_path)) == ["logs.lines"]


def test_missing_lines(tmp_path: Path) -> None:
    """A gap in `seq` is a finding, unless an `events.dropped` stands for it; then whatever would
    follow from missing events is not judged."""
    path = calm().write(tmp_path) / ORCHESTRATOR
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[1:]))
    assert list(_wrong(tmp_path)) == ["logs.seq"]
    pid = json.loads(lines[0])["pid"]
    at = json.loads(lines[0])["at"]
    lost = {"type": "events.dropped", "count": 2, "at": at, "process": "", "pid": pid, "seq": 1}
    path.write_bytes(b"".join([json.dumps(lost).encode() + b"\n", *lines[2:]]))
    status = _status(tmp_path)
    assert "wrong" not in status.values(), status
    assert status["samples.complete"] == "not checked"


def test_run_that_goes_on(tmp_path: Path) -> None:
    """Without its end a run is not finished: steps to come are not missed, done ones are."""
    logs = calm()
    logs.remove(logs.one("run.ended"))
    assert _status(logs.write(tmp_path))["run.end"] == "not checked"
    assert _wrong(tmp_path) == {}
    logs.remove(logs.one("step.acknowledged", step=2))
    assert list(_wrong(logs.write(tmp_path))) == ["samples.complete"]


def test_rules_that_saw_nothing_are_not_ok(tmp_path: Path) -> None:
    """A finished run whose trainers' logs are gone is not ok: its rules were not checked, or say
    what is missing."""
    logs = calm()
    logs.files = {file: logs.files[file] for file in (SUPERVISOR,)}
    status = _status(logs.write(tmp_path))
    assert status["operations.once"] == "not checked"
    assert status["samples.complete"] == "wrong"


def test_command(tmp_path: Path) -> None:
    """0 when nothing is wrong, 1 with findings that name file and line, 2 for a bad call; a folder
    without a run is `NotFound`, which the command line ends with 4."""
    run = CliRunner().invoke
    good, bad = calm().write(tmp_path / "good"), calm()
    bad.after(bad.one("trainer.applied", number=6))
    bad.write(tmp_path / "bad")
    assert run(check, [str(good)]).exit_code == 0
    said = run(check, [str(tmp_path / "bad")])
    assert said.exit_code == 1
    assert "6 was applied twice in term 1 [abc-0:6]" in said.output
    assert "e1-c1-r0-100.jsonl:17" in said.output
    as_json = run(check, [str(tmp_path / "bad"), "--json"])
    assert as_json.exit_code == 1
    assert json.loads(as_json.output)["findings"] == 1
    assert run(check, []).exit_code == 2
    for folder in ("", "nowhere"):
        missing = run(check, [str(tmp_path / folder)])
        assert isinstance(missing.exception, NotFound)
        assert missing.exception.exit_code == 4


def test_it_shares_no_code_with_what_it_checks() -> None:
    """Of Holdfast it imports itself and the errors, nothing else."""
    imported = re.compile(r"^\s*(?:from|import)\s+(\.|holdfast\b[\w.]*)", re.MULTILINE)
    for path in Path(holdfast.check.__file__).parent.rglob("*.py"):
        for name in imported.findall(path.read_text()):
            assert name.startswith(("holdfast.check", "holdfast.errors")), path


def test_schema_is_what_holdfast_writes() -> None:
    """Every type and field that the checker reads is one that Holdfast writes."""
    written = events.types()
    for name, kind in SCHEMA.items():
        fields = {field.name for field in msgspec.structs.fields(kind)}
        there = {field.name for field in msgspec.structs.fields(written[name])}
        assert fields <= there, (name, fields - there)
