"""Leader election with one mistake each."""

import contextlib
from collections.abc import Sequence

import msgspec

from broken.variant import Make
from holdfast.errors import Fenced, Retriable, UnknownOutcome
from holdfast.ledger import Delete, Entry, Put, present
from holdfast.ledger.election import Acquire, Election, Held, Leader, Leadership, Wait
from holdfast.ledger.records import load, put
from holdfast.ledger.runtime import Runtime
from holdfast.sim.protocol import Protocol
from holdfast.sim.protocols.election import COUNTER, PREFIX, Count, ElectionProtocol

__all__ = ["BROKEN"]


async def _count(runtime: Runtime) -> Count:
    """What is counted so far."""
    stored = await load(runtime.ledger, COUNTER, Count)
    return stored.record if stored else Count()


def _more(count: Count, name: str, number: int, leadership: Leadership) -> Put:
    """One more, whatever was done before."""
    done = {**count.done, name: number}
    return put(COUNTER, Count(token=leadership.token, total=count.total + 1, done=done))


class _NoFence(ElectionProtocol):
    """The effect is guarded by belief instead of by comparison."""

    async def add(self, runtime: Runtime, name: str, number: int, leadership: Leadership) -> None:
        count = await _count(runtime)
        if count.done.get(name, 0) >= number:
            return
        if not leadership.believes():
            raise Fenced("our lease has ended, by our own clock")
        await runtime.ledger.txn([], [_more(count, name, number, leadership)])


class _NoIdentity(ElectionProtocol):
    """A lost answer is taken for a failure and the addition is made again."""

    async def add(self, runtime: Runtime, name: str, number: int, leadership: Leadership) -> None:
        for _ in range(5):
            more = _more(await _count(runtime), name, number, leadership)
            with contextlib.suppress(UnknownOutcome):
                await runtime.ledger.txn([leadership.guard], [more])
                return


class _WeakGuard(ElectionProtocol):
    """The guard asks whether somebody leads, not whether it is still us."""

    async def add(self, runtime: Runtime, name: str, number: int, leadership: Leadership) -> None:
        leadership.guard = present(f"{PREFIX}/leader")
        await super().add(runtime, name, number, leadership)


class _Optimist(ElectionProtocol):
    """A lost answer is taken for a success."""

    async def add(self, runtime: Runtime, name: str, number: int, leadership: Leadership) -> None:
        count = await _count(runtime)
        if count.done.get(name, 0) < number:
            with contextlib.suppress(UnknownOutcome):
                more = _more(count, name, number, leadership)
                await runtime.ledger.txn([leadership.guard], [more])


class _ByName(Election):
    """A candidate recognises its record by its name: so does its twin, and its next life."""

    _tried = True

    def _decide(self, entries: Sequence[Entry], lease: int) -> Held | Acquire | Wait:
        verdict = super()._decide(entries, lease)
        if isinstance(verdict, Wait) and verdict.holder == self._name and self._tried:
            entry = next(entry for entry in entries if entry.key == f"{self._prefix}/leader")
            return Held(entry, msgspec.json.decode(entry.value, type=Leader).token)
        return verdict


class _NoLease(_ByName):
    """The leader's record is not bound to a lease: a dead leader leads for ever."""

    _tried = False

    def _decide(self, entries: Sequence[Entry], lease: int) -> Held | Acquire | Wait:
        verdict = super()._decide(entries, lease)
        if isinstance(verdict, Acquire):
            self._tried = True
            unbound = [Put(op.key, op.value) for op in verdict.then if isinstance(op, Put)]
            return Acquire(verdict.compare, tuple(unbound))
        return verdict


class _BlindResign(Election):
    """Resigning deletes whatever leader there is, a successor's record too."""

    async def _resign(self, held: Held) -> None:
        with contextlib.suppress(Retriable, UnknownOutcome):
            await self._runtime.ledger.txn([], [Delete(f"{self._prefix}/leader")])


class _BlindAcquire(Election):
    """The record is written without comparing that nobody leads."""

    def _decide(self, entries: Sequence[Entry], lease: int) -> Held | Acquire | Wait:
        verdict = super()._decide(entries, lease)
        return Acquire((), verdict.then) if isinstance(verdict, Acquire) else verdict


class _OwnToken(Election):
    """The token is made up from what the candidate remembers, not from the ledger."""

    _given = 0

    def _decide(self, entries: Sequence[Entry], lease: int) -> Held | Acquire | Wait:
        verdict = super()._decide(entries, lease)
        if isinstance(verdict, Acquire):
            type(self)._given = self._given + 1
            own = Leader(holder=self._name, token=self._given // 2 + 1)
            leader = put(f"{self._prefix}/leader", own, lease=lease)
            return Acquire(verdict.compare[:1], (leader,))
        return verdict


def _with(election: type[Election]) -> Make:
    def make() -> Protocol:  # what a class remembers is one schedule's
        return ElectionProtocol(type(election.__name__, (election,), {}))

    make.__doc__ = election.__doc__
    return make


BROKEN: dict[str, Make] = {
    "": _NoFence,
    "identity": _NoIdentity,
    "lease": _with(_NoLease),
    "acquire": _with(_BlindAcquire),
    "token": _with(_OwnToken),
    "guard": _WeakGuard,
    "name": _with(_ByName),
    "resign": _with(_BlindResign),
    "optimist": _Optimist,
}
