"""Ledgers with faults, for tests of several files."""

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Literal

from holdfast.errors import Unavailable, UnknownOutcome
from holdfast.ledger import Compare, Op, Txn
from holdfast.ledger.memory import MemoryLedger
from holdfast.timeouts import DEFAULTS

Send = Callable[[], Coroutine[Any, Any, Txn]]
"""Carries a transaction out."""


class Played(MemoryLedger):
    """A ledger in which a test plays what becomes of a transaction; it can be away, too."""

    away = False

    async def play(self, keys: list[str], send: Send) -> Txn:
        """What happens to a transaction that writes these keys."""
        return await send()

    async def _txn(
        self, compare: Sequence[Compare], then: Sequence[Op], otherwise: Sequence[Op]
    ) -> Txn:
        if self.away:
            raise Unavailable("no way to the ledger")
        send = super()._txn
        return await self.play([op.key for op in then], lambda: send(compare, then, otherwise))

    async def _get(self, key: str) -> Any:
        if self.away:
            raise Unavailable("no way to the ledger")
        return await super()._get(key)

    async def _page(self, *args: Any) -> Any:
        if self.away:
            raise Unavailable("no way to the ledger")
        return await super()._page(*args)


class Lossy(Played):
    """Loses the next transaction that writes a key, and is away then.

    What is lost is the `answer`, or the `call`: that one may still arrive (`late`).
    """

    timeouts = DEFAULTS.model_copy(update={"update_deadline_s": 0.1})
    lose = ""

    def __init__(self, what: Literal["call", "answer"] = "call") -> None:
        super().__init__()
        self._what = what
        self.late: list[Send] = []

    async def play(self, keys: list[str], send: Send) -> Txn:
        if not self.lose or not any(self.lose in key for key in keys):
            return await send()
        if self._what == "answer":
            await send()
        else:
            self.late.append(send)
        self.lose, self.away = "", True
        raise UnknownOutcome("no answer")
