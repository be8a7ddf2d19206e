"""Keeping a lease alive, and knowing by one's own clock when it may have ended.

A `Keeper` renews its lease about three times within its time to live (`lease_keepalive_s` of
the ledger's time-outs). It counts from the moment a renewal was *sent*, so it gives up no later
than the ledger does, as long as the clocks run at about the same rate. A process that hangs
does not notice in time all the same: a keeper makes things fast, comparing in the transaction
makes them safe.
"""

import asyncio
import contextlib
from typing import Self

from holdfast.errors import LeaseLost, Retriable, UnknownOutcome
from holdfast.ledger.runtime import Runtime
from holdfast.ledger.types import Lease

__all__ = ["Keeper"]


class Keeper:
    """One lease and the task that renews it. Use `async with`; leaving it ends the lease."""

    def __init__(self, runtime: Runtime, ttl_s: float | None = None) -> None:
        """`ttl_s` is how long the lease lives; without it, the ledger's `ledger_lease_s`."""
        times = runtime.ledger.timeouts
        self._runtime = runtime
        self._ttl_s = times.ledger_lease_s if ttl_s is None else ttl_s
        # Longer and shorter leases are renewed in proportion.
        self._share = times.lease_keepalive_s / times.ledger_lease_s
        self._valid_until = 0.0
        self._task: asyncio.Task[None] | None = None
        self.lease: Lease
        self.lost = asyncio.Event()

    @property
    def id(self) -> int:
        """The lease's number, for `Put(..., lease=keeper.id)`."""
        return self.lease.id

    @property
    def valid_until(self) -> float:
        """Until when the lease lives for certain, on our own clock."""
        return self._valid_until

    def believes(self) -> bool:
        """Whether the lease should still be alive, by our own clock."""
        return not self.lost.is_set() and self._runtime.now() < self._valid_until

    async def __aenter__(self) -> Self:
        sent = self._runtime.now()
        self.lease = await self._runtime.ledger.grant(self._ttl_s)
        self._valid_until = sent + self.lease.ttl_s
        self._task = self._runtime.spawn(self._renew(), name=f"lease {self.lease.id}")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        self.lost.set()
        # Ending it early only saves others the wait: it ends by itself if this fails.
        with contextlib.suppress(Retriable, UnknownOutcome):
            await self._runtime.ledger.revoke(self.lease.id)

    async def _renew(self) -> None:
        try:
            await self._keep()
        finally:  # whatever ended it, nobody renews the lease any more
            self.lost.set()

    async def _keep(self) -> None:
        pause_s = self.lease.ttl_s * self._share
        while self.believes():
            await self._runtime.sleep(min(pause_s, self._valid_until - self._runtime.now()))
            sent = self._runtime.now()
            try:
                # An answer that comes after the lease has ended says nothing any more.
                async with asyncio.timeout(max(0.0, self._valid_until - sent)):
                    ttl_s = await self._runtime.ledger.keep_alive(self.lease.id)
            except LeaseLost:
                return
            except (Retriable, UnknownOutcome, TimeoutError):
                pause_s = self.lease.ttl_s * self._share / 3
                continue
            self._valid_until = sent + ttl_s
            pause_s = ttl_s * self._share
