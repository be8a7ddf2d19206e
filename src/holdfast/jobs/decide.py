"""What may become of a job: one table, and the pure functions around it.

`TABLE` says which verb leads from which state to which. Whoever changes a job's record
calls `change`, and commits what it returns under compare-and-set (`store.py`). Invariants:

- an epoch belongs to at most one incarnation: when a job leaves the states in which an
  incarnation may act, the epoch grows, so that whatever is left of it is fenced;
- a job has an address exactly while it is RUNNING;
- a tombstone stays one.

This module is pure.
"""

from types import MappingProxyType
from typing import Any, Final, Literal

import msgspec

from holdfast.errors import Fenced, Gone, Mistake
from holdfast.jobs.records import LIVE, TOMBSTONES, Alive, Job, State, check_name

__all__ = ["TABLE", "Budget", "Verb", "change", "create", "fall", "ready", "settle", "take"]

Verb = Literal[
    "take",
    "ready",
    "restart",
    "fail",
    "complete",
    "stop_early",
    "pause",
    "resume",
    "cancel",
    "delete",
    "archive",
    "clear",
]

_RESTING: Final[tuple[State, ...]] = (
    "PAUSED",
    "FAILED",
    "CANCELLED",
    "COMPLETED",
    "EARLY_STOPPED",
)


def _from(states: tuple[State, ...], to: State) -> dict[State, State]:
    return dict.fromkeys(states, to)


TABLE: Final = MappingProxyType[Verb, dict[State, State]](
    {
        "take": {"PENDING": "CREATING"},
        "ready": {"CREATING": "RUNNING"},
        "restart": {"CREATING": "PENDING", "RUNNING": "PENDING"},
        "fail": _from(("PENDING", "CREATING", "RUNNING"), "FAILED"),
        "complete": {"CREATING": "COMPLETED", "RUNNING": "COMPLETED"},
        "stop_early": _from(("PENDING", "CREATING", "RUNNING"), "EARLY_STOPPED"),
        "pause": _from(("PENDING", "CREATING", "RUNNING"), "PAUSED"),
        "resume": _from(("PAUSED", "FAILED", "CANCELLED", "COMPLETED"), "PENDING"),
        "cancel": {
            "PENDING": "CANCELLED",
            "CREATING": "CANCELLING",
            "RUNNING": "CANCELLING",
            "PAUSED": "CANCELLED",
        },
        # What lives is stopped first: until then it is DELETING, and can be seen.
        "delete": {
            "CREATING": "DELETING",
            "RUNNING": "DELETING",
            "CANCELLING": "DELETING",
            "PENDING": "DELETED",
            "UNREADABLE": "DELETED",
            **_from(_RESTING, "DELETED"),
        },
        "archive": _from(_RESTING, "ARCHIVED"),
        "clear": {"CANCELLING": "CANCELLED", "DELETING": "DELETED"},
    }
)
"""Verb → state → the state after it. What is not here is refused."""

_AGAIN: Final[dict[Verb, frozenset[State]]] = {
    "pause": frozenset({"PAUSED"}),
    "resume": frozenset({"PENDING", "CREATING", "RUNNING"}),
    "cancel": frozenset({"CANCELLING", "CANCELLED"}),
    "delete": frozenset({"DELETING", "DELETED"}),
    "archive": frozenset({"ARCHIVED"}),
    "stop_early": frozenset({"EARLY_STOPPED"}),
}
"""What has been done already is done again by doing nothing: callers repeat themselves."""


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """How often incarnations may die early before the job has failed.

    One that has served for `well_s` was well: its death is an accident, whatever was before.
    """

    restarts: int = 10
    window_s: float = 3600.0
    """Deaths longer ago than this no longer count."""
    well_s: float = 10.0
    base_s: float = 0.25
    """The wait after the second early death; it doubles, up to `max_s`."""
    max_s: float = 10.0


def create(account: str, job: str, spec: dict[str, Any], now: float) -> Job:
    """A new job. Its names come from outside."""
    return Job(
        account=check_name("account", account),
        id=check_name("job", job),
        epoch=1,
        spec=spec,
        created_at=now,
        changed_at=now,
    )


def change(job: Job, verb: Verb, now: float, *, alive: bool = False, **fields: Any) -> Job | None:
    """The job after a verb, or None when there is nothing left to do.

    While something of it is `alive`, cancelling and deleting wait for its end. Raises `Gone`
    for a tombstone and `Mistake` for what the table does not allow.
    """
    if job.state in _AGAIN.get(verb, ()):
        return None
    state = TABLE[verb].get(job.state)
    if state is None:
        if job.state in TOMBSTONES:
            raise Gone(f"the job {job.name} is {job.state}: its id is not used again")
        allowed = ", ".join(TABLE[verb])
        raise Mistake(f"{verb}: the job {job.name} is {job.state}; possible when it is {allowed}")
    if alive and verb in ("cancel", "delete"):
        state = "CANCELLING" if verb == "cancel" else "DELETING"
    # Of a job that is UNREADABLE something may still act.
    ended = (job.state in LIVE or job.state == "UNREADABLE") and state not in LIVE
    if state in TOMBSTONES:
        fields["spec"] = {}  # kept for ever, by everybody: it should be small
    return msgspec.structs.replace(
        job,
        state=state,
        epoch=job.epoch + ended,
        address=fields.pop("address", "") if state == "RUNNING" else "",
        host=fields.pop("host", job.host) if state in LIVE else "",
        changed_at=max(now, job.changed_at),
        **{"reason": "", **fields},
    )


def take(job: Job, host: str, now: float) -> Job | None:
    """A host begins an incarnation; None when it is not the time, or somebody else has it."""
    if job.state != "PENDING" or now < job.not_before:
        return None
    return change(job, "take", now, host=host)


def ready(job: Job, epoch: int, address: str, now: float) -> Job | None:
    """The incarnation of this epoch serves. `Fenced` when it is no longer the job's."""
    _check(job, epoch)
    if job.state == "RUNNING" and job.address == address:
        return None
    return change(job, "ready", now, address=address)


def fall(job: Job, epoch: int, reason: str, now: float, budget: Budget) -> Job:
    """The incarnation of this epoch has died: another one begins, or the job has failed."""
    _check(job, epoch)
    well = job.state == "RUNNING" and now - job.changed_at >= budget.well_s
    recent = () if well else tuple(at for at in job.restarts if at > now - budget.window_s)
    deaths = (*recent, now)
    if len(recent) >= budget.restarts:
        told = f"{reason} (early death {len(deaths)} in {budget.window_s:g} s; no more restarts)"
        failed = change(job, "fail", now, reason=told, restarts=deaths)
        assert failed is not None
        return failed
    # The first death costs no wait: it is the usual one, and somebody waits for the trainer.
    wait_s = 0.0 if not recent else min(budget.max_s, budget.base_s * 2.0 ** (len(recent) - 1))
    again = change(job, "restart", now, reason=reason, restarts=deaths, not_before=now + wait_s)
    assert again is not None
    return again


def settle(job: Job, alive: Alive | None, now: float, budget: Budget) -> Job | None:
    """What becomes of a job by itself: when nothing of its incarnation is alive any more."""
    if alive is not None:
        return None
    if job.state in LIVE:
        who = f"its host {job.host}" if job.host else "its host"
        return fall(job, job.epoch, f"{who} gave no sign of life any more", now, budget)
    if job.state in TABLE["clear"]:
        return change(job, "clear", now)
    return None


def _check(job: Job, epoch: int) -> None:
    if job.epoch != epoch or job.state not in LIVE:
        raise Fenced(
            f"the job {job.name} is {job.state} at epoch {job.epoch}; epoch {epoch} is over",
            epoch=epoch,
        )
