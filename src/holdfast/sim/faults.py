"""The faults of a simulated world: what there is, what goes where, and a count of each.

A *step* is a contact between a process and the world: a process starts, a timer fires, a
call to the ledger is sent, its answer or a watch's event arrives, something is done to the
disk. Each step may carry one fault. A fault is data (who, at which of its steps, what, how
long), so a schedule can be replayed, and made shorter by leaving faults out.

Each seed draws its own mix ("swarm"): which kinds are on and how often they fire. Some
bugs only show when other faults keep out of the way. Besides, each seed has one pair of
fault and step that it insists on, all pairs in turn, so that rare steps are not left out.
A protocol without a disk has no steps there, and none of the disk's faults; the same goes
for a store of values, and for calls between processes.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set

import msgspec

__all__ = [
    "APPLIES",
    "CALLS",
    "DISK",
    "NET",
    "PAIRS",
    "STORE",
    "Fault",
    "Swarm",
    "Table",
    "describe",
    "pairs",
]

CALLS = ("get", "range", "txn", "grant", "keep_alive", "revoke")
SENT = tuple(f"{call}.sent" for call in CALLS)
ANSWERED = tuple(f"{call}.answered" for call in CALLS)
DISK = ("disk.read", "disk.write", "disk.name", "disk.sync")
STORE = ("store.sent", "store.answered")
NET = ("net.sent", "net.answered")
ANYWHERE = ("start", "timer", "watch.event", *SENT, *ANSWERED)
EVERYWHERE = (*ANYWHERE, *DISK, *STORE, *NET)

HOLDING = tuple(
    step for step in EVERYWHERE if step not in ("start", "grant.sent") and "revoke" not in step
)
"""Where a process can hold a lease."""

APPLIES: dict[str, tuple[str, ...]] = {
    "crash": EVERYWHERE,  # the process is gone; it may come back later
    "pause": EVERYWHERE,  # the process hangs, all of it, for longer than leases last
    # What befalls the ledger while a process is at the disk shows at its next call.
    "cut": ANYWHERE,  # the process cannot reach the ledger for a while
    "expire": HOLDING,  # the ledger ends the process's leases, which still believes in them
    "twin": EVERYWHERE,  # the process is started again although it still runs
    "outage": ANYWHERE,  # nobody reaches the ledger for a while
    "compact": ANYWHERE,  # the ledger forgets its history; watches that lag must read again
    "skew": ("start",),  # the process's clock is off and runs at another speed
    "lose_call": (*SENT, "store.sent", "net.sent"),  # the call never arrives
    "lose_answer": (*SENT, "store.sent", "net.sent"),  # the call takes effect, the answer is lost
    # it takes effect long after the caller has given up on it
    "late": (*SENT, "store.sent", "net.sent"),
    # it arrives twice
    "repeat": ("txn.sent", "keep_alive.sent", "revoke.sent", "store.sent", "net.sent"),
    "lag": ("watch.event",),  # the event arrives much later
    "full": ("disk.write",),  # the disk has no room for a while
    "power": ("timer", "txn.sent", "txn.answered", *DISK),  # everybody dies; see `files.py`
}

PAIRS = tuple((kind, step) for kind, steps in APPLIES.items() for step in steps)
"""Every fault at every step that it applies to."""


def pairs(
    *,
    disk: bool,
    store: bool = False,
    net: bool = False,
    never: Set[tuple[str, str]] = frozenset(),
) -> tuple[tuple[str, str], ...]:
    """The pairs of fault and step that can meet in a protocol: not all have a disk, or a store."""
    left_out = (*(() if disk else DISK), *(() if store else STORE), *(() if net else NET))
    return tuple(
        (kind, step)
        for kind, step in PAIRS
        if step not in left_out
        and (disk or kind not in ("full", "power"))
        and (kind, step) not in never
    )


PAUSES_S = (0.5, 3.0, 12.0, 70.0)
LATE_S = (6.0, 15.0, 45.0)
REPEATS_S = (0.0, 1.0, 12.0)


def _pause_s(luck: random.Random) -> float:
    return luck.choice(PAUSES_S) * luck.uniform(0.5, 1.5)


_AMOUNTS: dict[str, Callable[[random.Random], float]] = {
    "crash": lambda luck: -1.0 if luck.random() < 0.15 else luck.uniform(0.0, 20.0),
    "late": lambda luck: luck.choice(LATE_S),
    "repeat": lambda luck: luck.choice(REPEATS_S),
    **dict.fromkeys(("pause", "cut", "lag", "outage", "full"), _pause_s),
    "skew": lambda luck: luck.uniform(0.8, 1.25),
    "power": lambda luck: luck.uniform(1.0, 20.0),
}
"""How long a fault lasts, or how large it is; 0 where there is no such thing."""


class Fault(msgspec.Struct, frozen=True):
    """One fault: what happens to `node` at its `step`-th step."""

    node: str
    step: int
    kind: str
    amount: float


def describe(fault: Fault) -> str:
    """One fault in words."""
    what = {
        "crash": "is killed and stays dead"
        if fault.amount < 0
        else f"is killed and comes back after {fault.amount:.1f} s",
        "pause": f"hangs for {fault.amount:.1f} s",
        "cut": f"cannot reach the ledger for {fault.amount:.1f} s",
        "expire": "loses its leases, without being told",
        "twin": "is started a second time, while it still runs",
        "outage": f"sees, like everybody, the ledger go away for {fault.amount:.1f} s",
        "compact": "is there when the ledger forgets its history",
        "skew": f"has a clock that runs at {fault.amount:.2f} of the true speed",
        "lose_call": "sends a call that never arrives",
        "lose_answer": "does not get the answer to its call",
        "late": f"sends a call that arrives after {fault.amount:.1f} s, when nobody waits for it",
        "repeat": f"has its call delivered again after {fault.amount:.1f} s",
        "lag": f"gets this event {fault.amount:.1f} s late",
        "full": f"finds the disk full, for {fault.amount:.1f} s",
        "power": f"dies, like everybody, when the power goes for {fault.amount:.1f} s",
    }[fault.kind]
    return f"{fault.node} {what}"


class Swarm:
    """Decides, for one seed, which step carries which fault."""

    def __init__(
        self, seed: int, possible: Sequence[tuple[str, str]] = PAIRS, steps: int = 300
    ) -> None:
        self._random = random.Random(f"faults {seed}")
        self._rate = self._random.choice((0.005, 0.015, 0.03, 0.06))
        self._wanted, self._wanted_at = possible[seed % len(possible)]
        self._insist = [0.5, 0.5]
        if steps > 300:
            # Some long schedules have few faults, and one that is insisted on comes late.
            self._rate = self._random.choice((0.002, 0.01, 0.03, 0.06))
            self._insist = [self._random.choice((0.5, 0.05, 0.01)), 0.5, 0.5]
        kinds = dict.fromkeys(kind for kind, _ in possible)
        on = [kind for kind in kinds if self._random.random() < 0.6]
        self._at: dict[str, list[str]] = {step: [] for step in EVERYWHERE}
        for kind, step in possible:
            if kind in on:
                self._at[step].append(kind)

    def draw(self, node: str, step: int, kind: str) -> Fault | None:
        """The fault of this step, if it has one."""
        luck = self._random
        if kind == self._wanted_at and self._insist and luck.random() < self._insist[-1]:
            self._insist.pop()
            return self._make(node, step, self._wanted)
        rate = 0.3 if kind == "start" else self._rate
        if luck.random() >= rate:
            return None
        choices = self._at[kind]
        if not choices:
            return None
        return self._make(node, step, luck.choice(choices))

    def _make(self, node: str, step: int, fault: str) -> Fault:
        amount = _AMOUNTS[fault](self._random) if fault in _AMOUNTS else 0.0
        return Fault(node, step, fault, amount)


class Table:
    """How often each kind of fault fired at each kind of step, and how many steps there were."""

    def __init__(self, possible: Sequence[tuple[str, str]] = PAIRS) -> None:
        self.possible = possible
        self.steps: Counter[str] = Counter()
        self.fired: Counter[tuple[str, str]] = Counter()

    def add(self, other: "Table") -> None:
        """Take in the counts of another run."""
        self.steps.update(other.steps)
        self.fired.update(other.fired)

    def never_fired(self) -> list[tuple[str, str]]:
        """Pairs of fault and step that could have met and never did."""
        return [
            (fault, step)
            for fault, step in self.possible
            if self.steps[step] and not self.fired[fault, step]
        ]

    def rows(self) -> Iterable[tuple[str, ...]]:
        """The table as text cells, heading first; '-' where a fault does not apply."""
        kinds = list(dict.fromkeys(kind for kind, _ in self.possible))
        yield ("step", "count", *kinds)
        for step in EVERYWHERE:
            if self.steps[step]:
                cells = [
                    str(self.fired[kind, step]) if (kind, step) in self.possible else "-"
                    for kind in kinds
                ]
                yield (step, str(self.steps[step]), *cells)
