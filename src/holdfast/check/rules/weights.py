"""Promise 6: replicas serve what was published, and what they have loaded.

Relied upon: the operation that publishes version v is number 3v + 1, told as applied before its
result counts; the step that made the weights was told before that; a replica tells that it has a
version before it makes anything with it, in the same file. A version whose trainer died between
the ledger and its log may be loaded before anybody tells of it: so only the newest one may be
unexplained, and only while the run goes on. `weights.published` is not read: it does not say of
which channel, and checkpoints are versions too.
"""

from collections import Counter, defaultdict
from typing import Any

from holdfast.check.history import SLACK_S, Entry, History, Life
from holdfast.check.schema import (
    RolloutLoaded,
    RolloutMade,
    StepCommitted,
    StepTrained,
    TrainerApplied,
)
from holdfast.check.verdict import Result, rule, unseen

__all__ = ["RULES"]


@rule("weights.published", 6, "what a replica loads was trained and published")
def published(history: History, result: Result) -> None:
    """Compare loads with what trainers have applied."""
    if lost := history.lost(TrainerApplied):
        result.unchecked = f"{lost} events were lost"
        return
    applied = history.by(TrainerApplied, lambda it: it.number)
    first = {number: min(all, key=lambda one: one.event.at) for number, all in applied.items()}
    newest = max(first, default=-1)
    for load in history.of(RolloutLoaded):
        result.checked += 1
        version = load.event.version
        publish = first.get(3 * version + 1)
        if publish is not None and publish.event.kind == "publish_weights":
            made = first.get(3 * version)
            if made is not None and load.event.at + SLACK_S < made.event.at:
                says = f"version {version} was loaded before its step was trained"
                result.find(says, load, made, step=version)
        elif history.finished or newest > 3 * version + 1:
            says = f"version {version} was loaded and never published"
            result.find(says, load, step=version)


@rule("weights.content", 6, "a version has one content, whoever speaks of it")
def content(history: History, result: Result) -> None:
    """Compare the hashes of every version."""
    said: dict[int, dict[str, Entry[Any]]] = defaultdict(dict)
    told: list[Entry[Any]] = [*history.of(StepTrained), *history.of(RolloutLoaded)]
    for one in told:
        result.checked += 1
        said[one.event.version].setdefault(one.event.content, one)
    for version, seen in sorted(said.items()):
        if len(seen) > 1:
            says = f"version {version} has {len(seen)} contents: {', '.join(seen)}"
            result.find(says, *seen.values(), step=version)


@rule("weights.served", 6, "a replica makes groups only with a version that it has loaded")
def served(history: History, result: Result) -> None:
    """Follow every life of every replica."""
    if lost := history.lost(RolloutLoaded):
        result.unchecked = f"{lost} events were lost"
        return
    loaded: dict[tuple[Life, int], int] = {}
    for load in history.of(RolloutLoaded):
        loaded.setdefault((load.life, load.event.version), load.line)
    for made in history.of(RolloutMade):
        result.checked += 1
        at = loaded.get((made.life, made.event.version))
        if at is None or at > made.line:
            says = (
                f"{made.event.replica} made group {made.event.group} with version "
                f"{made.event.version}, which it had not loaded in this life"
            )
            key = made.event.keys[0] if made.event.keys else None
            result.find(says, made, step=made.event.step, key=key)


@rule("weights.version", 6, "which version makes a step's samples is a function of the step")
def version(history: History, result: Result) -> None:
    """Hold every commit against max(0, step - 1 - lag), with one lag, and evaluations."""
    all = history.of(StepCommitted)
    lags = Counter(one.event.step - 1 - one.event.version for one in all if one.event.version)
    # Nothing but the first version: no step was beyond the lag yet.
    lag = lags.most_common(1)[0][0] if lags else max((one.event.step for one in all), default=0)
    for one in all:
        result.checked += 1
        step, used, due = one.event.step, one.event.version, max(0, one.event.step - 1 - lag)
        if used != due:
            says = f"made with version {used}, and should be with {due} (lag {lag})"
            result.find(says, one, step=step)
    for made in history.of(RolloutMade):
        if made.event.purpose == "eval":
            result.checked += 1
            if made.event.version != made.event.step:
                says = f"evaluated with version {made.event.version}"
                result.find(says, made, step=made.event.step)


kept = unseen(
    "weights.kept",
    6,
    "no version is deleted while a replica may load it",
    "weights.swept does not say of which channel, so checkpoints and versions cannot be "
    "told apart",
)

RULES = (published, content, served, version, kept)
