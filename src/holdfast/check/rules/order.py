"""Promise 2, the order: within one term, every operation follows on the one before it.

A term begins behind a checkpoint, or with number 0. It passes over what has no effect on the
model and has a result (publications, saved weights), and over what failed or was skipped.

What a death may swallow: that a checkpoint was kept. A term may then begin behind an optimizer
step of an earlier term without `trainer.checkpointed`: once per term that has ended.
"""

from collections import defaultdict
from itertools import pairwise
from typing import Any

from holdfast.check.history import Entry, History
from holdfast.check.rules.operations import by_number, term_of
from holdfast.check.schema import (
    TrainerAnswered,
    TrainerApplied,
    TrainerCheckpointed,
    TrainerQuarantined,
    TrainerSkipped,
)
from holdfast.check.verdict import Result, rule

__all__ = ["RULES"]

_IDLE = ("publish_weights", "save_weights", "save_weights_for_sampler", "skip")
_UNORDERED = "sample"


class _Line:
    """What is known of one model's operations."""

    def __init__(self, history: History, name: str) -> None:
        self.name = name
        applied = by_number(history).items()
        self.applied = {number: entries for (line, number), entries in applied if line == name}
        terms = term_of(history)
        kept = history.by(TrainerCheckpointed, lambda it: it.line).get(name, [])
        self.kept = {(terms.get(one.life, 0), one.event.number) for one in kept}
        answers = history.by(TrainerAnswered, lambda it: it.line).get(name, [])
        self.answered = {one.event.number for one in answers}
        self.failed = {one.event.number for one in answers if one.event.failed}
        tombs: list[Entry[Any]]
        tombs = [*history.of(TrainerQuarantined), *history.of(TrainerSkipped)]
        self.failed |= {one.event.number for one in tombs if one.event.line == name}
        self.excused: set[int] = set()

    def passes(self, number: int, term: int) -> bool:
        """Whether a term may go on behind this number without applying it."""
        if number in self.failed:
            return True
        before = [one for one in self.applied.get(number, ()) if one.event.term < term]
        if not before:
            return False
        # An operation that failed, and whose answer nobody told, is passed over as well.
        return before[0].event.kind in _IDLE or number not in self.answered

    def begins(self, first: int, term: int, result: Result) -> bool:
        """Whether a term may begin with this number."""
        if first == 0:
            return True
        behind = first - 1
        while behind >= 0:
            if any(number == behind and kept < term for kept, number in self.kept):
                return True
            if not self.passes(behind, term):
                break
            behind -= 1
        for one in self.applied.get(behind, ()):
            old = one.event.term
            if old < term and one.event.kind == "optim_step" and old not in self.excused:
                self.excused.add(old)
                result.notes.append(
                    f"term {term} began behind {behind}: term {old} died before it told of its "
                    "checkpoint"
                )
                return True
        return False


@rule("operations.order", 2, "within a term, every operation follows on the one before it")
def order(history: History, result: Result) -> None:
    """Follow every term through every model."""
    if lost := history.lost(TrainerApplied):
        result.unchecked = f"{lost} events were lost"
        return
    terms: dict[tuple[str, int], list[Entry[TrainerApplied]]] = defaultdict(list)
    for one in history.of(TrainerApplied):
        if one.event.kind != _UNORDERED:
            terms[one.event.line, one.event.term].append(one)
    lines = {name: _Line(history, name) for name, _ in terms}
    for (name, term), entries in sorted(terms.items(), key=lambda item: item[0]):
        line = lines[name]
        result.checked += len(entries)
        first = entries[0]
        if not line.begins(first.event.number, term, result):
            says = f"term {term} begins with {first.event.number}, behind no checkpoint"
            result.find(says, first, key=f"{name}:{first.event.number}")
        for before, after in pairwise(entries):
            old, new = before.event.number, after.event.number
            missing = [one for one in range(old + 1, new) if not line.passes(one, term)]
            if new < old or missing:
                says = f"term {term} applied {new} after {old}"
                says += f", without {missing[0]}" if missing else ""
                result.find(says, before, after, key=f"{name}:{new}")


RULES = (order,)
