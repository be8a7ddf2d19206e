"""The gateway's brain: where a request goes, how long it waits, what its caller hears.

`Desk.serve` carries one request through. It asks the table (`answers.py`), follows the routes,
and lets `Forward`, the caller's own way of sending, do the rest. Invariants:

- no final answer without a reading of the ledger that began after the request came in;
- a request is sent again only when it cannot have taken effect: nobody was reached, or the
  fence refused it (421). What may have been received is reported as lost, and the *caller*
  decides; a poll, and whatever only reads, is sent again;
- nobody waits for an incarnation that was replaced;
- every wait has an end: `submit_wait_s`, `poll_hold_s`.
"""

from collections.abc import Awaitable, Callable
from typing import Literal

import msgspec

from holdfast import events
from holdfast.errors import Retriable
from holdfast.gateway import answers
from holdfast.gateway.answers import Answer, Confirm, Kind, Route, Wait
from holdfast.gateway.routes import Routes
from holdfast.jobs.store import Seen
from holdfast.ledger.runtime import Runtime
from holdfast.timeouts import DEFAULTS, Timeouts

__all__ = ["Abandon", "Desk", "Forward", "Resolved", "Sent", "lost"]


class Resolved(events.Event, frozen=True, tag="gateway.resolved"):
    """A route was wrong, and what was found instead."""

    labels = ("why",)

    job: str
    why: str
    """refused, misdirected, lost"""
    epoch: int
    kind: str


class Sent(msgspec.Struct, frozen=True):
    """What became of a request that was sent to a trainer.

    done: its answer went to the caller. refused: nobody was reached. misdirected: the fence
    refused it. lost: it may have been received, and no answer came; nothing went to the caller.
    """

    how: Literal["done", "refused", "misdirected", "lost"]
    reason: str = ""
    again: bool = True
    """Whether the request can be sent once more: its body is still there."""


Forward = Callable[[Route], Awaitable[Sent]]
Abandon = Callable[[str], None]


class Desk:
    """One gateway's."""

    def __init__(self, runtime: Runtime, routes: Routes, timeouts: Timeouts = DEFAULTS) -> None:
        self._runtime = runtime
        self._routes = routes
        self._timeouts = timeouts

    async def serve(
        self,
        account: str,
        job: str,
        kind: Kind,
        forward: Forward,
        present: Callable[[], bool] = lambda: True,
        *,
        harmless: bool = False,
        abandon: Abandon = lambda _: None,
    ) -> Answer | None:
        """Bring a request to its trainer; returns the answer, unless `forward` has given it.

        `present` says whether the caller still waits: nothing is waited for without him.
        A `harmless` request may be sent twice: it only reads. `abandon` makes `forward` give
        up an answer that has not begun: its trainer was replaced, and may never answer.
        """
        times = self._timeouts
        limit_s = times.poll_hold_s if kind == "poll" else times.submit_wait_s
        deadline = self._runtime.now() + limit_s
        seen, fresh = self._routes.find(account, job), False
        doubted: Route | None = None
        reason = "the ledger cannot be asked now"
        while True:
            verdict = answers.decide(seen, kind, fresh=fresh)
            if isinstance(verdict, Answer):
                return verdict
            if isinstance(verdict, Route) and verdict != doubted:
                sent = await self._forward(forward, verdict, abandon)
                if sent.how == "done":
                    return None
                self._tell(verdict, sent, kind)
                if sent.how == "lost" and kind == "submit" and not harmless:
                    return lost(sent.reason)
                if not sent.again:
                    return answers.late(kind, sent.reason, retry_after_ms=200)
                doubted, reason, fresh = verdict, sent.reason, False
            elif isinstance(verdict, Wait):
                reason = verdict.reason
            left_s = deadline - self._runtime.now()
            if left_s <= 0 or not present():
                return answers.late(kind, reason)
            seen, fresh, doubted = await self._look_again(
                account, job, verdict, doubted, waited=fresh, left_s=left_s
            )

    async def _forward(self, forward: Forward, route: Route, abandon: Abandon) -> Sent:
        """Send it, and wait for the answer only as long as the trainer is the job's own."""

        def look() -> None:
            seen = self._routes.find(route.account, route.job)
            if seen is not None and seen.job.epoch > route.epoch:
                abandon(f"the trainer was replaced (epoch {route.epoch})")

        with self._routes.listening(route.account, route.job, look):
            return await forward(route)

    async def _look_again(
        self,
        account: str,
        job: str,
        verdict: answers.Verdict,
        doubted: Route | None,
        *,
        waited: bool,
        left_s: float,
    ) -> tuple[Seen | None, bool, Route | None]:
        """Read the job, after a wait if it was read just now; a doubt lasts for one wait."""
        times = self._timeouts
        if waited and not isinstance(verdict, Confirm):
            # A watch may lag: the ledger is read again even if nothing is heard.
            await self._routes.changed(account, job, min(times.route_confirm_s, left_s))
            doubted = None
        try:
            seen = await self._routes.confirm(account, job, max(left_s, times.job_retry_s))
        except Retriable:
            await self._routes.changed(account, job, min(times.job_retry_s, left_s))
            return self._routes.find(account, job), False, doubted
        return seen, True, doubted

    def _tell(self, route: Route, sent: Sent, kind: Kind) -> None:
        name = f"{route.account}/{route.job}"
        events.emit(Resolved(job=name, why=sent.how, epoch=route.epoch, kind=kind))


def lost(reason: str) -> Answer:
    """The caller's own retry carries the same sequence number; ours would be a guess."""
    told = f"{reason}: the request may have been received; send it again with the same number"
    return answers.again(502, "trainer_lost", told, 200)
