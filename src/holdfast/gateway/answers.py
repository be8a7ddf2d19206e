"""The gateway's answers: one table, from what is known of a job to what is done.

`decide` is the table. What ends a caller's hope (404, 410, paused) is said only of a job that
was read from the ledger for this purpose (`fresh`); until then the verdict is `CONFIRM`. What
may become better is waited for, and when the waiting has taken too long, `late` says what the
caller hears. A poll that has to wait is held, because the SDKs ask again at once.

This module is pure.
"""

from typing import Any, Final, Literal

import msgspec

from holdfast.jobs.records import GONE, Job
from holdfast.jobs.store import Seen

__all__ = [
    "CONFIRM",
    "Answer",
    "Confirm",
    "Kind",
    "Route",
    "Verdict",
    "Wait",
    "again",
    "decide",
    "final",
    "kind_of",
    "late",
    "not_found",
    "problem",
    "too_many",
    "too_often",
]

Kind = Literal["submit", "poll"]

_POLLS: Final = frozenset({"retrieve_future", "retrieve_futures"})


class Route(msgspec.Struct, frozen=True):
    """Send it there: the incarnation that was RUNNING when we last looked."""

    account: str
    job: str
    epoch: int
    address: str
    secret: str = ""
    """What the incarnation's port asks for; empty when its host is of an older version."""


class Wait(msgspec.Struct, frozen=True):
    """Not now, perhaps soon."""

    reason: str


class Confirm(msgspec.Struct, frozen=True):
    """Read the job from the ledger first: this would be a final answer."""


CONFIRM: Final = Confirm()


class Answer(msgspec.Struct, frozen=True):
    """What the caller hears."""

    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    code: str = ""


Verdict = Route | Wait | Confirm | Answer


def kind_of(path: str) -> Kind:
    """Whether a request asks for the result of another one."""
    return "poll" if path.rpartition("/")[2] in _POLLS else "submit"


def decide(seen: Seen | None, kind: Kind, *, fresh: bool) -> Verdict:
    """What to do with a request for this job; None: nobody knows it."""
    if seen is None:
        return not_found() if fresh else CONFIRM
    job = seen.job
    if job.state == "RUNNING" and seen.lives:
        assert seen.alive is not None
        return Route(job.account, job.id, job.epoch, job.address, seen.alive.secret)
    if job.state not in GONE and job.state != "PAUSED":
        return Wait(_why(seen))
    if not fresh:
        return CONFIRM
    if job.state == "PAUSED":
        told = f"the job {job.name} is paused: `holdfast jobs resume {job.id}` lets it go on"
        return Wait(told) if kind == "poll" else final(423, "job_paused", told)
    return _is_gone(job)


def late(kind: Kind, reason: str, *, retry_after_ms: int = 1000) -> Answer:
    """What a caller hears when the waiting has taken too long."""
    if kind == "poll":
        body = {
            "queue_state": "paused_capacity",
            "queue_state_reason": reason,
            **_body("route_not_ready", reason),
        }
        return Answer(408, msgspec.json.encode(body), (), "route_not_ready")
    told = f"{reason}; send the same request again"
    return again(503, "route_not_ready", told, retry_after_ms)


def not_found() -> Answer:
    """The same for a job that never was and for somebody else's: nobody learns which."""
    told = "there is no such job in this account: check the account and the job's id"
    return final(404, "job_not_found", told)


def too_many(what: str) -> Answer:
    """An account has its share of requests, held polls or connections: others need the rest."""
    return again(
        429,
        f"too_many_{what}",
        f"this account has too many {what} at this gateway: wait for the answers to earlier "
        "ones, then send the same request again",
    )


def too_often(wait_s: int) -> Answer:
    """A caller without a valid key comes again and again from one address."""
    return problem(
        429,
        "too_many_without_key",
        "too many requests without a valid API key have come from this address: check the key, "
        f"and wait {wait_s} s",
        ("retry-after", str(wait_s)),
        ("x-should-retry", "true"),
    )


def problem(status: int, code: str, message: str, *headers: tuple[str, str]) -> Answer:
    """An answer of the gateway's own."""
    return Answer(status, msgspec.json.encode(_body(code, message)), headers, code)


def final(status: int, code: str, message: str) -> Answer:
    """An answer that stays the same however often the request is sent."""
    return problem(status, code, message, ("x-should-retry", "false"))


def again(status: int, code: str, message: str, wait_ms: int = 1000) -> Answer:
    """An answer that asks for the same request again, after a pause."""
    pause = ("retry-after-ms", str(wait_ms))
    return problem(status, code, message, pause, ("x-should-retry", "true"))


def _body(code: str, message: str) -> dict[str, Any]:
    # `detail` is what the Tinker SDK shows, `error.message` the Fireworks SDK.
    return {"error": {"code": code, "message": message}, "detail": message}


def _why(seen: Seen) -> str:
    job = seen.job
    if job.state == "RUNNING":
        return f"the trainer of {job.name} is being replaced (epoch {job.epoch})"
    told = f": {job.reason}" if job.reason else ""
    return f"the trainer of {job.name} is not ready ({job.state}, epoch {job.epoch}){told}"


def _is_gone(job: Job) -> Answer:
    told = f": {job.reason}" if job.reason else ""
    can = "; it can be resumed" if job.state in ("FAILED", "CANCELLED", "COMPLETED") else ""
    return final(410, f"job_{job.state.lower()}", f"the job {job.name} is {job.state}{told}{can}")
