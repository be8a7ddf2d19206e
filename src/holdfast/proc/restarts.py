"""When a process that has ended is started again, and when that makes no sense any more. Pure.

- The first death is answered at once, further ones after growing waits, until there is progress.
- A part is given up when it has ended by its own error, with the same last line of output,
  `failures` times without progress in between. Numbers in that line do not count: a time or a
  process id differs from life to life.
- Deaths by signal never count, nor does the exit code of what may succeed later (`PASSING`): a
  ledger that is away for an hour ends no service. Whoever kills a part again and again only
  makes it wait.
- What progress is, the owner says: the last step that was done, or that a life was long enough.
"""

import re
from dataclasses import dataclass
from typing import Any

from holdfast.errors import Retriable

__all__ = ["PASSING", "Death", "RestartPolicy", "Restarts"]

PASSING = Retriable.exit_code
"""What a program ends with that could not do its work for now."""
_VARYING = re.compile(r"0x[0-9a-fA-F]+|\d+")


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """`well_s`: a life of that length is progress. `failures` = 0: nothing is ever given up."""

    well_s: float
    first_s: float = 0.1
    most_s: float = 5.0
    failures: int = 5


@dataclass(frozen=True, slots=True)
class Death:
    """How a life ended: after how long, with which code (negative: a signal), and what it said."""

    lived_s: float
    code: int
    words: str = ""
    progress: Any = None
    """Whatever the owner counts; another value than at the last death is progress."""


class Restarts:
    """The deaths of one part."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._deaths = 0
        self._failures = 0
        self._line = ""
        self._progress: Any = None

    def died(self, death: Death) -> float | None:
        """How long to wait before it is started again; None: give it up."""
        policy = self._policy
        if death.lived_s >= policy.well_s or death.progress != self._progress:
            self._deaths = self._failures = 0
        self._progress = death.progress
        if death.code > 0 and death.code != PASSING:
            line = _last_line(death.words)
            self._failures = self._failures + 1 if line == self._line else 1
            self._line = line
            if self._failures == policy.failures:
                return None
        self._deaths += 1
        if self._deaths == 1:
            return 0.0
        return min(policy.most_s, policy.first_s * 2.0 ** min(self._deaths - 2, 64))


def _last_line(words: str) -> str:
    lines = words.strip().splitlines()
    return _VARYING.sub("#", lines[-1]) if lines else ""
