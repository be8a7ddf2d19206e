"""The `Ledger` on etcd: each call is one request (a range: one per page).

What etcd does differently from the other back ends, within the rules of `base.py`:
leases live for whole seconds and at least as long as the server's election needs (about
2 s), and the remaining time of a lease is told in whole seconds.
"""

import asyncio
import contextlib
import math
from collections.abc import Sequence
from typing import NoReturn, TypeVar, Unpack

from holdfast.errors import (
    Compacted,
    HoldfastError,
    LeaseLost,
    Mistake,
    NoRoom,
    Unavailable,
    UnknownOutcome,
)
from holdfast.ledger.base import Ledger, Watch
from holdfast.ledger.etcd import wire
from holdfast.ledger.etcd.http import Client, Login
from holdfast.ledger.etcd.trouble import Forbidden
from holdfast.ledger.etcd.watch import EtcdWatch
from holdfast.ledger.mvcc import lease_lost
from holdfast.ledger.types import (
    Compare,
    Delete,
    Entry,
    Get,
    Lease,
    LeaseInfo,
    Op,
    Page,
    Put,
    Txn,
    prefix_end,
    writes,
)
from holdfast.timeouts import DEFAULTS, Timeouts

__all__ = ["EtcdLedger"]

T = TypeVar("T")

_RANGE = "/v3/kv/range"
_TXN = "/v3/kv/txn"
_FIRST_PAGE_ENTRIES = 16
_PAGE_BYTES = 8 << 20


class EtcdLedger(Ledger):
    """A ledger on an etcd v3 cluster. `timeout_s` bounds every call (`ledger_call_s` if None).

    A leader that has just been chosen may not have heard of a new lease yet and call it lost. So
    a lost lease is asked for twice, `etcd_second_look_s` apart; one that ended never comes back.

    Closing it ends its watches: a waiting `__anext__` raises `Mistake`.
    """

    def __init__(
        self,
        endpoints: Sequence[tuple[str, int]],
        *,
        timeout_s: float | None = None,
        timeouts: Timeouts = DEFAULTS,
        **login: Unpack[Login],
    ) -> None:
        self.timeouts = timeouts
        limit_s = timeouts.ledger_call_s if timeout_s is None else timeout_s
        self._client = Client(endpoints, limit_s, **login)
        self._watches: set[EtcdWatch] = set()
        self._page_entries = _FIRST_PAGE_ENTRIES

    # ---- life ------------------------------------------------------------------

    async def start(self) -> None:
        """Make sure that a server answers and lets us in, within `timeout_s`."""
        if self._client.open:
            return
        self.timeouts.check()
        self._client.start()
        try:
            await self._client.call(_RANGE, wire.range_json(b"/"), wire.Answer, again=True)
        except Forbidden:
            pass  # the login is good; which keys this user may touch, the calls will tell
        except BaseException:
            await self._client.close()
            raise

    async def close(self) -> None:
        """End all watches and drop all connections."""
        for watch in tuple(self._watches):
            watch.end(Mistake("the ledger of this watch has been closed"))
        await self._client.close()

    # ---- reading ---------------------------------------------------------------

    async def _get(self, key: str) -> Entry | None:
        answer = await self._client.call(
            _RANGE, wire.range_json(key.encode()), wire.RangeAnswer, again=True
        )
        return wire.entry(answer.kvs[0]) if answer.kvs else None

    async def _page(self, prefix: str, after: str, limit: int, revision: int) -> Page:
        first = after.encode() + b"\0" if after else prefix.encode()
        end = prefix_end(prefix).encode()
        # A page of large values would take longer than a call may: begin small.
        limit = min(limit, self._page_entries if after else _FIRST_PAGE_ENTRIES)
        while True:
            request = wire.range_json(first, end, limit=limit, revision=revision)
            try:
                answer = await self._client.call(_RANGE, request, wire.RangeAnswer, again=True)
            except wire.Fault as fault:
                _raise_history(fault, revision)
            revision = revision or answer.header.revision
            size = sum(len(kv.value) for kv in answer.kvs) // max(1, len(answer.kvs))
            self._page_entries = max(1, _PAGE_BYTES // max(1, size))
            entries = tuple(one for kv in answer.kvs if (one := wire.entry(kv)) is not None)
            if entries or not answer.more:
                return Page(entries, revision, answer.more)
            # A whole page of keys that other programs wrote and that are not text.
            first = answer.kvs[-1].key + b"\0"

    # ---- writing ---------------------------------------------------------------

    async def _txn(
        self, compare: Sequence[Compare], then: Sequence[Op], otherwise: Sequence[Op]
    ) -> Txn:
        read_only = not writes(then) and not writes(otherwise)
        request = wire.txn_json(compare, then, otherwise)
        deadline = self._client.deadline()
        try:
            answer = await self._client.call(
                _TXN, request, wire.TxnAnswer, again=read_only, deadline=deadline
            )
        except wire.Fault as fault:
            if fault.verdict == "lease":
                raise LeaseLost(
                    "a lease that this transaction binds a key to has ended: take a new one "
                    "and look again before acting"
                ) from None
            raise Mistake(f"etcd refuses the transaction: {fault.message}") from None
        except NoRoom:
            await self._look_after_no_room(deadline, then, otherwise)
            raise
        return wire.txn_of(answer)

    async def _look_after_no_room(self, deadline: float, *branches: Sequence[Op]) -> None:
        """Raise `UnknownOutcome` if the refused transaction seems to have been applied.

        etcd refuses writes when its space is used up, but it may apply the one that crosses
        the limit *and* answer it with the same error, also if the branch that ran puts
        nothing. (Plain reads, not a transaction: a full server refuses even those that
        only read.)
        """
        for branch in branches:
            changes = [op for op in branch if not isinstance(op, Get)]
            if changes and await self._all_done(changes, deadline):
                raise UnknownOutcome(
                    "etcd's space ran out during this transaction: the change may or may not "
                    "have been made; look before trying again"
                ) from None

    async def _all_done(self, changes: Sequence[Put | Delete], deadline: float) -> bool:
        """Whether the ledger looks as after these, or could not be looked at in time."""
        for op in changes:
            request = wire.range_json(op.key.encode())
            try:
                answer = await self._client.call(
                    _RANGE, request, wire.RangeAnswer, again=True, deadline=deadline
                )
            except HoldfastError:
                return True
            wanted = (op.value,) if isinstance(op, Put) else ()
            if tuple(kv.value for kv in answer.kvs) != wanted:
                return False
        return True

    # ---- leases ----------------------------------------------------------------

    async def _grant(self, ttl_s: float) -> Lease:
        answer = await self._client.call(
            "/v3/lease/grant", {"TTL": str(math.ceil(ttl_s))}, wire.LeaseAnswer, again=False
        )
        return Lease(answer.id, float(answer.ttl))

    async def keep_alive(self, lease: int) -> float:
        """Let the lease begin again."""
        deadline = self._client.deadline()
        for look in range(2):
            if look:
                await asyncio.sleep(self.timeouts.etcd_second_look_s)
            frame = await self._ask_lease(
                "/v3/lease/keepalive", _lease_json(lease), wire.KeepAliveFrame, deadline=deadline
            )
            if frame is None:
                continue
            if frame.result is None:
                raise Unavailable(f"etcd does not say whether lease {lease} lives: ask again")
            if frame.result.ttl > 0:
                return float(frame.result.ttl)
        raise lease_lost(lease)

    async def _ask_lease(
        self,
        path: str,
        request: wire.Json,
        kind: type[T],
        *,
        reads: bool = False,
        deadline: float | None = None,
    ) -> T | None:
        """Send a harmless request about a lease; None when etcd knows no such lease."""
        try:
            return await self._client.call(
                path, request, kind, again=True, changes=not reads, fresh=reads, deadline=deadline
            )
        except wire.Fault as fault:
            if fault.verdict == "lease":
                return None
            raise Mistake(f"etcd refuses the request: {fault.message}") from None

    async def revoke(self, lease: int) -> None:
        """End a lease and delete its keys."""
        with contextlib.suppress(LeaseLost):
            await self._ask_lease("/v3/lease/revoke", _lease_json(lease), wire.Answer)

    async def lease_info(self, lease: int) -> LeaseInfo:
        """Tell how long a lease still lasts and what is bound to it."""
        request = {**_lease_json(lease), "keys": True}
        deadline = self._client.deadline()
        for look in range(2):
            if look:
                await asyncio.sleep(self.timeouts.etcd_second_look_s)
            answer = await self._ask_lease(
                "/v3/lease/timetolive", request, wire.LeaseAnswer, reads=True, deadline=deadline
            )
            if answer is not None and answer.granted > 0:
                keys = sorted(key.decode(errors="replace") for key in answer.keys)
                left_s = float(max(0, answer.ttl))
                return LeaseInfo(lease, float(answer.granted), left_s, tuple(keys))
        raise lease_lost(lease)

    async def leases(self) -> tuple[int, ...]:
        """All living leases."""
        answer = await self._client.call(
            "/v3/lease/leases", {}, wire.LeaseList, again=True, fresh=True
        )
        return tuple(sorted(one.id for one in answer.leases))

    # ---- following -------------------------------------------------------------

    def _watch(self, prefix: str, start: int) -> Watch:
        silence_s = self.timeouts.watch_silence_s
        watch = EtcdWatch(self._client, prefix, start, silence_s, self._watches.discard)
        self._watches.add(watch)
        return watch

    async def compact(self, revision: int) -> None:
        """Forget history before `revision`; what is forgotten already does no harm."""
        if revision < 1:
            return
        try:
            request: wire.Json = {"revision": str(min(revision, wire.INT64_MAX))}
            await self._client.call(
                "/v3/kv/compaction", request, wire.Answer, again=True, changes=True
            )
        except wire.Fault as fault:
            if fault.verdict != "compacted":
                _raise_history(fault, revision)


def _lease_json(lease: int) -> wire.Json:
    if not 0 < lease <= wire.INT64_MAX:
        raise lease_lost(lease)
    return {"ID": str(lease)}


def _raise_history(fault: wire.Fault, revision: int) -> NoReturn:
    if fault.verdict == "compacted":
        raise Compacted(
            f"revision {revision} is no longer kept: read the newest instead",
            revision=revision + 1,
        ) from None
    if fault.verdict == "future":
        raise Mistake(f"revision {revision} is in the future") from None
    raise Mistake(f"etcd refuses the request: {fault.message}") from None
