"""Where a replica stands towards its fleet, and what it does next. Pure.

The replica (`replica.py`) looks at itself and asks here: what may be served, when its door must be
shut or may be opened, and what its loading does next. It carries that out, and looks again.
"""

import enum

import msgspec

from holdfast.contrib.fleets.plan import servable
from holdfast.weights.records import Target

__all__ = ["Standing", "Step", "goal"]


class Step(enum.Enum):
    """What loading does next."""

    DROP = "what is loaded aside is not wanted, or is no longer whole"
    FORGIVE = "a failure that was reported is not of what is wanted now: the next try is a new one"
    STAGE = "load what is wanted aside"
    SWITCH = "serve what is loaded aside"


def goal(target: Target) -> int | None:
    """The version that a replica is to have: what a round brings, or the newest allowed."""
    return target.staging if target.staging is not None else next(iter(target.allowed), None)


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica knows of itself at one moment."""

    acknowledged: int | None = None
    """What the ledger was told that it serves."""
    loaded: int | None = None
    """What its engine holds: nothing from the moment when that was lost."""
    aside: int | None = None
    """What is loaded aside."""
    whole: bool = True
    """Whether that can still be switched to: its pin holds, and the engine has not lost it."""
    failed: int | None = None
    """What it has reported that it cannot load."""
    open: bool = False
    """Whether callers are let in."""
    paused: bool = False
    """Whether the engine was told to answer nobody."""
    counts: bool = False
    """Whether the seat that the door was opened under is its own and should still count."""

    def serving(self, target: Target) -> int | None:
        """The version that may be served at this moment, or None."""
        if not (self.open and self.counts and self.acknowledged == self.loaded):
            return None
        return self.acknowledged if self._is_allowed(target) else None

    def must_shut(self, target: Target) -> bool:
        """Whether it serves, or could begin to serve, what the target forbids."""
        return self.acknowledged is not None and not self._is_allowed(target)

    def may_open(self, target: Target) -> bool:
        """Whether it is worth to read the target anew and let callers in."""
        return not self.open and self._is_allowed(target)

    def loading(self, target: Target) -> Step | None:
        """What loading does next; None: there is nothing to do until the fleet moves."""
        wanted = goal(target)
        if self.aside is not None and (self.aside != wanted or not self.whole):
            return Step.DROP
        if self.failed not in (None, wanted):
            return Step.FORGIVE
        if wanted is None or wanted == self.acknowledged == self.loaded:
            return None
        if self.aside is None:
            return Step.STAGE
        is_next = wanted in target.allowed[:1] and target.phase != "holding"
        return Step.SWITCH if is_next else None

    def _is_allowed(self, target: Target) -> bool:
        return self.acknowledged in servable(target)

    def validate(self) -> None:
        """Raise `AssertionError` if this is a place where no replica may ever stand."""
        assert not (self.open and self.paused), "callers are let in, and its engine is paused"
        if self.open and self.acknowledged is not None:
            holds = self.loaded in (None, self.acknowledged)
            assert holds, f"it serves {self.acknowledged}, and its engine holds {self.loaded}"
