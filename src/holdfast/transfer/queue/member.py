"""One life of a producer or consumer: a lease, and a record that vanishes with it.

The record's key has the lease's number in it, so it never comes back once it is gone: a
claim of a member whose record is gone is nobody's. Everything that a member changes is
committed with the condition that its record is there.
"""

import os
import socket

from holdfast.errors import LeaseLost
from holdfast.ledger import Compare, Keeper, Runtime, absent, present
from holdfast.ledger.records import put
from holdfast.retry import insist
from holdfast.transfer.queue.records import Keys, Member

__all__ = ["Seat"]


class Seat:
    """One life. `join` begins it; it ends with `leave`, or when the lease is lost."""

    def __init__(self, runtime: Runtime, keys: Keys, name: str, lease_s: float) -> None:
        self._runtime = runtime
        self._keys = keys
        self._name = name
        self._keeper = Keeper(runtime, lease_s)
        self._lease_s = lease_s
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
        begin = put(self.key, record, lease=self._keeper.id)

        async def once() -> None:
            await self._runtime.ledger.txn([absent(self.key)], [begin], [])  # or it is there

        try:
            until = self._runtime.now() + self._lease_s
            await insist(self._runtime, once, until=until, failed=self._check)
        except BaseException:
            await self.leave()
            raise

    def _check(self, _: Exception) -> None:
        if not self.believes():
            raise LeaseLost(f"the lease of {self._name} ended before it had joined")

    async def leave(self) -> None:
        """End. What it had claimed is free at once."""
        await self._keeper.__aexit__()
