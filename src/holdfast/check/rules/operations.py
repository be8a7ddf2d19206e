"""Promise 2: operations take effect exactly once and in order.

Relied upon: `trainer.applied` is told before a result is posted, so whatever has a result was told
as applied; results become durable in order; a new term reads all results before it does anything
(`again` says what it found). Terms come from the ledger: no clock is needed to order them.

Not a fault: an operation that a term had applied and not answered when it died, or when it was
stopped and replaced, is applied anew by the next one. Only what was answered counts.
"""

from collections import defaultdict
from itertools import pairwise

from holdfast.check.history import Entry, History, Life
from holdfast.check.rules.samples import commits
from holdfast.check.schema import (
    StepCommitted,
    TrainerAnswered,
    TrainerApplied,
    TrainerDiffers,
    TrainerSeated,
)
from holdfast.check.verdict import Result, rule

__all__ = ["RULES", "by_number", "term_of"]

Number = tuple[str, int]
KINDS = ("forward_backward", "optim_step", "publish_weights")
"""The operations of a step, at 3n - 1, 3n and 3n + 1."""


def by_number(history: History) -> dict[Number, list[Entry[TrainerApplied]]]:
    """Every application of an operation, by model line and number."""
    return history.by(TrainerApplied, lambda it: (it.line, it.number))


def term_of(history: History) -> dict[Life, int]:
    """The term of every life that took the seat."""
    return {one.life: one.event.term for one in history.of(TrainerSeated)}


def _answers(history: History) -> dict[Number, list[Entry[TrainerAnswered]]]:
    return history.by(TrainerAnswered, lambda it: (it.line, it.number))


@rule("operations.identity", 2, "a number stands for one operation, in replays too")
def identity(history: History, result: Result) -> None:
    """Compare the applications of one number."""
    for (line, number), entries in by_number(history).items():
        result.checked += len(entries)
        for before, after in pairwise(entries):
            old, new = before.event, after.event
            if (old.kind, old.identity) != (new.kind, new.identity):
                says = f"{number} was {old.kind} {old.identity}, then {new.kind} {new.identity}"
                result.find(says, before, after, key=f"{line}:{number}")


@rule("operations.result", 2, "a number has one result")
def answer(history: History, result: Result) -> None:
    """Compare the results of one number."""
    for (line, number), entries in _answers(history).items():
        result.checked += len(entries)
        for before, after in pairwise(entries):
            if (before.event.hash, before.event.failed) != (after.event.hash, after.event.failed):
                says = f"{number} was answered {before.event.hash}, then {after.event.hash}"
                result.find(says, before, after, key=f"{line}:{number}")


@rule("operations.once", 2, "what has a result is never applied as if it had none")
def once(history: History, result: Result) -> None:
    """Look for a second effect of one number."""
    terms, answers = term_of(history), _answers(history)
    for (line, number), entries in by_number(history).items():
        result.checked += len(entries)
        key, seen = f"{line}:{number}", dict[int, Entry[TrainerApplied]]()
        fresh = [one for one in entries if not one.event.again]
        for one in entries:
            if one.event.term in seen:
                says = f"{number} was applied twice in term {one.event.term}"
                result.find(says, seen[one.event.term], one, key=key)
            seen.setdefault(one.event.term, one)
            has_first = any(other.event.term < one.event.term for other in fresh)
            if one.event.again and not has_first and not history.lost(TrainerApplied):
                result.find(f"{number} was applied again, and never before", one, key=key)
        told: dict[int, Entry[TrainerAnswered]] = {}
        for reply in answers.get((line, number), ()):
            term = terms.get(reply.life, 0)
            if term in told:
                says = f"{number} was answered twice in term {term}"
                result.find(says, told[term], reply, key=key)
            told.setdefault(term, reply)
            for one in fresh:
                if one.event.term > term and one.event.at >= reply.event.at:
                    says = (
                        f"{number} was answered in term {term}, and applied anew in term "
                        f"{one.event.term}"
                    )
                    result.find(says, reply, one, key=key)


@rule("operations.fence", 2, "what a term has answered, every newer term knows")
def fence(history: History, result: Result) -> None:
    """Look for answers of a term that was replaced: those that its successor did not find.

    A term that was stopped may compute something after it was replaced, and tell so; that has no
    effect unless it is answered. An answer may also be told late; then the successor knows it.
    """
    terms = term_of(history)
    first: dict[tuple[str, int], list[Entry[TrainerApplied]]] = defaultdict(list)
    for one in history.of(TrainerApplied):
        if not one.event.again:
            first[one.event.line, one.event.term].append(one)
    lowest = {at: min(one.event.number for one in entries) for at, entries in first.items()}
    for reply in history.of(TrainerAnswered):
        result.checked += 1
        line, number, term = reply.event.line, reply.event.number, terms.get(reply.life, 0)
        for at, low in lowest.items():
            if at[0] != line or at[1] <= term or low > number:
                continue
            for one in first[at]:
                is_late = one.event.number < number or one.event.at < reply.event.at
                if one.event.number <= number and is_late:
                    says = (
                        f"term {term} answered {number}, but term {at[1]} found no result of "
                        f"{one.event.number}"
                    )
                    result.find(says, reply, one, key=f"{line}:{number}")
                    break
    _tell_idle(history, result)


def _tell_idle(history: History, result: Result) -> None:
    """Note what replaced terms computed for nothing."""
    terms, began = term_of(history), dict[int, float]()
    for reply in history.of(TrainerAnswered):
        term = terms.get(reply.life, 0)
        began[term] = min(began.get(term, reply.event.at), reply.event.at)
    idle = sum(
        any(term > one.event.term and at < one.event.at for term, at in began.items())
        for one in history.of(TrainerApplied)
    )
    if idle:
        result.notes.append(f"{idle} operations were computed by replaced terms, without effect")


@rule("operations.replay", 2, "what is carried out again gives the same result")
def replay(history: History, result: Result) -> None:
    """Look for replays that came out differently; the trainers compare them."""
    result.unchecked = "nothing was carried out again"
    result.checked = sum(one.event.again for one in history.of(TrainerApplied))
    for one in history.of(TrainerDiffers):
        says = f"{one.event.number} gave another result when it was carried out again"
        result.find(says, one, key=f"{one.event.line}:{one.event.number}")


@rule("operations.steps", 2, "each step is one forward_backward, one optim_step, one publish")
def steps(history: History, result: Result) -> None:
    """Compare the optimizer's steps with those of the run, by their numbers."""
    applied = by_number(history)
    lines = sorted({line for (line, _), all in applied.items() if all[0].event.kind == KINDS[1]})
    if len(lines) > 1:
        result.find(f"optimizer steps on {len(lines)} models: {', '.join(lines)}")
    planned: dict[int, str] = {}
    for step, commit in commits(history).items():
        result.checked += 1
        numbers = (3 * step - 1, 3 * step, 3 * step + 1)
        planned |= dict(zip(numbers, KINDS, strict=True))
        if commit.event.numbers != numbers:
            says = f"its operations are {commit.event.numbers}, and should be {numbers}"
            result.find(says, commit, step=step)
    done = 0
    for (line, number), entries in applied.items():
        kind, plan = entries[0].event.kind, planned.get(number)
        done += kind == KINDS[1]
        if kind in KINDS[:2] and plan is None and not history.lost(StepCommitted):
            says = f"{number} is a {kind} of no step that was committed"
            result.find(says, entries[0], key=f"{line}:{number}")
        elif plan is not None and kind != plan:
            says = f"{number} is a {kind}, and should be a {plan}"
            result.find(says, entries[0], step=(number + 1) // 3, key=f"{line}:{number}")
    if history.finished and done != history.steps and not history.lost(TrainerApplied):
        result.find(f"{done} optimizer steps in a run of {history.steps}")


RULES = (identity, answer, once, fence, replay, steps)
