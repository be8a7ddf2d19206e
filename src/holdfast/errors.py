"""Every error that Holdfast raises, as one tree.

    HoldfastError
    ├── Retriable           the same call may succeed later; it took no effect
    │   ├── Unavailable     the other side was not reached, or refused for now
    │   ├── Conflict        somebody else kept changing the record
    │   ├── NoRoom          a disk or a budget is full
    │   └── TimedOut        the deadline passed before the call took effect
    ├── UnknownOutcome      the call may or may not have taken effect: look before trying again
    ├── Gone                it was there and will not come back
    │   ├── LeaseLost       the lease has ended; take a new one
    │   └── Compacted       this part of the history is no longer kept; read again
    ├── Fenced              somebody newer has taken over; stop
    ├── Corrupt             the bytes are not the bytes that were written
    │   └── NotALedger      the file is something else
    ├── Mistake             the caller must change the call
    │   ├── TooLarge        beyond a documented limit
    │   ├── NotFound        it has never been there
    │   ├── Exists          it is there already, or was; the name is not free
    │   ├── Denied          credentials or file permissions do not allow it
    │   ├── TooNew          written by a newer Holdfast than this one
    │   └── MissingPackage  an optional package or program is not installed
    └── BatchFailed         some keys of a batch failed; carries one reason per key

A class says what the caller may do; the message says what happened and what to do
next. `UnknownOutcome` is deliberately not retriable: sending the call again without
looking may do the thing twice.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

__all__ = [
    "BatchFailed",
    "Compacted",
    "Conflict",
    "Corrupt",
    "Denied",
    "Exists",
    "Fenced",
    "Gone",
    "HoldfastError",
    "LeaseLost",
    "MissingPackage",
    "Mistake",
    "NoRoom",
    "NotALedger",
    "NotFound",
    "Retriable",
    "TimedOut",
    "TooLarge",
    "TooNew",
    "Unavailable",
    "UnknownOutcome",
]


class HoldfastError(Exception):
    """Root of the tree. `exit_code` is what the CLI ends with."""

    exit_code: ClassVar[int] = 1

    retry_after_s: float = 0.0
    """How long the other side asks us to wait before the next try, if it said so."""

    def __init__(
        self,
        message: str,
        *,
        key: str | None = None,
        version: int | None = None,
        epoch: int | None = None,
        attempt: int | None = None,
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.key = key
        self.version = version
        self.epoch = epoch
        self.attempt = attempt

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors cross processes whole, whatever their constructors want."""
        return _remake, (type(self), self.args, self.__dict__)


def _remake(kind: type[HoldfastError], args: tuple[Any, ...], state: dict[str, Any]) -> Any:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class Retriable(HoldfastError):
    """The same call may succeed later. It took no effect."""

    exit_code = 3


class Unavailable(Retriable):
    """The other side was not reached, or it refused for now."""


class Conflict(Retriable):
    """Somebody else kept changing the record between reading and writing it."""


class NoRoom(Retriable):
    """A disk or a budget is full. Nothing that was there is damaged."""


class TimedOut(Retriable):
    """The deadline passed before the call took effect."""


class UnknownOutcome(HoldfastError):
    """The call may or may not have taken effect: look before trying again."""

    exit_code = 7


class Gone(HoldfastError):
    """It was there and will not come back."""

    exit_code = 4


class LeaseLost(Gone):
    """The lease has ended. A lease that ended is never revived: take a new one."""


class Compacted(Gone):
    """History before `revision` is no longer kept: read the range again."""

    def __init__(self, message: str, *, revision: int) -> None:
        super().__init__(message)
        self.revision = revision


class Fenced(HoldfastError):
    """Somebody newer has taken over. Whoever gets this must stop."""

    exit_code = 5


class Corrupt(HoldfastError):
    """The bytes are not the bytes that were written."""

    exit_code = 6


class NotALedger(Corrupt):
    """The file is there, but it is not a Holdfast ledger."""


class Mistake(HoldfastError):
    """The caller must change the call."""

    exit_code = 2


class TooLarge(Mistake):
    """Beyond a documented limit."""


class NotFound(Mistake):
    """It has never been there, as far as the authority knows."""

    exit_code = 4


class Exists(Mistake):
    """It is there already, or has been: the name is not free."""


class Denied(Mistake):
    """Credentials or file permissions do not allow it."""


class TooNew(Mistake):
    """Written by a newer Holdfast than this one."""


class MissingPackage(Mistake):
    """An optional package or program is not installed; the message names it."""


class BatchFailed(HoldfastError):
    """Some keys of a batch failed: `failures` has the reasons, `values` what the others gave."""

    exit_code = 3

    def __init__(
        self,
        message: str,
        *,
        failures: Mapping[str, Exception],
        values: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.failures = dict(failures)
        self.values = dict(values or {})
