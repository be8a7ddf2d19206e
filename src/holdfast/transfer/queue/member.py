"""One life of a producer or consumer: a lease, and a record that vanishes with it.

The record's key has the lease's number in it, so it never comes back once it is gone: a
claim of a member whose record is gone is nobody's. Everything that a member changes is
committed with the condition that its record is there.
"""

import os
import socket

from holdfast.errors import Conflict, LeaseLost, Retriable, UnknownOutcome
from holdfast.ledger import Compare, Get, Keeper, Runtime, absent, present
from holdfast.ledger.records import put
from holdfast.transfer.queue.records import Keys, Member

__all__ = ["Seat"]

ATTEMPTS = 20


class Seat:
    """One life. `join` begins it; it ends with `leave`, or when the lease is lost."""

    def __init__(self, runtime: Runtime, keys: Keys, name: str, lease_s: float) -> None:
        self._runtime = runtime
        self._keys = keys
        self._name = name
        self._keeper = Keeper(runtime, lease_s)
        self.key = ""
        self.id = ""

    def believes(self) -> bool:
        """Whether this life should still go on, by our own clock."""
        return self._keeper.believes()

    @property
    def alive(self) -> Compare:
        """The condition that this life goes on."""
        return present(self.key)

    async def join(self) -> None:
        """Begin. Raises when the ledger cannot be reached for a while."""
        await self._keeper.__aenter__()
        self.key = self._keys.member(self._name, self._keeper.id)
        self.id = self.key.rpartition("/")[2]
        record = Member(name=self._name, pid=os.getpid(), host=socket.gethostname())
        failure: Exception = Conflict(f"{self.key} is taken")
        try:
            for attempt in range(ATTEMPTS):
                try:
                    txn = await self._runtime.ledger.txn(
                        [absent(self.key)],
                        [put(self.key, record, lease=self._keeper.id)],
                        [Get(self.key)],
                    )
                except (Retriable, UnknownOutcome) as error:
                    failure = error
                else:
                    if txn.succeeded or txn.results[0] is not None:  # just now, or before
                        return
                if not self.believes():
                    raise LeaseLost(f"the lease of {self._name} ended before it had joined")
                await self._runtime.sleep(
                    min(1.0, 0.02 * 2**attempt) * (0.5 + self._runtime.random.random())
                )
            raise failure
        except BaseException:
            await self.leave()
            raise

    async def leave(self) -> None:
        """End. What it had claimed is free at once."""
        await self._keeper.__aexit__()
