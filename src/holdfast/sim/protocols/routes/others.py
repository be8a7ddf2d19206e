"""Gateways as others build them: they believe a table of routes that is late.

Production has neither. A sound client must live with both, so the simulation has them, and a
test program starts real gateways of this kind.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from holdfast.gateway import answers
from holdfast.gateway.answers import Answer, Kind, Route
from holdfast.gateway.desk import Desk, Forward, lost
from holdfast.gateway.routes import Routes
from holdfast.jobs.store import Jobs
from holdfast.ledger.follow import follow

__all__ = ["LateRoutes", "NaiveDesk"]

_BARE = Answer(404, b'{"detail":"Not Found"}')
"""A 404 that says nothing: gone, not yet there, or a stale table."""


class LateRoutes(Routes):
    """Hears of every change `lag()` seconds after it could have."""

    def __init__(self, jobs: Jobs, lag: Callable[[], float]) -> None:
        super().__init__(jobs)
        self._lag = lag

    async def run(self) -> None:
        """Follow the jobs, for ever, and late."""
        async with contextlib.aclosing(follow(self._jobs.runtime, self._jobs.keys.root)) as steps:
            async for step in steps:
                if delay_s := self._lag():
                    await asyncio.sleep(delay_s)
                self._changed(self._view.apply(step))


class NaiveDesk(Desk):
    """Believes the table, and waits for nothing."""

    async def serve(
        self, account: str, job: str, kind: Kind, forward: Forward, *_: Any, **__: Any
    ) -> Answer | None:
        """Bring a request to where the table says, or say "not found", whatever else is known."""
        verdict = answers.decide(self._routes.find(account, job), kind, fresh=True)
        if not isinstance(verdict, Route):
            return _BARE
        sent = await forward(verdict)
        if sent.how == "done":
            return None
        return _BARE if sent.how == "misdirected" else lost(sent.reason)
