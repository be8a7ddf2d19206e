"""The ledger as a plain state machine: what `memory:` and the simulator run.

Pure: time comes in as an argument, nothing is awaited, the same calls give the same
state. Entries, history and leases obey the rules of `base.py`; the history is bounded
by `history_max` revisions (older ones are compacted by themselves).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from sortedcontainers import SortedDict

from holdfast.errors import Compacted, LeaseLost, Mistake
from holdfast.ledger.types import (
    Batch,
    Compare,
    Delete,
    Entry,
    Event,
    LeaseInfo,
    Op,
    Page,
    Put,
    Txn,
    holds,
    written,
)

HISTORY_MAX = 10_000


@dataclass(slots=True)
class _Lease:
    ttl_s: float
    deadline: float
    keys: set[str] = field(default_factory=set)


class Store:
    """Entries, history and leases. Every change returns through `take_changes`."""

    def __init__(self, *, history_max: int = HISTORY_MAX) -> None:
        self.revision = 1
        self.compacted = 0
        self._entries: SortedDict[str, Entry] = SortedDict()
        self._history: deque[Batch] = deque()
        self._history_max = history_max
        self._leases: dict[int, _Lease] = {}
        self._last_lease = 0

    # ---- reading -------------------------------------------------------------

    def get(self, key: str) -> Entry | None:
        """Return the entry as it is now."""
        entry: Entry | None = self._entries.get(key)
        return entry

    def page(self, prefix: str, after: str, limit: int, revision: int) -> Page:
        """Read up to `limit` entries behind `after`, as they were at `revision`."""
        if revision > self.revision:
            raise Mistake(f"revision {revision} is in the future: the newest is {self.revision}")
        if revision and revision < self.compacted:
            raise compacted_error(revision, self.compacted)
        at = revision or self.revision
        then = self._undo(at)
        found: list[Entry] = []
        start = max(prefix, after)
        keys = self._entries.irange(start, inclusive=(start != after, True))
        if then:
            keys = iter(sorted({*keys, *(key for key in then if key >= start and key != after)}))
        for key in keys:
            if not key.startswith(prefix):
                break
            entry = then[key] if key in then else self._entries[key]
            if entry is None:
                continue
            if len(found) == limit:
                return Page(tuple(found), at, more=True)
            found.append(entry)
        return Page(tuple(found), at, more=False)

    def _undo(self, revision: int) -> dict[str, Entry | None]:
        """What the keys that changed after `revision` were at `revision`."""
        then: dict[str, Entry | None] = {}
        for batch in reversed(self._history):
            if batch.revision <= revision:
                break
            for event in batch.events:
                then[event.key] = event.previous
        return then

    def changes(self, prefix: str, start: int) -> list[Batch]:
        """Everything below `prefix` that changed at revision `start` or later."""
        if start <= self.compacted:
            raise compacted_error(start, self.compacted)
        found: list[Batch] = []
        for batch in reversed(self._history):
            if batch.revision < start:
                break
            events = tuple(event for event in batch.events if event.key.startswith(prefix))
            if events:
                found.append(Batch(batch.revision, events))
        found.reverse()
        return found

    # ---- writing -------------------------------------------------------------

    def txn(self, compare: Sequence[Compare], then: Sequence[Op], otherwise: Sequence[Op]) -> Txn:
        """Carry out a transaction that `check_txn` has accepted."""
        succeeded = all(holds(one, self._entries.get(one.key)) for one in compare)
        ops = then if succeeded else otherwise
        for op in ops:
            if isinstance(op, Put) and op.lease and op.lease not in self._leases:
                raise lease_lost(op.lease)
        results: list[Entry | None] = []
        events: list[Event] = []
        revision = self.revision + 1
        for op in ops:
            previous: Entry | None = self._entries.get(op.key)
            if isinstance(op, Put):
                results.append(None)
                events.append(self._put(op, previous, revision))
            else:
                results.append(previous)
                if isinstance(op, Delete) and previous is not None:
                    events.append(self._delete(previous))
        self._record(events)
        return Txn(succeeded, self.revision, tuple(results))

    def _put(self, op: Put, previous: Entry | None, revision: int) -> Event:
        entry = written(op, previous, revision)
        self._unbind(previous)
        if op.lease:
            self._leases[op.lease].keys.add(op.key)
        self._entries[op.key] = entry
        return Event(op.key, entry, previous)

    def _delete(self, previous: Entry) -> Event:
        self._unbind(previous)
        del self._entries[previous.key]
        return Event(previous.key, None, previous)

    def _unbind(self, entry: Entry | None) -> None:
        if entry is not None and entry.lease in self._leases:
            self._leases[entry.lease].keys.discard(entry.key)

    def _record(self, events: list[Event]) -> None:
        if not events:
            return
        self.revision += 1
        self._history.append(Batch(self.revision, tuple(events)))
        if len(self._history) > self._history_max:
            self.compacted = self._history.popleft().revision

    def compact(self, revision: int) -> None:
        """Forget what happened up to `revision`."""
        if revision > self.revision:
            raise Mistake(f"revision {revision} is in the future: the newest is {self.revision}")
        self.compacted = max(self.compacted, revision)
        while self._history and self._history[0].revision <= self.compacted:
            self._history.popleft()

    # ---- leases --------------------------------------------------------------

    def grant(self, ttl_s: float, now: float) -> int:
        """Begin a lease and return its number."""
        self._last_lease += 1
        self._leases[self._last_lease] = _Lease(ttl_s, now + ttl_s)
        return self._last_lease

    def keep_alive(self, lease: int, now: float) -> float:
        """Let a living lease begin again."""
        held = self._leases.get(lease)
        if held is None:
            raise lease_lost(lease)
        held.deadline = now + held.ttl_s
        return held.ttl_s

    def revoke(self, lease: int) -> None:
        """End a lease and delete its keys."""
        held = self._leases.pop(lease, None)
        if held is not None:
            self._record([self._delete(self._entries[key]) for key in sorted(held.keys)])

    def expire(self, now: float) -> None:
        """End every lease whose time is up, each in a transaction of its own."""
        for lease in [n for n, held in self._leases.items() if held.deadline <= now]:
            self.revoke(lease)

    def next_deadline(self) -> float | None:
        """When the next lease ends, if there is one."""
        return min((held.deadline for held in self._leases.values()), default=None)

    def lease_info(self, lease: int, now: float) -> LeaseInfo:
        """Describe a living lease."""
        held = self._leases.get(lease)
        if held is None:
            raise lease_lost(lease)
        return LeaseInfo(lease, held.ttl_s, held.deadline - now, tuple(sorted(held.keys)))

    def leases(self) -> tuple[int, ...]:
        """All living leases."""
        return tuple(sorted(self._leases))


def lease_lost(lease: int) -> LeaseLost:
    """The error for a lease that is not there (any more)."""
    return LeaseLost(f"lease {lease} has ended: take a new one and look again before acting")


def compacted_error(wanted: int, compacted: int) -> Compacted:
    """The error for history that is no longer kept."""
    return Compacted(
        f"revision {wanted} is no longer kept (history begins after {compacted}): "
        "read the range again and watch from its revision",
        revision=compacted,
    )


__all__ = ["HISTORY_MAX", "Store", "compacted_error", "lease_lost"]
