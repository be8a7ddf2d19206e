"""What is done to a run, to whom and when: a small language, and storms by seed. Pure.

    trainer.rank1@step 7            kill it while step 7 is trained
    gateway@12s                     kill it 12 s after the run has begun
    replica0: pause 20s@step 9      stop it, and let it go on after 20 s
    gateway: cut 5s@step 9          cut the line between orchestrator and gateway for 5 s
    ledger: cut 5s@step 4           nobody can write to the ledger for 5 s
    store: corrupt@step 6           flip a bit of a sample that lies in the store
    disk: full 10s@step 8           no room on the run's file system (a small one) for 10 s
    orchestrator@run.step.committed         kill it at this fault point, the first time
    trainer.rank0@trainer.result.after 3    ... the third time

Clauses are separated by ';' or line ends; '#' begins a comment. Processes are killed unless
`pause` or `cut` is said. The first process that comes to a fault point is the one that dies; the
name before it is for people.
"""

import random
import re
from typing import Literal

import msgspec

from holdfast.errors import Mistake

__all__ = ["PROCESSES", "Clause", "parse", "storm"]

Action = Literal["kill", "pause", "cut", "corrupt", "full"]
_OF_PROCESS: tuple[Action, ...] = ("kill", "pause")
_OF_THING: dict[str, Action] = {"ledger": "cut", "store": "corrupt", "disk": "full"}
_ON_A_LINE = "gateway"
PROCESSES = (
    "supervisor",
    "orchestrator",
    "gateway",
    "host",
    "trainer.agent",
    "trainer.rank0",
    "trainer.rank1",
    "replica0",
    "replica1",
)
"""What a run of the usual size consists of."""
_TARGET = re.compile(
    r"supervisor|orchestrator|gateway|host|trainer\.agent|trainer\.rank[0-9]{1,2}|replica[0-9]{1,2}"
)
_CLAUSE = re.compile(
    r"(?P<target>[a-z0-9.]+)\s*(?::\s*(?P<action>[a-z]+)\s*(?P<length>[0-9.]+s)?)?\s*"
    r"(?:@\s*(?P<when>.+))?"
)
_STEP = re.compile(r"step\s+([0-9]{1,9})(?:\s*\+\s*([0-9.]+)s)?")
_TIME = re.compile(r"([0-9.]+)s")
_POINT = re.compile(r"([a-z][a-z0-9_]*(?:\.[a-z][a-z0-9_]*)+)(?:\s+([0-9]{1,9}))?")
MAX_CLAUSES = 1000
_MAX_S = 3600.0


class Clause(msgspec.Struct, frozen=True, kw_only=True):
    """One fault: `target`, what is done to it, and when: exactly one of the last three."""

    target: str
    action: Action = "kill"
    length_s: float = 0.0
    step: int = 0
    delay_s: float = 0.0
    """After the step was begun."""
    at_s: float = 0.0
    point: str = ""
    hit: int = 1

    @property
    def armed(self) -> str:
        """Its fault point and which hit of it, as it is written in a plan; '' if it has none."""
        return self.point + (f" {self.hit}" if self.hit > 1 else "")

    @property
    def cuts_line(self) -> bool:
        """Whether the network is cut, which has to lead past us then."""
        return self.action == "cut" and self.target == _ON_A_LINE

    def __str__(self) -> str:
        what = "" if self.action == "kill" else f": {self.action}"
        length = f" {self.length_s:g}s" if self.length_s else ""
        late = f" + {self.delay_s:g}s" if self.delay_s else ""
        when = f"step {self.step}{late}" if self.step else f"{self.at_s:g}s"
        return f"{self.target}{what}{length}@{self.armed or when}"


def parse(text: str) -> tuple[Clause, ...]:
    """Read a plan. Raises one `Mistake` that quotes the clause it does not understand."""
    lines = [line.partition("#")[0] for line in text.splitlines()]
    parts = [part.strip() for line in lines for part in line.split(";")]
    clauses = tuple(_clause(part) for part in parts if part)
    if len(clauses) > MAX_CLAUSES:
        raise Mistake(f"a plan has at most {MAX_CLAUSES} clauses, not {len(clauses)}")
    return clauses


def _clause(text: str) -> Clause:
    match = _CLAUSE.fullmatch(text)
    if match is None:
        raise Mistake(
            f"chaos clause {text[:200]!r} is not like 'trainer.rank1@step 7', 'gateway@12s' or "
            "'replica0: pause 20s@step 9'"
        )
    target, action = match["target"], match["action"]
    thing = _OF_THING.get(target)
    if thing is None and not _TARGET.fullmatch(target):
        known = ", ".join((*PROCESSES, *_OF_THING))
        raise Mistake(f"chaos clause {text[:200]!r}: nothing is called {target!r}: {known}")
    chosen = action or thing or "kill"
    can: tuple[Action, ...] = (thing,) if thing else _OF_PROCESS
    if target == _ON_A_LINE:
        can = (*can, "cut")
    if chosen not in can:
        what = " or ".join(can)
        raise Mistake(f"chaos clause {text[:200]!r}: what can be done to {target} is: {what}")
    length_s = _seconds(match["length"][:-1], text) if match["length"] else 0.0
    if (chosen in ("pause", "cut", "full")) != bool(length_s):
        raise Mistake(f"chaos clause {text[:200]!r}: 'pause', 'cut' and 'full' last some seconds")
    when = (match["when"] or "").strip()
    base = Clause(target=target, action=chosen, length_s=length_s)
    if step := _STEP.fullmatch(when):
        late = _seconds(step[2], text) if step[2] else 0.0
        return msgspec.structs.replace(base, step=int(step[1]), delay_s=late)
    if at := _TIME.fullmatch(when):
        return msgspec.structs.replace(base, at_s=_seconds(at[1], text))
    point = _POINT.fullmatch(when)
    if point is not None and chosen == "kill":
        return msgspec.structs.replace(base, point=point[1], hit=int(point[2] or 1))
    raise Mistake(
        f"chaos clause {text[:200]!r}: say when: '@step 7', '@12s', or for a kill the name of a "
        "fault point (`holdfast faults` lists them)"
    )


def _seconds(text: str, clause: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 < found <= _MAX_S:
        raise Mistake(f"chaos clause {clause[:200]!r}: {text!r} is not 0 to {_MAX_S:g} seconds")
    return found


POINTS = (
    ("orchestrator", "run.step.committed"),
    ("orchestrator", "run.step.submitted"),
    ("orchestrator", "run.step.done"),
    ("replica0", "rollout.make.after"),
    ("replica0", "rollout.make.put"),
    ("replica0", "rollout.load.after"),
    ("trainer.rank0", "trainer.compute.after"),
    ("trainer.rank0", "trainer.result.after"),
    ("trainer.rank0", "trainer.checkpoint.kept"),
    ("trainer.rank0", "weights.publish.marked"),
)
"""Moments in the middle of work, for storms."""


def storm(seed: int, steps: int, *, faults: int = 20) -> tuple[Clause, ...]:
    """So many faults by seed, and some fault points on top, which a short life may not come to.

    Every target dies once at least, and the line is cut.
    """
    if steps < 4:
        raise Mistake(f"a storm needs a run of 4 steps at least, not {steps}")
    dice = random.Random(f"{seed}/storm")
    aimed = [
        Clause(target=who, point=point, hit=dice.randint(2, 4))
        for who, point in dice.sample(POINTS, min(len(POINTS), max(1, faults // 4)))
    ]
    clauses = [Clause(target=_ON_A_LINE, action="cut", step=dice.randint(2, steps - 1))]
    wanted = [(who, True) for who in PROCESSES]  # these die, whatever else is done to them
    while len(clauses) + len(wanted) < faults:
        wanted.append((dice.choice(PROCESSES), False))
    dice.shuffle(wanted)
    for place, (who, dies) in enumerate(wanted):
        step = 2 + place * (steps - 3) // max(1, len(wanted) - 1)
        pause = who.startswith(("replica", "trainer.rank")) and not dies
        clauses.append(
            Clause(
                target=who,
                action="pause" if pause and dice.random() < 0.3 else "kill",
                step=step,
                delay_s=round(dice.uniform(0.0, 0.6), 2),
            )
        )
    return tuple(
        msgspec.structs.replace(one, length_s=round(dice.uniform(1.0, 4.0), 1))
        if one.action in ("pause", "cut")
        else one
        for one in (*aimed, *clauses)
    )
