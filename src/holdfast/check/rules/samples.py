"""Promise 4: each sample is made, is in one step, and is consumed once.

Relied upon: a group is told (`rollout.made`, `rollout.spoilt`) before whoever asked hears of it;
a commit is told before anything of it is submitted. What a death may swallow:

- a group that is in the queue and was not told, if its replica died in between: one per death,
  and only if an orchestrator died as well; otherwise it would have asked somebody else;
- `step.trained` and `step.acknowledged` of the last step in a life of an orchestrator.
"""

from collections import Counter, defaultdict

from holdfast.check.history import SLACK_S, Entry, History, Life
from holdfast.check.schema import (
    GroupDropped,
    RolloutLoaded,
    RolloutMade,
    RolloutSpoilt,
    StepAcknowledged,
    StepCommitted,
    StepTrained,
    TrainerApplied,
)
from holdfast.check.verdict import Result, rule

__all__ = ["RULES", "commits"]


def commits(history: History) -> dict[int, Entry[StepCommitted]]:
    """The first commit of every step; that all of them are the same is a rule of its own."""
    return history.first(StepCommitted, lambda it: it.step)


def _made(history: History) -> dict[str, list[Entry[RolloutMade]]]:
    """Who made a sample for training."""
    found: dict[str, list[Entry[RolloutMade]]] = defaultdict(list)
    for one in history.of(RolloutMade):
        if one.event.purpose == "train":
            for key in one.event.keys:
                found[key].append(one)
    return found


@rule("samples.made", 4, "every sample of a commit was made, with the version that it says")
def made(history: History, result: Result) -> None:
    """Compare commits with what replicas have made."""
    known = _made(history)
    untold = _silent_deaths(history)
    for step, commit in commits(history).items():
        missing: dict[str, list[str]] = defaultdict(list)
        strange: dict[str, Entry[RolloutMade]] = {}
        for key in commit.event.keys:
            result.checked += 1
            if key not in known:
                missing[key.rpartition("-")[0]].append(key)
            for one in known.get(key, ()):
                if one.event.version != commit.event.version:
                    strange[one.place] = one
        for one in strange.values():
            result.find(
                f"group {one.event.group} was made with version {one.event.version}, and "
                f"committed with {commit.event.version}",
                one,
                commit,
                step=step,
                key=one.event.keys[0],
            )
        for keys in missing.values():
            if untold and commit.life.index > 1:
                untold -= 1
                result.notes.append(
                    f"step {step}: nobody told of having made {keys[0]}; a replica and an "
                    "orchestrator had died"
                )
            elif not history.lost(RolloutMade):
                what = f"{len(keys)} samples were committed and never made"
                result.find(what, commit, step=step, key=keys[0])


def _silent_deaths(history: History) -> int:
    lives = {one.life for kind in (RolloutLoaded, RolloutMade) for one in history.of(kind)}
    return sum(history.died(life) for life in lives)


@rule("samples.once", 4, "no sample is in two steps, or twice in one")
def once(history: History, result: Result) -> None:
    """Look for doubles."""
    seen: dict[str, Entry[StepCommitted]] = {}
    for step, commit in sorted(commits(history).items()):
        for key, times in Counter(commit.event.keys).items():
            result.checked += 1
            if times > 1:
                result.find(f"{times} times in one step", commit, step=step, key=key)
            if key in seen:
                first = seen[key]
                says = f"in step {first.event.step} and in step {step}"
                result.find(says, first, commit, step=step, key=key)
            seen.setdefault(key, commit)


@rule("samples.whole", 4, "groups are committed whole, or dropped for a reason")
def whole(history: History, result: Result) -> None:
    """Compare the groups of commits with those that were made, dropped and spoilt."""
    known, first = _made(history), commits(history)
    spoilt = {(one.event.step, one.event.group) for one in history.of(RolloutSpoilt)}
    gone = {(one.event.step, one.event.group): one for one in history.of(GroupDropped)}
    groups: dict[tuple[int, int], set[str]] = defaultdict(set)
    for key, makers in known.items():
        groups[makers[0].event.step, makers[0].event.group].add(key)
    for (step, group), keys in groups.items():
        commit = first.get(step)
        if commit is None:
            continue
        result.checked += 1
        there = keys & set(commit.event.keys)
        is_dropped = group in commit.event.dropped
        if there and (is_dropped or (step, group) in gone):
            says = f"group {group} was dropped, and {len(there)} of its samples are committed"
            result.find(says, commit, step=step, key=min(there))
        elif there != keys and not is_dropped:
            lost = min(keys - there)
            says = f"group {group}: {len(there)} of its {len(keys)} samples are committed"
            result.find(says, commit, known[lost][0], step=step, key=lost)
    if not history.lost(RolloutSpoilt):
        for step, commit in first.items():
            for group in commit.event.dropped:
                result.checked += 1
                if (step, group) not in spoilt:
                    result.find(f"group {group} was dropped for no reason", commit, step=step)


@rule("samples.acknowledged", 4, "exactly the committed samples are acknowledged, once trained")
def acknowledged(history: History, result: Result) -> None:
    """Look at every acknowledgement."""
    first = commits(history)
    trained = history.by(StepTrained, lambda it: it.step)
    own = {(one.life, one.event.step) for one in history.of(StepCommitted)}
    numbers = history.by(TrainerApplied, lambda it: it.number)
    applied = {number: min(one.event.at for one in all) for number, all in numbers.items()}
    for ack in history.of(StepAcknowledged):
        result.checked += 1
        step, commit = ack.event.step, first.get(ack.event.step)
        if commit is None or (commit.file == ack.file and commit.line > ack.line):
            if not history.lost(StepCommitted):
                result.find("acknowledged and not committed before", ack, step=step)
            continue
        if ack.event.keys != commit.event.keys:
            odd = sorted(set(ack.event.keys) ^ set(commit.event.keys))
            says = f"acknowledged {len(ack.event.keys)} samples, others than were committed"
            result.find(says, ack, commit, step=step, key=odd[0] if odd else None)
        if any(one.file == ack.file and one.line < ack.line for one in trained.get(step, ())):
            continue
        # A life that found the step done: its predecessor died before it could tell.
        publish = commit.event.numbers[-1:]
        began = applied.get(publish[0]) if publish else None
        is_heir = (ack.life, step) not in own and history.died(commit.life)
        if not is_heir or began is None or began > ack.event.at + SLACK_S:
            result.find("acknowledged before it was trained", ack, commit, step=step)


@rule("samples.complete", 4, "every step is committed, trained and acknowledged")
def complete(history: History, result: Result) -> None:
    """Look for steps that are missing, up to the last of a finished run, or the newest."""
    first = commits(history)
    if lost := history.lost(StepCommitted, StepTrained, StepAcknowledged):
        result.unchecked = f"{lost} events were lost"
        return
    upto = history.steps if history.finished else max(first, default=0) - 1
    trained = {one.event.step for one in history.of(StepTrained)}
    consumed = {one.event.step for one in history.of(StepAcknowledged)}
    last: dict[Life, int] = {}
    for commit in sorted(history.of(StepCommitted), key=lambda one: one.event.step):
        last[commit.life] = commit.event.step
    applied = {one.event.number for one in history.of(TrainerApplied)}
    for step in range(1, upto + 1):
        result.checked += 1
        if step not in first:
            result.find("never committed", step=step)
            continue
        ended = [life for life, at in last.items() if at == step and history.died(life)]
        done = set(first[step].event.numbers) <= applied
        if step not in trained:
            if ended and done:
                result.notes.append(f"step {step}: its orchestrator died before it told of it")
            else:
                result.find("committed and never trained", first[step], step=step)
        if step not in consumed:
            if ended:
                result.notes.append(f"step {step}: its orchestrator died while acknowledging")
            else:
                result.find("trained and never acknowledged", first[step], step=step)


RULES = (made, once, whole, acknowledged, complete)
