"""Promise 1: one incarnation of a trainer at a time, and nobody hears "gone" of a job that is not.

Relied upon: a host tells that it has taken a job before it starts anything, and tells everything
in one file; terms come from the ledger, which gives the seat to no older epoch. Across hosts there
is only the clock, so the order of `job.started` is compared within each host's file.
"""

from itertools import pairwise

from holdfast.check.history import Entry, History, Life
from holdfast.check.schema import GatewayAccess, JobEnded, JobStarted, JobTaken, TrainerSeated
from holdfast.check.verdict import Result, rule

__all__ = ["RULES"]

_GONE = (404, 410)


@rule("routes.epochs", 1, "the epochs of a job only grow, and each is taken once")
def epochs(history: History, result: Result) -> None:
    """Follow every job through every host."""
    newest: dict[tuple[str, str], Entry[JobTaken]] = {}
    for twin, one in history.beside_first(JobTaken, lambda it: (it.job, it.epoch)):
        result.checked += 1
        job, epoch = one.event.job, one.event.epoch
        last = newest.get((one.file, job))
        if twin is not one:
            result.find(f"epoch {epoch} of {job} was taken twice", twin, one)
        elif last is not None and epoch < last.event.epoch:
            says = f"epoch {epoch} of {job} was taken after epoch {last.event.epoch}"
            result.find(says, last, one)
        newest[one.file, job] = one


@rule("routes.started", 1, "an incarnation serves after it was taken, and never after a newer one")
def started(history: History, result: Result) -> None:
    """Follow every host through its lives."""
    taken: dict[tuple[Life, str, int], int] = {}
    for one in history.of(JobTaken):
        taken.setdefault((one.life, one.event.job, one.event.epoch), one.line)
    newest: dict[tuple[str, str], Entry[JobStarted]] = {}
    for start in history.of(JobStarted):
        result.checked += 1
        job, epoch = start.event.job, start.event.epoch
        at = taken.get((start.life, job, epoch))
        if (at is None or at > start.line) and not history.lost(JobTaken):
            says = f"epoch {epoch} of {job} serves, and its host had not taken it"
            result.find(says, start)
        last = newest.get((start.file, job))
        if last is not None and epoch < last.event.epoch:
            says = f"epoch {epoch} of {job} serves after epoch {last.event.epoch}"
            result.find(says, last, start)
        newest[start.file, job] = start


@rule(
    "routes.fence", 1, "a trainer acts only as an epoch that was taken, never behind a newer one"
)
def fence(history: History, result: Result) -> None:
    """Follow the seat of every job through its terms."""
    taken = {(f"/{one.event.job}/", one.event.epoch) for one in history.of(JobTaken)}
    seats = sorted(history.of(TrainerSeated), key=lambda one: (one.event.job, one.event.term))
    for one in seats:
        result.checked += 1
        is_taken = any(
            one.event.job.endswith(job) and one.event.epoch == epoch for job, epoch in taken
        )
        if not is_taken and not history.lost(JobTaken):
            says = f"term {one.event.term} acts as epoch {one.event.epoch}, which nobody took"
            result.find(says, one)
    for before, after in pairwise(seats):
        old, new = before.event, after.event
        if old.job != new.job:
            continue
        if old.term == new.term and before.life != after.life:
            result.find(f"two processes act in term {new.term}", before, after)
        if new.epoch < old.epoch:
            says = f"term {new.term} acts as epoch {new.epoch}, after epoch {old.epoch}"
            result.find(says, before, after)


@rule("routes.gone", 1, "nobody hears that a job is gone that is not")
def gone(history: History, result: Result) -> None:
    """Look at what the gateway itself has answered, if it kept an access log."""
    result.unchecked = "the gateway kept no access log"
    over = {one.event.job for one in history.of(JobEnded) if one.event.how == "completed"}
    known = {one.event.job for one in history.of(JobTaken)}
    for one in history.of(GatewayAccess):
        event, job = one.event, f"{one.event.account}/{one.event.job}"
        if job not in known:
            continue
        result.checked += 1
        if event.status in _GONE and event.code and job not in over:
            says = f"{event.path}: {event.status} {event.code}, and {job} was not gone"
            result.find(says, one)


RULES = (epochs, started, fence, gone)
