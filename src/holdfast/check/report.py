"""Puts together what all rules say of a run, for people and for programs."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from holdfast.check.history import History
from holdfast.check.reading import read_run
from holdfast.check.rules import RULES
from holdfast.check.schema import ChaosStruck, FaultFired, PartDied, RunBegun
from holdfast.check.verdict import PROMISES, Verdict, judge

__all__ = ["Report", "check_history", "check_run", "lines"]

_SHOWN = 20
"""Findings of one rule that are shown to people."""


class Report(msgspec.Struct, frozen=True):
    """What was found."""

    run: str
    steps: int
    finished: bool
    events: int
    files: int
    faults: int
    """That were put on processes, or fired at named points."""
    deaths: int
    """Of the supervisor's parts."""
    findings: int
    rules: tuple[Verdict, ...]


def check_run(folder: Path) -> Report:
    """Read a run and ask all rules. `NotFound` when there is none."""
    return check_history(read_run(folder))


def check_history(history: History) -> Report:
    """Ask all rules."""
    verdicts = tuple(judge(one, history) for one in RULES)
    return Report(
        run=next((one.event.run for one in history.of(RunBegun)), ""),
        steps=history.steps,
        finished=history.finished,
        events=len(history.entries),
        files=len(history.files),
        faults=len(history.of(ChaosStruck)) or len(history.of(FaultFired)),
        deaths=len(history.of(PartDied)),
        findings=sum(len(one.findings) for one in verdicts),
        rules=verdicts,
    )


def lines(report: Report) -> Iterator[str]:
    """The report for people."""
    state = "finished" if report.finished else "not finished"
    yield (
        f"{report.run or 'a run without a name'}: {report.steps} steps, {state}; {report.events} "
        f"events in {report.files} logs; {report.faults} faults, {report.deaths} deaths"
    )
    yield ""
    rows = [("promise", "rule", "records", "")]
    for one in report.rules:
        name = f"{one.promise or '-'} {PROMISES[one.promise]}"
        rows.append((name, one.rule, str(one.checked), _said(one)))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        first, second, count = widths
        yield f"{row[0]:<{first}}  {row[1]:<{second}}  {row[2]:>{count}}  {row[3]}".rstrip()
    for one in report.rules:
        yield from _details(one)
    yield ""
    unchecked = sum(one.status == "not checked" for one in report.rules)
    good = sum(one.status == "ok" for one in report.rules)
    found = f"{report.findings} findings" if report.findings else "nothing wrong"
    yield f"{found}: {good} rules hold, {unchecked} not checked"


def _said(one: Verdict) -> str:
    match one.status:
        case "ok":
            return "ok"
        case "wrong":
            return f"{len(one.findings)} finding{'s' * (len(one.findings) > 1)}"
        case _:
            return f"not checked: {one.reason}"


def _details(one: Verdict) -> Iterator[str]:
    if one.findings:
        yield ""
        yield f"{one.rule}: {one.says}"
    for finding in one.findings[:_SHOWN]:
        step = f"step {finding.step}: " if finding.step is not None else ""
        key = f" [{finding.key}]" if finding.key else ""
        where = f"  ({', '.join(finding.where)})" if finding.where else ""
        yield f"  {step}{finding.says}{key}{where}"
    if len(one.findings) > _SHOWN:
        yield f"  and {len(one.findings) - _SHOWN} more: --json has them all"
    if one.notes:
        yield ""
        yield f"{one.rule}: explained"
        yield from (f"  {note}" for note in one.notes)
