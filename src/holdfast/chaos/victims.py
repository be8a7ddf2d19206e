"""Who is who in a run, found from outside: by what its processes have told in its folder."""

import re
from pathlib import Path

from holdfast.chaos.below import below
from holdfast.chaos.processes import Identity, identify
from holdfast.chaos.told import Log, Told
from holdfast.errors import Gone

__all__ = ["find"]

_RANK = re.compile(r"e([0-9]+)-c([0-9]+)-r([0-9]+)-([0-9]+)\.jsonl")


def find(folder: Path, target: str) -> Identity | None:
    """The process that is this now, or None while there is none."""
    if target.startswith("trainer.rank"):
        pid = _rank(folder, int(target.removeprefix("trainer.rank")))
    elif target == "trainer.agent":
        host = _part(folder, "host")
        agents = below(host, "holdfast launch") if host else []
        return agents[0] if agents else _one(_rank(folder, 0))
    elif target == "supervisor":
        pid = _newest(folder, "run.begun").pid
    else:
        pid = _part(folder, re.sub(r"([0-9]+)$", r"-\1", target))
    return _one(pid)


def _one(pid: int) -> Identity | None:
    try:
        return identify(pid) if pid > 1 else None
    except Gone:
        return None


def _rank(folder: Path, rank: int) -> int:
    """The newest incarnation's rank: its events are in a file that says so."""
    found = []
    for path in (folder / "trainers").glob("*/*/events/*.jsonl"):
        match = _RANK.fullmatch(path.name)
        if match is not None and int(match[3]) == rank:
            found.append((int(match[1]), int(match[2]), int(match[4])))
    return max(found, default=(0, 0, 0))[2]


def _part(folder: Path, name: str) -> int:
    return _newest(folder, "part.started", name).child


def _newest(folder: Path, kind: str, part: str = "") -> Told:
    found = Told(type="")
    for told in Log(folder / "events" / "supervisor.jsonl").new():
        if (told.type, told.part) == (kind, part):
            found = told
    return found
