"""The faults of a run, and what they cost. Pure.

**Seconds lost.** Steps end at some pace: the pace is the median time between two finished
steps in peace. The time between two finished steps beyond that pace, and not below 0, is what the
faults between them have cost, in equal shares. A fault before the first step or after the
last has no such number.

Several events tell of one fault: chaos strikes, a fault point fires, the supervisor sees a
child die, the host sees a trainer go. What has the same process id, or the same target
shortly before, is the same fault; what only follows from another (`consequence`) is no
fault of its own while one is open.
"""

import re
import statistics
from collections import deque

import msgspec

__all__ = ["Fault", "Faults"]

MAX_FAULTS = 1000
_SAME_S = 60.0
"""How far apart two reports of one fault can be: a matter of reading old logs, no setting."""
_PACES = 2000


class Fault(msgspec.Struct):
    """Something that went wrong, on purpose or not."""

    at: float
    action: str
    target: str
    pid: int = 0
    clause: str = ""
    step: int = 0
    point: str = ""
    member: str = ""
    by: str = ""
    """chaos, point, or '' if nobody meant it"""
    code: int | None = None
    length_s: float | None = None
    """How long a pause, a cut or a full disk was meant to last."""
    healed_s: float | None = None
    """How long until the next step was finished, as chaos saw it."""
    again_s: float | None = None
    """How long until its member lived again."""
    gap_s: float | None = None
    """The time between the two finished steps around it."""
    shares: int = 1

    @property
    def kind(self) -> str:
        """What was done to which sort of thing."""
        return f"{self.action} {_plain(self.target)}"


class Faults:
    """All of them (the last `MAX_FAULTS` are kept), and the pace of the steps."""

    def __init__(self) -> None:
        self.kept: deque[Fault] = deque(maxlen=MAX_FAULTS)
        self.total = 0
        self._open: list[Fault] = []  # since the last finished step
        self._calm: deque[float] = deque(maxlen=_PACES)
        self._rough: deque[float] = deque(maxlen=_PACES)
        self._last_step_at: float | None = None

    def add(self, fault: Fault) -> Fault:
        """A fault happened; returns it, or the one that it is."""
        same = self._same(fault)
        if same is not None:
            same.pid = same.pid or fault.pid
            same.point = same.point or fault.point
            same.member = same.member or fault.member
            same.step = max(same.step, fault.step)
            if fault.code is not None:
                same.code = fault.code
            if fault.by == "chaos":
                same.by, same.action, same.target = "chaos", fault.action, fault.target
                same.clause = fault.clause
            return same
        self.total += 1
        self.kept.append(fault)
        self._open.append(fault)
        del self._open[:-MAX_FAULTS]
        return fault

    def consequence(self, fault: Fault) -> None:
        """Something that mostly follows from another fault: one of its own if there is none."""
        if not self._open:
            self.add(fault)

    def heal(self, clause: str, target: str, seconds: float) -> None:
        """Chaos has seen that a fault is over."""
        for fault in self.kept:
            if fault.healed_s is None and fault.clause == clause and fault.target == target:
                fault.healed_s = seconds
                return

    def again(self, member: str, at: float) -> None:
        """A member lives again."""
        for fault in reversed(self.kept):
            if fault.member == member and fault.action in _ENDS and fault.again_s is None:
                fault.again_s = max(0.0, at - fault.at)
                return

    def stepped(self, at: float) -> None:
        """A step was finished."""
        if self._last_step_at is not None:
            gap = max(0.0, at - self._last_step_at)
            (self._rough if self._open else self._calm).append(gap)
            for fault in self._open:
                fault.gap_s, fault.shares = gap, len(self._open)
        self._open = []
        self._last_step_at = at

    def pace_s(self) -> float:
        """The median time between two finished steps without a fault between them.

        Where every step met one, the quickest of them was hurt least.
        """
        if self._calm:
            return statistics.median(self._calm)
        return min(self._rough, default=0.0)

    def lost_s(self, fault: Fault) -> float | None:
        """What a fault has cost; None if it cannot be said (yet)."""
        if fault.gap_s is None:
            return None
        return max(0.0, fault.gap_s - self.pace_s()) / fault.shares

    def by_kind(self) -> dict[str, list[Fault]]:
        """The faults of each kind."""
        kinds: dict[str, list[Fault]] = {}
        for fault in self.kept:
            kinds.setdefault(fault.kind, []).append(fault)
        return dict(sorted(kinds.items()))

    def _same(self, fault: Fault) -> Fault | None:
        for known in reversed(self.kept):
            if abs(fault.at - known.at) > _SAME_S:
                return None
            both_chaos = fault.by == known.by == "chaos"
            seen_dead = known.code is not None and fault.code is not None
            if both_chaos or seen_dead:
                continue  # each of these tells of a fault of its own
            if fault.pid and fault.pid == known.pid and _fit(known, fault):
                return known
            if not known.pid and known.member == fault.member != "" and _fit(known, fault):
                return known
        return None


_ENDS = ("kill", "died")


def _fit(one: Fault, other: Fault) -> bool:
    """Whether two reports can be of one thing: a pause is no death, though one may follow."""
    return (one.action in _ENDS) == (other.action in _ENDS)


def _plain(target: str) -> str:
    """A target without its number: replica-0 is a replica."""
    return re.sub(r"[-_. ]*\d+\b", "", target).strip() or target
