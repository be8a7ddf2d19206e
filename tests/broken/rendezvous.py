"""The rendezvous with one mistake each."""

import functools

import msgspec

from broken.variant import Make, variant
from holdfast.ledger import Compare, Put
from holdfast.ledger.records import Stored, put
from holdfast.ledger.types import Get, absent
from holdfast.rendezvous.closer import Duty
from holdfast.rendezvous.decide import View, restart
from holdfast.rendezvous.records import Cause, Closer, Cycle, Node, Rules
from holdfast.rendezvous.rendezvous import Place, Rendezvous
from holdfast.sim.protocols.rendezvous.blame import Trouble
from holdfast.sim.protocols.rendezvous.model import RendezvousProtocol, SimCrew

__all__ = ["BROKEN"]


class _AnyCycle(Duty):
    """A node counts for every cycle, whichever its record names."""

    async def _look(self, stored: Stored[Cycle] | None) -> float | None:
        if stored is not None:
            for name, (life, node) in self._board.nodes.items():
                here = msgspec.structs.replace(node, cycle=stored.record.number)
                self._board.nodes[name] = life, here
        return await super()._look(stored)

    async def _still(self, stored: Stored[Cycle], verdict: Cycle) -> bool:
        return True


class _Deaf(Rendezvous):
    """A spare does not look whether the run has succeeded, and waits for the next cycle."""

    async def changed(self, head: Stored[Cycle]) -> Stored[Cycle]:
        fresh = await super().changed(head)
        while fresh.record.state == "succeeded" and self.place(head) is None:
            fresh = await super().changed(fresh)
        return fresh


class _Hasty(Rendezvous):
    """A node leaves when its own workers have succeeded, before that is recorded for all."""

    _done: Cycle | None = None

    async def succeed(self, head: Stored[Cycle]) -> bool:
        done = await super().succeed(head)
        if done:
            self._done = msgspec.structs.replace(head.record, state="succeeded")
        return done

    async def changed(self, head: Stored[Cycle]) -> Stored[Cycle]:
        if self._done is not None:
            return Stored(head.entry, self._done)
        return await super().changed(head)


class _Namesake(Rendezvous):
    """A node recognises its place by its name: so does its next life."""

    def place(self, head: Stored[Cycle]) -> Place | None:
        before = self._entry
        if before is None:
            return None
        for member in head.record.members:
            if member.name == self._name:
                self._entry = msgspec.structs.replace(before, create_revision=member.life)
        try:
            return super().place(head)
        finally:
            self._entry = before


class _Careless(SimCrew):
    """Workers do not compare the cycle: a node that was paused goes on in the old one."""

    def guards(self, place: Place) -> list[Compare]:
        return []


class _Cumulative(Duty):
    """Successes are kept per rank, not per cycle: those of an old cycle count."""

    async def _look(self, stored: Stored[Cycle] | None) -> float | None:
        ends = self._board._ends
        if stored is not None and ends:
            ends[stored.record.number] = set().union(*ends.values())
        return await super()._look(stored)

    async def _tidy(self) -> None:
        pass


class _Blind(Duty):
    """The closer writes what it has decided without comparing: it reopens what is closed."""

    async def _commit(self, stored: Stored[Cycle], verdict: Cycle) -> None:
        await self._runtime.ledger.txn([], [put(self._keys.cycle, verdict)])


class _Reopener(Rendezvous):
    """A node that reports a failure does not compare: a pause later it reopens a closed round."""

    async def restart(self, head: Stored[Cycle], cause: Cause) -> None:
        await self._insist([], [put(self._keys.cycle, restart(head.record, cause))])


class _Immortal(Rendezvous):
    """Nodes' records are not bound to leases: the dead get ranks while spares wait."""

    def _record(self, node: Node) -> Put:
        return msgspec.structs.replace(super()._record(node), lease=0)

    async def _enter_node(self) -> None:
        number = self._head.record.number
        self._node = msgspec.structs.replace(self._node, cycle=number, heard=number)
        txn = await self._insist([], [self._record(self._node), Get(self._key)])
        self._entry = txn.results[-1]


class _Impatient(Duty):
    """The run succeeds with the first node that has finished."""

    async def _look(self, stored: Stored[Cycle] | None) -> float | None:
        if stored is not None and stored.record.state == "running":
            ends = self._board._ends.get(stored.record.number)
            if ends:
                ends.update(range(len(stored.record.members)))
        return await super()._look(stored)


class _Forever(Rendezvous):
    """The closer's key is not bound to a lease: when it dies nobody looks any more."""

    _applied = False

    async def _apply(self) -> None:
        op = put(self._keys.closer, Closer(node=self._name))
        txn = await self._insist([absent(self._keys.closer)], [op])
        self._applied = txn.succeeded

    def _is_closer(self) -> bool:
        return self._applied


class _Spendthrift(Rendezvous):
    """Restarts are forgotten: a job that always fails goes on for ever."""

    async def restart(self, head: Stored[Cycle], cause: Cause) -> None:
        unspent = msgspec.structs.replace(head.record, restarts=())
        await super().restart(Stored(head.entry, unspent), cause)


class _Lenient(Rendezvous):
    """A node whose workers always fail keeps its rank while a spare waits."""

    async def _view(self) -> View | None:
        return None  # as if there were no spare


class _DeafCloser(Duty):
    """The closer does not listen to members that do not reach rank 0: all wait for ever."""

    async def _look(self, stored: Stored[Cycle] | None) -> float | None:
        for name, (life, node) in self._board.nodes.items():
            self._board.nodes[name] = life, msgspec.structs.replace(node, unreached=0)
        return await super()._look(stored)


class _Forgetful(Duty):
    """A rank 0 that nobody reaches ends its cycle, and gets rank 0 again in the next."""

    async def _commit(self, stored: Stored[Cycle], verdict: Cycle) -> None:
        await super()._commit(stored, msgspec.structs.replace(verdict, parked=()))


class _AlwaysFailing(RendezvousProtocol):
    """Workers that always fail."""

    def prepare(self, seed: int) -> None:
        super().prepare(seed)
        self.failing = 1.0


class _OneFailing(RendezvousProtocol):
    """One node whose workers always fail, and two spares."""

    def prepare(self, seed: int) -> None:
        super().prepare(seed)
        self.nodes, self.failing, self.quitting = 4, 0.0, 0.0
        self.rules = Rules(minimum=2, maximum=3, spares=1, last_call_s=2.0, max_restarts=8)
        self.trouble = Trouble(failing="n0")


class _OneHidden(RendezvousProtocol):
    """A rank 0 that nobody reaches."""

    def prepare(self, seed: int) -> None:
        super().prepare(seed)
        self.trouble = Trouble(hidden="n0")


def _node(
    rendezvous: type[Rendezvous], protocol: type[RendezvousProtocol] = RendezvousProtocol
) -> Make:
    return variant(protocol, rendezvous=rendezvous)


def _closer(duty: type[Duty], protocol: type[RendezvousProtocol] = RendezvousProtocol) -> Make:
    return variant(protocol, duty, rendezvous=functools.partial(Rendezvous, duty=duty))


BROKEN: dict[str, Make] = {
    "": _closer(_AnyCycle),
    "stays": _node(_Deaf),
    "leaves": _node(_Hasty),
    "name": _node(_Namesake),
    "fence": variant(RendezvousProtocol, crew=_Careless),
    "ends": _closer(_Cumulative),
    "blind": _closer(_Blind),
    "reopens": _node(_Reopener),
    "ghosts": _node(_Immortal),
    "first": _closer(_Impatient),
    "closer": _node(_Forever),
    "budget": _node(_Spendthrift, _AlwaysFailing),
    "blame": _node(_Lenient, _OneFailing),
    "reports": _closer(_DeafCloser, _OneHidden),
    "mark": _closer(_Forgetful, _OneHidden),
}
