"""Which fault points a run was hit at, and which not. Pure.

A plan arms a point for one of its hits: `trainer.result.after 3` is the third.
"""

from collections.abc import Iterable
from typing import Any

__all__ = ["Points", "of_a_run"]

MAX_POINTS = 1000
_OF_PARTS = ("run.", "rollout.", "trainer.", "weights.")
_OF_A_LEDGER = "ledger.sqlite."
_OF_A_STORE = "shm."


class Points:
    """What the plans have armed, and what of it was hit."""

    def __init__(self) -> None:
        self._armed: dict[str, bool] = {}

    def arm(self, points: Iterable[str]) -> None:
        """A plan aims at these."""
        for point in points:
            if len(self._armed) < MAX_POINTS:
                self._armed.setdefault(point, False)

    def hit(self, point: str) -> None:
        """A process has come to a point, and the fault was made."""
        if point in self._armed:
            self._armed[point] = True

    def facts(self, known: Iterable[str] = ()) -> dict[str, Any]:
        """As data; `known` are all the points that there are."""
        aimed = {point.partition(" ")[0] for point in self._armed}
        return {
            "hit": sorted(point for point, hit in self._armed.items() if hit),
            "never_hit": sorted(point for point, hit in self._armed.items() if not hit),
            "not_aimed_at": sorted(set(known) - aimed),
        }


def of_a_run(points: Iterable[str], *, ledger: str, store: str) -> list[str]:
    """Those of the parts that take part in a run, with this ledger and this store."""
    families = list(_OF_PARTS)
    if ledger.startswith("sqlite:"):
        families.append(_OF_A_LEDGER)
    if store.startswith("shm:"):
        families.append(_OF_A_STORE)
    return [point for point in points if point.startswith(tuple(families))]
