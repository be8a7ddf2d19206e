"""Promise 5: within a cycle ranks are distinct and world sizes agree; old cycles do not come back.

Read from what agents tell (`launch.*`), and from the names of trainers' logs: every rank of a
trainer writes `eEPOCH-cCYCLE-rRANK-PID.jsonl`, also one that has nothing to tell.
"""

import re
from itertools import pairwise
from pathlib import PurePath

from holdfast.check.history import Entry, Flaw, History, Life
from holdfast.check.schema import CrewStarted, TrainerSeated, WorkerStarted
from holdfast.check.verdict import Result, rule

__all__ = ["RULES"]

_NAME = re.compile(r"e(\d+)-c(\d+)-r(\d+)-(\d+)\.jsonl")


def _names(history: History) -> dict[str, tuple[str, int, int, int]]:
    """Job, epoch, cycle and rank of every log that has such a name."""
    found = {}
    for file in history.files:
        path = PurePath(file)
        if match := _NAME.fullmatch(path.name):
            epoch, cycle, rank, _ = map(int, match.groups())
            found[file] = (str(path.parent), epoch, cycle, rank)
    return found


@rule("membership.ranks", 5, "within a cycle every rank is one process, and world sizes agree")
def ranks(history: History, result: Result) -> None:
    """Compare all that take part in one cycle."""
    files: dict[tuple[str, int, int, int], str] = {}
    for file, who in _names(history).items():
        result.checked += 1
        if (other := files.setdefault(who, file)) != file:
            says = f"rank {who[3]} of cycle {who[2]}, epoch {who[1]}, is two processes"
            result.find(says, Flaw(other, ""), Flaw(file, ""))
    for twin, one in history.beside_first(WorkerStarted, lambda it: (it.run, it.cycle, it.rank)):
        result.checked += 1
        if twin.event.worker_pid != one.event.worker_pid:
            says = f"rank {one.event.rank} of cycle {one.event.cycle} was started twice"
            result.find(says, twin, one)
    nodes = history.first(CrewStarted, lambda it: (it.run, it.cycle, it.node_rank))
    for first, crew in history.beside_first(CrewStarted, lambda it: (it.run, it.cycle)):
        result.checked += 1
        old, said = first.event, crew.event
        if (old.world_size, old.node_count) != (said.world_size, said.node_count):
            says = f"cycle {said.cycle} has {old.world_size} ranks, and {said.world_size}"
            result.find(says, first, crew)
        same = nodes[said.run, said.cycle, said.node_rank]
        if same is not crew:
            result.find(f"two nodes are {said.node_rank} in cycle {said.cycle}", same, crew)


@rule("membership.cycles", 5, "cycles only grow: for every node, and for whoever acts")
def cycles(history: History, result: Result) -> None:
    """Follow every agent through its cycles, and the seat through those of its holders."""
    last: dict[tuple[Life, str], Entry[CrewStarted]] = {}
    for crew in history.of(CrewStarted):
        result.checked += 1
        before = last.get((crew.life, crew.event.run))
        if before is not None and crew.event.cycle <= before.event.cycle:
            says = f"cycle {crew.event.cycle} was started after cycle {before.event.cycle}"
            result.find(says, before, crew)
        last[crew.life, crew.event.run] = crew
    names = _names(history)
    seats = [one for one in history.of(TrainerSeated) if one.file in names]
    seats.sort(key=lambda one: (one.event.job, one.event.term))
    result.checked += len(seats)
    for old, new in pairwise(seats):
        was, now = names[old.file][1:3], names[new.file][1:3]
        # Which epoch follows on which is the business of another rule.
        if old.event.job == new.event.job and was[0] == now[0] and now < was:
            says = f"term {new.event.term} acts in cycle {now[1]}, after cycle {was[1]}"
            result.find(says, old, new)


RULES = (ranks, cycles)
