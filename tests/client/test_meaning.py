"""The client's rules, cell by cell."""

import itertools

import pytest

from holdfast.client.meaning import (
    Kind,
    Meaning,
    Outcome,
    Step,
    as_error,
    kind_of,
    meaning_of,
    next_step,
    outcome_of,
    words_of,
)
from holdfast.errors import Conflict, Denied, Gone, HoldfastError, Mistake, NotFound, Unavailable
from holdfast.jobs.records import STATES as STATES_OF_JOBS

BASE = "/training/v1/rlorTrainerJobs/acme/one"


@pytest.mark.parametrize(
    ("method", "path", "kind"),
    [
        ("POST", "/api/v1/forward_backward", "submit"),
        ("POST", f"{BASE}/api/v1/forward", "submit"),
        ("POST", f"{BASE}/api/v1/optim_step", "submit"),
        ("POST", f"{BASE}/api/v1/save_weights", "submit"),
        ("POST", f"{BASE}/api/v1/create_model", "submit"),
        ("POST", f"{BASE}/api/v1/retrieve_future", "poll"),
        ("POST", "/api/v1/retrieve_futures", "poll"),
        ("POST", f"{BASE}/api/v1/get_info", "poll"),
        # A 404 to these is an answer that clients learn from.
        ("POST", "/api/v1/client/dynamic_config", "other"),
        ("GET", "/api/v1/healthz", "other"),
        ("GET", "/api/v1/forward_backward", "other"),
        ("POST", "/api/v1/forward_backward/more", "other"),
        ("POST", "/forward_backward", "other"),
        ("POST", "/api/v1/", "other"),
        # An account cannot make its requests look like others.
        ("POST", "/training/v1/rlorTrainerJobs/api/v1/forward/api/v1/telemetry", "other"),
    ],
)
def test_kinds(method: str, path: str, kind: Kind) -> None:
    """What is sent again is named; everything else is not."""
    assert kind_of(method, path) == kind


@pytest.mark.parametrize(
    ("kind", "status", "code", "should_retry", "meaning"),
    [
        ("submit", 404, "", "", "ambiguous"),
        ("poll", 404, "", "", "ambiguous"),
        ("submit", 404, "something", "true", "ambiguous"),
        ("other", 404, "", "", "answer"),
        ("submit", 404, "job_not_found", "", "definite"),
        ("poll", 404, "job_gone", "", "definite"),
        ("submit", 404, "job_paused", "", "definite"),
        ("poll", 404, "", "false", "definite"),
        ("submit", 200, "", "", "answer"),
        ("submit", 503, "route_not_ready", "", "answer"),
        ("submit", 409, "job_paused", "false", "answer"),
        ("poll", 410, "job_gone", "false", "answer"),
        ("poll", 408, "", "", "answer"),
    ],
)
def test_meanings(kind: Kind, status: int, code: str, should_retry: str, meaning: Meaning) -> None:
    """Only a 404 that nobody vouches for is doubted."""
    assert meaning_of(kind, status, code, should_retry) == meaning


KINDS: tuple[Kind, ...] = ("submit", "poll")
MEANINGS: tuple[Meaning, ...] = ("answer", "definite", "ambiguous")
STATES = ("", "NOT_FOUND", *STATES_OF_JOBS)


@pytest.mark.parametrize("kind", KINDS)
def test_steps(kind: Kind) -> None:
    """Again only if it is in doubt and RUNNING; a poll never becomes a submit."""
    again: Step = "poll again" if kind == "poll" else "send again"
    for meaning, state in itertools.product(MEANINGS, STATES):
        step = next_step(kind, meaning, state)
        if meaning == "answer":
            assert step == "give", state
        elif meaning == "ambiguous" and state == "RUNNING":
            assert step == again
        else:
            assert step == "raise", (meaning, state)


@pytest.mark.parametrize(
    ("status", "code", "should_retry", "outcome"),
    [
        (200, "", "", "ok"),
        (204, "", "", "ok"),
        (404, "", "", "again"),
        (404, "unheard_of", "", "again"),
        (503, "route_not_ready", "", "again"),
        (404, "", "false", "none"),
        (405, "", "", "none"),
        (501, "", "", "none"),
        (404, "job_not_found", "false", "raise"),
        (404, "job_gone", "", "raise"),
        (503, "", "", "raise"),
        (503, "overloaded", "", "raise"),
        (500, "", "", "raise"),
        (401, "", "", "raise"),
        (410, "job_gone", "false", "raise"),
        (302, "", "", "raise"),
    ],
)
def test_probes(status: int, code: str, should_retry: str, outcome: Outcome) -> None:
    """A route that is on its way looks like two things; all else is an error at once."""
    assert outcome_of(status, code, should_retry) == outcome


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error":{"code":"job_gone","message":"deleted"}}', ("job_gone", "deleted")),
        (b'{"error":{"code":7}}', ("", "")),
        (b'{"error":"not found"}', ("", "not found")),
        (b'{"error":null}', ("", "")),
        (b"[" * 100_000, ("", "")),
        (b"[]", ("", "")),
        (b"", ("", "")),
        (b"<html>404</html>", ("", "")),
        (b'"\xff"', ("", "")),
        (b'{"error":{"code":"' + b"x" * 5000 + b'"}}', ("x" * 200, "")),
    ],
)
def test_words(body: bytes, words: tuple[str, str]) -> None:
    """Whatever a body is, it is read without harm."""
    assert words_of(body) == words


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, Mistake),
        (401, Denied),
        (403, Denied),
        (404, NotFound),
        (408, Unavailable),
        (409, Conflict),
        (410, Gone),
        (422, Mistake),
        (429, Unavailable),
        (500, Unavailable),
        (503, Unavailable),
    ],
)
def test_errors(status: int, kind: type[HoldfastError]) -> None:
    """An error's class says what the caller may do; its text has the code."""
    error = as_error(status, "some_code", "some words", "submitting")
    assert type(error) is kind
    assert str(error) == f"submitting: HTTP {status} (some_code: some words)"
