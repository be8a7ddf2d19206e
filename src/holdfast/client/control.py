"""Asks the control plane what state a job is in: the authority behind every doubted 404.

When a route is lost, hundreds of requests are in doubt at once. They share their questions:

- Whoever asks joins a question that has not been sent yet, never one that is under way: an
  answer is always newer than the doubt.
- Questions are sent at least `control_pace_s` apart, per control plane and event loop. Whoever
  asks after a pause waits for nothing.
- A question has `timeout_s`, counted in steps of the event loop's own time: a loop that is busy
  with our own requests does not use it up.

Every question has a connection of its own: an old one may lead to a replica that has been
taken out. What is kept is the HTTP client.
"""

import asyncio
import copy
import math
import ssl
import threading
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote
from weakref import WeakKeyDictionary

import httpx
import msgspec

from holdfast.client.addresses import check_key, check_url, proxy_of, verify
from holdfast.client.bodies import fault_of, plain, raw_of
from holdfast.client.meaning import as_error, words_of
from holdfast.errors import Corrupt, HoldfastError, Mistake, TimedOut, TooLarge
from holdfast.timeouts import DEFAULTS

__all__ = ["ControlPlane"]

MAX_BODY_BYTES: Final = 1 << 20
_STEP_S = 0.1
"""How finely the loop's own time is counted: the clock of `_within`, no setting."""
_PREFIX = "JOB_STATE_"
_CHARS = 100


@dataclass(frozen=True, slots=True, weakref_slot=True)
class ControlPlane:
    """Where a job's state is asked for, and as whom. Safe to share between event loops."""

    url: str
    account: str
    job: str
    api_key: str = field(default="", repr=False)
    timeout_s: float = DEFAULTS.control_call_s
    tls: ssl.SSLContext | None = None

    def __post_init__(self) -> None:
        check_url(self.url)
        check_key(self.api_key)
        if not 0 < self.timeout_s <= 60:
            raise Mistake("a control plane has more than 0 and up to 60 s to answer")

    async def state(self) -> str:
        """The job's state without its prefix, or NOT_FOUND. Raises when there is no answer."""
        return await _desk_of(self).state(self)


class _Question:
    """Asked once, for everybody who came before it was sent."""

    task: asyncio.Task[str | HoldfastError]
    askers = 0


class _Desk:
    """The questions of one event loop to one control plane. Does not keep the latter alive."""

    def __init__(self) -> None:
        self._client: httpx.AsyncClient | None = None
        self._next: _Question | None = None
        self._sent_s = -math.inf

    async def state(self, plane: ControlPlane) -> str:
        question = self._next
        if question is None:
            question = self._next = _Question()
            question.task = asyncio.create_task(self._put(plane))
        question.askers += 1
        try:
            said = await asyncio.shield(question.task)
        finally:
            question.askers -= 1
            if not question.askers:
                question.task.cancel()  # nobody wants to know any more
                self._next = None if self._next is question else self._next
        if isinstance(said, HoldfastError):
            raise copy.copy(said)  # an error of one's own, not one with everybody's traces
        return said

    async def _put(self, plane: ControlPlane) -> str | HoldfastError:
        now = asyncio.get_running_loop().time
        await asyncio.sleep(max(0.0, self._sent_s + DEFAULTS.control_pace_s - now()))
        self._sent_s, self._next = now(), None
        try:
            return _state(*await _within(plane.timeout_s, self._ask(plane)))
        except HoldfastError as error:
            return error.with_traceback(None)

    async def _ask(self, plane: ControlPlane) -> tuple[int, bytes]:
        account, job = quote(plane.account, safe=""), quote(plane.job, safe="")
        url = f"{plane.url.rstrip('/')}/v1/accounts/{account}/rlorTrainerJobs/{job}"
        headers = {
            "accept": "application/json",
            "accept-encoding": "gzip",
            "cache-control": "no-cache",
        }
        if plane.api_key:
            headers["x-api-key"] = plane.api_key
            headers["authorization"] = f"Bearer {plane.api_key}"
        self._client = self._client or _client(plane)
        try:
            async with self._client.stream("GET", url, headers=headers) as response:
                raw, whole = await raw_of(response, MAX_BODY_BYTES)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise fault_of(error, "the control plane was not reached") from None
        try:
            if whole:
                coding = response.headers.get("content-encoding", "")
                return response.status_code, plain(raw, coding, MAX_BODY_BYTES)
        except TooLarge:
            pass
        raise Corrupt(f"the control plane's answer has over {MAX_BODY_BYTES} bytes")


class _Job(msgspec.Struct):
    state: str


def _state(status: int, body: bytes) -> str:
    if status == 404:
        return "NOT_FOUND"
    if status != 200:
        raise as_error(status, *words_of(body), "asking the control plane")
    try:
        said = msgspec.json.decode(body, type=_Job)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise Corrupt("the control plane's answer has no state of a job") from None
    return said.state.removeprefix(_PREFIX)[:_CHARS]


def _client(plane: ControlPlane) -> httpx.AsyncClient:
    # No connection outlives its question, so this needs no closing.
    return httpx.AsyncClient(
        verify=verify(plane.tls),
        proxy=proxy_of(plane.url),
        trust_env=False,  # slow, and all that it would give is the proxy
        timeout=None,  # noqa: S113 -- the whole question is bounded
        limits=httpx.Limits(max_keepalive_connections=0),
    )


_lock = threading.Lock()
_desks: WeakKeyDictionary[asyncio.AbstractEventLoop, WeakKeyDictionary[ControlPlane, _Desk]] = (
    WeakKeyDictionary()
)


def _desk_of(plane: ControlPlane) -> _Desk:
    loop = asyncio.get_running_loop()
    with _lock:  # event loops have threads of their own
        if loop not in _desks:
            for old in [one for one in _desks if one.is_closed()]:
                del _desks[old]
            _desks[loop] = WeakKeyDictionary()
        return _desks[loop].setdefault(plane, _Desk())


async def _within(
    limit_s: float, work: Coroutine[Any, Any, tuple[int, bytes]]
) -> tuple[int, bytes]:
    """Await, for so many steps of the loop: one that takes long for our sake counts as one."""
    task = asyncio.ensure_future(work)
    # What comes too late is taken note of, so that nobody logs it as forgotten.
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    left_s = limit_s
    try:
        while left_s > 0:
            step_s = min(_STEP_S, left_s)
            await asyncio.wait((task,), timeout=step_s)
            if task.done():
                return task.result()
            left_s -= step_s
        raise TimedOut(f"the control plane was silent for {limit_s:.3g} s")
    finally:
        task.cancel()
