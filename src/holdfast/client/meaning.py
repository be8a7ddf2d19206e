"""What a request is, what an answer means, and what to do next. Pure: no clock, no socket.

A 404 from somebody's gateway means one of two things: "there is no such job", or "my route
table is behind". The answer itself does not say which; the control plane knows. Rules:

- Only submits and polls are ever sent again, and only after an *ambiguous* 404 while the
  control plane says RUNNING. Anything else is the caller's at once.
- A submit is sent again as it is: same bytes, so the same number. A gateway that answered 404
  had nowhere to send it, and a trainer that numbers operations drops a duplicate.
- A poll is polled again. It never leads to another submit: the operation runs, or has run.
- Whoever says that it is sure (our codes, `x-should-retry: false`) is believed.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from holdfast.errors import (
    Conflict,
    Denied,
    Gone,
    HoldfastError,
    Mistake,
    NotFound,
    Retriable,
    Unavailable,
)

__all__ = [
    "AGAIN",
    "RUNNING",
    "SHOULD_RETRY",
    "Kind",
    "Meaning",
    "Outcome",
    "Step",
    "as_error",
    "kind_of",
    "meaning_of",
    "next_step",
    "outcome_of",
    "words_of",
]

Kind = Literal["submit", "poll", "other"]
Meaning = Literal["answer", "definite", "ambiguous"]
Step = Literal["give", "send again", "poll again", "raise"]
Outcome = Literal["ok", "again", "none", "raise"]

SHOULD_RETRY: Final = "x-should-retry"
RUNNING: Final = "RUNNING"
ROUTE_NOT_READY: Final = "route_not_ready"
DEFINITE: Final = frozenset({"job_gone", "job_not_found", "job_paused"})
"""Codes of a gateway that has asked before it answered."""
AGAIN: Final = frozenset[Step]({"send again", "poll again"})
CODE_CHARS: Final = 200

_API = "/api/v1/"
_POLLS: Final = frozenset({"get_info", "retrieve_future", "retrieve_futures"})
"""They change nothing."""
_SUBMITS: Final = frozenset(
    {
        "asample",
        "create_model",
        "create_sampling_session",
        "create_session",
        "forward",
        "forward_backward",
        "forward_backward_references",
        "load_weights",
        "optim_step",
        "publish_weights",
        "save_weights",
        "save_weights_for_sampler",
        "unload_model",
    }
)


def kind_of(method: str, path: str) -> Kind:
    """What kind of request this is, by its path.

    What is not known is "other", and never sent again: several clients ask for things that a
    server may lack, and learn it from a 404.
    """
    _, api, name = path.rpartition(_API)
    if method != "POST" or not api:
        return "other"
    if name in _POLLS:
        return "poll"
    return "submit" if name in _SUBMITS else "other"


def meaning_of(kind: Kind, status: int, code: str, should_retry: str) -> Meaning:
    """What an answer means: "ambiguous" is the only one that anybody may doubt."""
    if kind == "other" or status != 404:
        return "answer"
    return "definite" if code in DEFINITE or should_retry == "false" else "ambiguous"


def next_step(kind: Kind, meaning: Meaning, state: str) -> Step:
    """What to do with an answer, as long as there is time left to try again.

    `state` is what the control plane says of the job; empty if it did not answer.
    """
    if meaning == "answer":
        return "give"
    if meaning == "definite" or state != RUNNING:
        return "raise"
    return "poll again" if kind == "poll" else "send again"


def outcome_of(status: int, code: str, should_retry: str) -> Outcome:
    """What a probe found: "none" is a server that says that it has no such thing."""
    if 200 <= status < 300:
        return "ok"
    if status == 404 and code not in DEFINITE:
        return "none" if should_retry == "false" else "again"
    if status in (405, 501):
        return "none"
    return "again" if status == 503 and code == ROUTE_NOT_READY else "raise"


def words_of(body: bytes) -> tuple[str, str]:
    """The code and the message of an error's body; empty where it has none."""
    try:
        said = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "", ""
    error = said.get("error") if isinstance(said, Mapping) else None
    if not isinstance(error, Mapping):
        return "", error[:CODE_CHARS] if isinstance(error, str) else ""
    return _text(error.get("code")), _text(error.get("message"))


def as_error(
    status: int, code: str, message: str, doing: str, *, should_retry: str = ""
) -> HoldfastError:
    """The error that an answer amounts to: its class says what the caller may do."""
    told = ": ".join(text for text in (code, message) if text)
    text = f"{doing}: HTTP {status}" + (f" ({told})" if told else "")
    kind = _class_of(status)
    if should_retry == "false" and issubclass(kind, Retriable):
        kind = Mistake
    return kind(text)


def _class_of(status: int) -> type[HoldfastError]:
    if status in (408, 425, 429) or status >= 500:
        return Unavailable
    known: dict[int, type[HoldfastError]] = {
        401: Denied,
        403: Denied,
        404: NotFound,
        409: Conflict,
        410: Gone,
        424: NotFound,
    }
    return known.get(status, Mistake)


def _text(value: Any) -> str:
    return value[:CODE_CHARS] if isinstance(value, str) else ""
