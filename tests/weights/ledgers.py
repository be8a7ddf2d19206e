"""Ledgers with faults, for tests of several files."""

from collections.abc import Sequence
from typing import Any

from holdfast.errors import Unavailable
from holdfast.ledger import Compare, Op, Txn
from holdfast.ledger.memory import MemoryLedger


class Flaky(MemoryLedger):
    """A ledger that can be away: for everything, or only for whoever reads it as a whole."""

    away = False
    blind = False

    async def _txn(
        self, compare: Sequence[Compare], then: Sequence[Op], otherwise: Sequence[Op]
    ) -> Txn:
        if self.away:
            raise Unavailable("no way to the ledger")
        return await super()._txn(compare, then, otherwise)

    async def _get(self, key: str) -> Any:
        if self.away:
            raise Unavailable("no way to the ledger")
        return await super()._get(key)

    async def _page(self, *args: Any) -> Any:
        if self.away or self.blind:
            raise Unavailable("no way to the ledger")
        return await super()._page(*args)
