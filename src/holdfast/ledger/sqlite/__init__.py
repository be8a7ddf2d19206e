"""`sqlite:///path`: the embedded ledger. One machine, many processes, no daemon."""

from holdfast.ledger.sqlite.backend import SqliteLedger

__all__ = ["SqliteLedger"]
