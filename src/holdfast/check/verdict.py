"""What a rule is, and what it says."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from holdfast.check.history import Entry, Flaw, History, MetricsLine

__all__ = ["PROMISES", "Finding", "Result", "Rule", "Verdict", "judge", "rule", "unseen"]

PROMISES = {
    1: "routes",
    2: "operations",
    3: "transfer",
    4: "queue",
    5: "membership",
    6: "weights",
    7: "run",
    0: "logs",
}
"""The promises by number; 0: what all the others rest on."""


class Finding(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something that should not be, and the records that show it."""

    says: str
    where: tuple[str, ...] = ()
    step: int | None = None
    key: str | None = None


@dataclass
class Result:
    """What came of a rule; a rule fills it in."""

    checked: int = 0
    """How many records were held against it."""
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What is not as it would be in a calm run, and is explained."""
    unchecked: str = "there is nothing to check"
    """Why, if nothing was checked."""

    def find(
        self,
        says: str,
        *where: Entry[Any] | Flaw | MetricsLine,
        step: int | None = None,
        key: str | None = None,
    ) -> None:
        """Say that something is wrong."""
        self.findings.append(Finding(says, tuple(one.place for one in where), step, key))


@dataclass(frozen=True)
class Rule:
    """One thing that must hold."""

    name: str
    promise: int
    says: str
    run: Callable[[History, Result], object]
    """Holds a run against it, and says so in the result."""


class Verdict(msgspec.Struct, frozen=True):
    """What a rule said of a run."""

    promise: int
    rule: str
    says: str
    status: str
    """ok, wrong, or not checked"""
    checked: int
    reason: str
    """Why it was not checked."""
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]


def rule(
    name: str, promise: int, says: str
) -> Callable[[Callable[[History, Result], object]], Rule]:
    """Make a function a rule."""
    return lambda function: Rule(name, promise, says, function)


def unseen(name: str, promise: int, says: str, reason: str) -> Rule:
    """A rule about something that event logs do not tell."""

    @rule(name, promise, says)
    def nothing(_: History, result: Result) -> None:
        result.unchecked = reason

    return nothing


def judge(one: Rule, history: History) -> Verdict:
    """Ask a rule. What checked nothing is never ok."""
    result = Result()
    one.run(history, result)
    status = "wrong" if result.findings else "ok" if result.checked else "not checked"
    return Verdict(
        promise=one.promise,
        rule=one.name,
        says=one.says,
        status=status,
        checked=result.checked,
        reason=result.unchecked if status == "not checked" else "",
        findings=tuple(result.findings),
        notes=tuple(result.notes),
    )
