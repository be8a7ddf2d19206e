"""The routes with one mistake each."""

import functools
from typing import Any

import msgspec

from broken.variant import Make, variant
from holdfast.gateway import answers
from holdfast.gateway.answers import Answer, Kind
from holdfast.gateway.desk import Desk, Forward
from holdfast.jobs import decide
from holdfast.jobs.host import Host
from holdfast.jobs.records import Job, write
from holdfast.jobs.store import Jobs, Seen
from holdfast.ledger.types import Compare, Op
from holdfast.sim.protocols.routes.model import RoutesProtocol
from holdfast.sim.protocols.routes.trainer import Trainer

__all__ = ["BROKEN"]


class _Believes(Desk):
    """A gateway says "not found" from its table, without reading the ledger."""

    async def serve(
        self, account: str, job: str, kind: Kind, forward: Forward, *rest: Any, **how: Any
    ) -> Answer | None:
        verdict = answers.decide(self._routes.find(account, job), kind, fresh=True)
        if isinstance(verdict, Answer):
            return verdict
        return await super().serve(account, job, kind, forward, *rest, **how)


class _Eager(Desk):
    """A gateway sends an operation again that may have been received."""

    async def serve(
        self, account: str, job: str, kind: Kind, forward: Forward, *rest: Any, **how: Any
    ) -> Answer | None:
        return await super().serve(account, job, kind, forward, *rest, **how | {"harmless": True})


class _Reborn(Jobs):
    """The id of a deleted job is given to a new one."""

    async def create(self, account: str, job: str, spec: dict[str, Any]) -> Job:
        found = await self.find(account, job)
        if found is not None and found.job.state == "DELETED":
            again = msgspec.structs.replace(found.job, state="PENDING")
            await self.commit(found, again)
            return again
        return await super().create(account, job, spec)


class _SameEpoch(Jobs):
    """Pausing, cancelling and deleting leave the epoch as it is."""

    async def commit(self, found: Seen, new: Job, **how: Any) -> bool:
        if new.state in ("PAUSED", "CANCELLING", "DELETING"):
            new = msgspec.structs.replace(new, epoch=found.job.epoch)
        return await super().commit(found, new, **how)


class _Blind(Jobs):
    """A job's record is written without comparing it with what was read."""

    async def commit(
        self,
        found: Seen,
        new: Job,
        *,
        compare: tuple[Compare, ...] = (),
        ops: list[Op] | None = None,
    ) -> bool:
        _, writes = write(self.keys, new, over=found.entry)
        txn = await self.runtime.ledger.txn([*compare], [*writes, *(ops or [])])
        return txn.succeeded


class _Late(Host):
    """A trainer's address is published without looking whether it is still the job's."""

    async def _publish(self, job: Job, address: str) -> None:
        async def late() -> None:
            await self._runtime.sleep(5 * self._runtime.random.random())
            await self.jobs.update(
                job.account,
                job.id,
                lambda it: decide.ready(
                    msgspec.structs.replace(it.job, state="CREATING"),
                    it.job.epoch,
                    address,
                    self.jobs.wall(),
                ),
            )

        self._runtime.spawn(late(), name="publishes late")


_with = functools.partial(variant, RoutesProtocol)

BROKEN: dict[str, Make] = {
    "": _with(desk=_Believes),
    "again": _with(desk=_Eager),
    "epoch": _with(
        "A trainer does whatever it is sent, and compares no epoch.",
        trainer=functools.partial(Trainer, guarded=False),
    ),
    "resubmit": _with(
        "A caller that does not hear of its operation submits it again, under a new number.",
        resubmits=True,
    ),
    "verify": _with(
        "A caller doubts every 404, without asking the control plane.",
        verifies=False,
    ),
    "tombstone": _with(jobs=_Reborn),
    "kept": _with(jobs=_SameEpoch),
    "compare": _with(jobs=_Blind),
    "publish": _with(host=_Late),
}
