"""Processes below another one, by what their command says: targets that come back.

Whoever restarts things gives them new pids; "the trainer below this service" stays the same.
"""

import contextlib
import random
from collections.abc import Callable
from pathlib import Path

from holdfast.chaos.processes import Identity, identify, protected_pids, stat
from holdfast.errors import Gone

__all__ = ["below", "one_below"]

_MAX_BYTES = 4096


def below(pid: int, words: str) -> list[Identity]:
    """The processes below `pid` whose command line has these words, oldest first."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(Gone, OSError):  # it has ended since, or is hidden
            one = int(folder.name)
            children.setdefault(stat(one)[1], []).append(one)
    found: list[Identity] = []
    untouched = protected_pids()
    waiting = list(children.get(pid, ()))
    while waiting:
        one = waiting.pop()
        waiting += children.get(one, ())
        if one not in untouched and words in _command(one):
            with contextlib.suppress(Gone):
                found.append(identify(one))
    return sorted(found, key=lambda identity: identity.started_ticks)


def one_below(pid: int, seed: int) -> Callable[[str], Identity | None]:
    """Resolves words to one of the processes below `pid`, by luck when there are several."""
    luck = random.Random(f"{seed}/below")

    def resolve(words: str) -> Identity | None:
        found = below(pid, words)
        return luck.choice(found) if found else None

    return resolve


def _command(pid: int) -> str:
    try:
        with Path(f"/proc/{pid}/cmdline").open("rb") as file:
            return file.read(_MAX_BYTES).replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
