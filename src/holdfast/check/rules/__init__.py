"""The rules, by promise."""

from holdfast.check.rules import (
    logs,
    membership,
    operations,
    order,
    routes,
    run,
    samples,
    transfer,
    weights,
)
from holdfast.check.verdict import Rule

__all__ = ["RULES"]

RULES: tuple[Rule, ...] = (
    *routes.RULES,
    *operations.RULES,
    *order.RULES,
    *transfer.RULES,
    *samples.RULES,
    *membership.RULES,
    *weights.RULES,
    *run.RULES,
    *logs.RULES,
)
"""In the order in which they are shown."""
