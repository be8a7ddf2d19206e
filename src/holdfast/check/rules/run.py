"""Promise 7: whatever is done again comes out the same.

Relied upon: a commit, what came of a step and what a version earned are written once each; every
life that tells of them tells what is written. metrics.jsonl is a view of the same records, written
anew by every orchestrator that begins and by the one that ends the run.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec

from holdfast.check.history import Entry, History, MetricsLine
from holdfast.check.rules.samples import commits
from holdfast.check.schema import (
    EvalDone,
    Record,
    RolloutLoaded,
    RolloutMade,
    RunEnded,
    StepCommitted,
    StepTrained,
)
from holdfast.check.verdict import Result, rule

__all__ = ["RULES"]

_STAMP = frozenset(Record.__struct_fields__)
_SHARED = ("version", "content", "loss", "grad_norm", "reward", "exact", "samples", "lag")


def _facts(event: Record, without: Sequence[str] = ()) -> dict[str, object]:
    """An event but for when and by whom it was told."""
    fields = msgspec.structs.asdict(event)
    return {name: fields[name] for name in fields if name not in _STAMP and name not in without}


def _differences(one: dict[str, object], other: dict[str, object]) -> str:
    names = [name for name in one if one[name] != other.get(name)]
    return ", ".join(names)


@rule("run.commits", 7, "a step is committed in the same words every time")
def committed(history: History, result: Result) -> None:
    """Compare all commits of a step with the first."""
    for other, one in history.beside_first(StepCommitted, lambda it: it.step):
        result.checked += 1
        if odd := _differences(_facts(other.event), _facts(one.event)):
            result.find(f"committed again with another {odd}", other, one, step=one.event.step)


@rule("run.trained", 7, "what came of a step is the same every time, and fits its commit")
def trained(history: History, result: Result) -> None:
    """Compare all that is told of a step."""
    told = commits(history)
    for other, one in history.beside_first(StepTrained, lambda it: it.step):
        result.checked += 1
        event, step = one.event, one.event.step
        odd = _differences(_facts(other.event, ["content"]), _facts(event, ["content"]))
        if odd:
            result.find(f"trained again with another {odd}", other, one, step=step)
        if event.version != step:
            result.find(f"made version {event.version}", one, step=step)
        if (commit := told.get(step)) is not None:
            fits = (len(commit.event.keys), step - 1 - commit.event.version)
            if (event.samples, event.lag) != fits:
                says = f"trained on {event.samples} samples with lag {event.lag}, committed {fits}"
                result.find(says, commit, one, step=step)


@rule("run.again", 7, "a group that is made again is the same")
def again(history: History, result: Result) -> None:
    """Compare groups that several replicas, or one several times, have made."""
    result.unchecked = "nothing was made twice by replicas that promise the same bits"
    first: dict[tuple[str, int, int], Entry[RolloutMade]] = {}
    for one in history.of(RolloutMade):
        event = one.event
        if not event.repeatable:
            continue  # the queue keeps what came first, and other rules look at that
        other = first.setdefault((event.purpose, event.step, event.group), one)
        if other is one:
            continue
        result.checked += 1
        # Which version it was made with is the business of other rules.
        without = ["replica", "version"]
        if odd := _differences(_facts(other.event, without), _facts(event, without)):
            says = f"group {event.group} was made again with another {odd}"
            result.find(says, other, one, step=event.step)


@rule("run.metrics", 7, "metrics.jsonl says what the events say")
def metrics(history: History, result: Result) -> None:
    """Compare the file's lines with events."""
    result.unchecked = "there is no metrics.jsonl"
    if history.metrics is None:
        return
    told = commits(history)
    steps = {one.event.step: one for one in history.of(StepTrained)}
    evals = {one.event.step: one for one in history.of(EvalDone)}
    lines: dict[int, list[MetricsLine]] = defaultdict(list)
    for line in history.metrics:
        step = line.fields.get("step")
        result.checked += 1
        if not isinstance(step, int):
            result.find("a line without a step", line)
        elif "eval_exact" in line.fields:
            if (done := evals.get(step)) is not None:
                said = (line.fields["eval_exact"], line.fields.get("eval_reward"))
                if said != (done.event.exact, done.event.reward):
                    result.find("another evaluation than in the events", line, done, step=step)
        else:
            lines[step].append(line)
            _compare(result, line, steps.get(step), told.get(step))
    if history.finished:
        for step in range(1, history.steps + 1):
            if len(lines[step]) != 1:
                result.find(f"{len(lines[step])} lines for it", *lines[step], step=step)


def _compare(
    result: Result,
    line: MetricsLine,
    trained: Entry[StepTrained] | None,
    commit: Entry[StepCommitted] | None,
) -> None:
    step = line.fields["step"]
    assert isinstance(step, int)
    if trained is not None:
        facts = _facts(trained.event)
        shared = {name: facts[name] for name in _SHARED}
        if odd := _differences(shared, line.fields):
            result.find(f"another {odd} than in the events", line, trained, step=step)
    if commit is not None and line.fields.get("dropped") != list(commit.event.dropped):
        result.find("other groups are dropped than in the events", line, commit, step=step)


@rule("run.end", 7, "a finished run ends with the content of its last step")
def end(history: History, result: Result) -> None:
    """Compare `run.ended` with what is known of the last version."""
    result.unchecked = "the run is not finished"
    known: dict[str, Entry[Any]] = {}
    told: list[Entry[Any]] = [*history.of(RolloutLoaded), *history.of(StepTrained)]
    for entry in told:
        if entry.event.version == history.steps:
            known.setdefault(entry.event.content, entry)
    for one in history.of(RunEnded):
        if one.event.how != "finished":
            continue
        result.checked += 1
        if one.event.steps != history.steps:
            says = f"ended after {one.event.steps} steps, and should after {history.steps}"
            result.find(says, one)
        if known and one.event.content not in known:
            says = f"ended with {one.event.content}, its last step with {', '.join(known)}"
            result.find(says, one, *known.values(), step=history.steps)


RULES = (committed, trained, again, metrics, end)
