"""The table of answers, cell by cell: what a caller hears for every state of a job."""

import json
from typing import Any

import pytest

from holdfast.gateway import answers
from holdfast.gateway.answers import CONFIRM, Answer, Kind, Route, Wait
from holdfast.jobs.records import STATES, Alive, Job, State
from holdfast.jobs.store import Seen
from holdfast.ledger.types import Entry

WAITING = ("PENDING", "CREATING")
ENDED = (
    "FAILED", "CANCELLING", "CANCELLED", "COMPLETED", "EARLY_STOPPED", "DELETING", "DELETED",
    "ARCHIVED", "UNREADABLE",
)  # fmt: skip


def seen(state: State, *, epoch: int = 3, alive: int | None = None) -> Seen:
    address = "127.0.0.1:9" if state == "RUNNING" else ""
    job = Job(account="a", id="j", state=state, epoch=epoch, address=address, reason="why not")
    sign = None if alive is None else Alive(epoch=alive, host="h")
    return Seen(job, Entry("/k", b"", 1, 1, 1), sign)


def body(answer: Answer) -> Any:
    return json.loads(answer.body)


@pytest.mark.parametrize("kind", ["submit", "poll"])
@pytest.mark.parametrize("state", STATES)
def test_every_state_without_a_fresh_reading(state: State, kind: Kind) -> None:
    """Nothing final is said of a job that was not read for this."""
    verdict = answers.decide(seen(state, alive=3), kind, fresh=False)
    if state == "RUNNING":
        assert verdict == Route("a", "j", 3, "127.0.0.1:9")
    elif state in WAITING:
        assert isinstance(verdict, Wait)
    else:
        assert verdict is CONFIRM


@pytest.mark.parametrize("kind", ["submit", "poll"])
@pytest.mark.parametrize("state", STATES)
def test_every_state_with_a_fresh_reading(state: State, kind: Kind) -> None:
    verdict = answers.decide(seen(state, alive=3), kind, fresh=True)
    if state == "RUNNING":
        assert isinstance(verdict, Route)
    elif state in WAITING:
        assert isinstance(verdict, Wait)
        assert "why not" in verdict.reason
    elif state == "PAUSED" and kind == "poll":
        assert isinstance(verdict, Wait), "a poll of a paused job is held"
        assert "resume" in verdict.reason
    elif state == "PAUSED":
        assert isinstance(verdict, Answer)
        assert (verdict.status, verdict.code) == (423, "job_paused")
        assert "holdfast jobs resume j" in body(verdict)["error"]["message"]
        assert ("x-should-retry", "false") in verdict.headers
    else:
        assert state in ENDED
        assert isinstance(verdict, Answer)
        assert (verdict.status, verdict.code) == (410, f"job_{state.lower()}")
        assert ("x-should-retry", "false") in verdict.headers
        assert "why not" in body(verdict)["error"]["message"]


@pytest.mark.parametrize("alive", [None, 2, 4])
def test_running_without_its_own_sign_of_life_is_waited_for(alive: int | None) -> None:
    """RUNNING is kept alive by the lease of that very incarnation."""
    for fresh in (False, True):
        assert isinstance(
            answers.decide(seen("RUNNING", alive=alive), "submit", fresh=fresh), Wait
        )


def test_what_nobody_knows_is_looked_up_before_it_is_not_found() -> None:
    assert answers.decide(None, "submit", fresh=False) is CONFIRM
    assert answers.decide(None, "poll", fresh=False) is CONFIRM
    for kind in ("submit", "poll"):
        verdict = answers.decide(None, kind, fresh=True)
        assert isinstance(verdict, Answer)
        assert verdict == answers.not_found()
        assert (verdict.status, verdict.code) == (404, "job_not_found")
        assert ("x-should-retry", "false") in verdict.headers


def test_waiting_too_long() -> None:
    """A submit may be sent again, soon; a poll was held, and says why."""
    submit = answers.late("submit", "it starts")
    assert (submit.status, submit.code) == (503, "route_not_ready")
    assert dict(submit.headers) == {"retry-after-ms": "1000", "x-should-retry": "true"}
    poll = answers.late("poll", "it starts")
    assert (poll.status, poll.code) == (408, "route_not_ready")
    assert body(poll)["queue_state"] == "paused_capacity"
    assert body(poll)["queue_state_reason"] == "it starts"


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/api/v1/retrieve_future", "poll"),
        ("/api/v1/retrieve_futures", "poll"),
        ("/api/v1/forward_backward", "submit"),
        ("/api/v1/optim_step", "submit"),
        ("/api/v1/healthz", "submit"),
        ("/api/v1/retrieve_future/x", "submit"),
        ("/", "submit"),
    ],
)
def test_which_requests_poll(path: str, kind: Kind) -> None:
    assert answers.kind_of(path) == kind
