"""The rules, by promise."""

from holdfast.check.rules import logs, membership, operations, order, routes, run, samples, weights
from holdfast.check.verdict import Rule, unseen

__all__ = ["RULES"]

_TRANSFER = unseen(
    "transfer.values",
    3,
    "a get returns exactly what was put",
    "no event tells of single values; a wrong one would show in run.trained",
)

RULES: tuple[Rule, ...] = (
    *routes.RULES,
    *operations.RULES,
    *order.RULES,
    _TRANSFER,
    *samples.RULES,
    *membership.RULES,
    *weights.RULES,
    *run.RULES,
    *logs.RULES,
)
"""In the order in which they are shown."""
