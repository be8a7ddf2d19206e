"""Promise 3: nothing in the logs tells of single values, so nothing is claimed here."""

from holdfast.check.history import History
from holdfast.check.verdict import Result, rule

__all__ = ["RULES"]


@rule("transfer.values", 3, "a get returns exactly what was put")
def values(_: History) -> Result:
    """Say why this cannot be seen here."""
    return Result(
        unchecked="no event tells of single values; a wrong one would show in run.trained"
    )


RULES = (values,)
