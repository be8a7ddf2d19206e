"""A ledger, and whatever stands between it and its users."""

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

Hook = Callable[[str, tuple[Any, ...]], Awaitable[None]]
"""It hears which call of the ledger it is, and what was given to it."""


class Through:
    """A ledger whose calls can be held up or fail, before they are made or after."""

    def __init__(self, real: Any, *, before: Hook | None = None, after: Hook | None = None):
        self._real, self._before, self._after = real, before, after

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        if not inspect.iscoroutinefunction(found):
            return found

        async def call(*given: Any, **more: Any) -> Any:
            if self._before is not None:
                await self._before(name, given)
            result = await found(*given, **more)
            if self._after is not None:
                await self._after(name, given)
            return result

        return call
