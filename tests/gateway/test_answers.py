"""The table of answers, cell by cell: what a caller hears for every state of a job."""

import json
from typing import Any

import pytest

from holdfast.gateway import answers
from holdfast.gateway.answers import CONFIRM, Answer, Kind, Route, Wait
from holdfast.jobs.records import STATES, Alive, Job, State
from holdfast.jobs.store import Seen
from holdfast.ledger.types import Entry


def seen(state: State, *, epoch: int = 3, alive: int | None = None) -> Seen:
    address = "127.0.0.1:9" if state == "RUNNING" else ""
    job = Job(account="a", id="j", state=state, epoch=epoch, address=address, reason="why not")
    sign = None if alive is None else Alive(epoch=alive, host="h")
    return Seen(job, Entry("/k", b"", 1, 1, 1), sign)


def body(answer: Answer) -> Any:
    return json.loads(answer.body)


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("kind", ["submit", "poll"])
@pytest.mark.parametrize("state", STATES)
def test_every_state(state: State, kind: Kind, fresh: bool) -> None:
    """Nothing final is said of a job that was not read for this; what is final says why, and that
    asking again is no use."""
    verdict = answers.decide(seen(state, alive=3), kind, fresh=fresh)
    if state == "RUNNING":
        assert verdict == Route("a", "j", 3, "127.0.0.1:9")
    elif state in ("PENDING", "CREATING"):
        assert isinstance(verdict, Wait)
        assert "why not" in verdict.reason
    elif not fresh:
        assert verdict is CONFIRM
    elif state == "PAUSED" and kind == "poll":
        assert isinstance(verdict, Wait), "a poll of a paused job is held"
        assert "resume" in verdict.reason
    else:
        assert isinstance(verdict, Answer)
        code, words = f"job_{state.lower()}", "why not"
        if state == "PAUSED":
            words = "holdfast jobs resume j"
        assert (verdict.status, verdict.code) == (423 if state == "PAUSED" else 410, code)
        assert words in body(verdict)["error"]["message"]
        assert ("x-should-retry", "false") in verdict.headers


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
