"""Verified retry, below the place where a client library takes sequence numbers.

`VerifiedTransport` wraps the transport of an httpx client. What it sends again is the very
request that it was given, so an operation keeps its number and a trainer sees a duplicate
for what it is. `meaning` has the rules; every decision is an event (`Doubted`).

Bounds: time, not tries. Waiting and asking end after `POLICY.deadline_s`, and every request has
that budget anew. A stray 404 costs one short wait; a route that stays away for long is asked
for every `POLICY.max_s`. The time that the other side takes to answer is not counted: a poll
may be held for long before its 404, and has its budget nevertheless. Client libraries bound
their requests themselves.
"""

import asyncio
import random
import time
from collections.abc import Callable
from typing import Final

import httpx

from holdfast import events
from holdfast.client.bodies import plain, raw_of
from holdfast.client.control import ControlPlane
from holdfast.client.happenings import Doubted
from holdfast.client.meaning import (
    AGAIN,
    RUNNING,
    SHOULD_RETRY,
    Kind,
    kind_of,
    meaning_of,
    next_step,
    words_of,
)
from holdfast.errors import HoldfastError
from holdfast.events import Event
from holdfast.retry import Attempt, Policy
from holdfast.timeouts import DEFAULTS

__all__ = ["POLICY", "VerifiedTransport"]

POLICY: Final = Policy(
    attempts=10_000, base_s=0.1, factor=2.0, max_s=2.0, jitter=0.25, deadline_s=DEFAULTS.doubt_s
)
"""After 0.1, 0.2, 0.4 … 2 s, until 30 s are used up."""
MAX_BODY_BYTES: Final = 1 << 20
"""As much of a 404's body is kept; what is behind it says nothing that anybody reads."""


class VerifiedTransport(httpx.AsyncBaseTransport):
    """Sends a submit or poll again after a 404 that the control plane contradicts."""

    def __init__(
        self,
        inner: httpx.AsyncBaseTransport,
        control: ControlPlane | None,
        *,
        policy: Policy = POLICY,
        emit: Callable[[Event], None] = events.emit,
    ) -> None:
        self.inner, self.policy, self.emit = inner, policy, emit
        self._control = control

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request, and again as long as that is right."""
        kind = kind_of(request.method, request.url.path)
        if self._control is None or kind == "other":
            return await self.inner.handle_async_request(request)
        if not isinstance(request.stream, httpx.ByteStream):
            await request.aread()  # what is sent twice must be the same twice
        call = _Call(self, self._control, request, kind)
        try:
            return await self.policy.acall(
                call.send,
                on=_NotFound,
                verify=call.ask,
                # A question bounds itself; what is left is the deadline.
                verify_timeout_s=self.policy.deadline_s,
                on_attempt=call.tell,
                clock=call,
            )
        except _NotFound as error:
            # Given up here, so whoever is above must not begin again.
            if SHOULD_RETRY in error.response.headers:
                error.response.headers[SHOULD_RETRY] = "false"
            return error.response

    async def aclose(self) -> None:
        """Close the transport below."""
        await self.inner.aclose()


class _NotFound(Exception):
    def __init__(self, response: httpx.Response) -> None:
        super().__init__("404")
        self.response = response


class _Call:
    """One request with all its attempts; also the clock of its policy."""

    random = random.SystemRandom()
    sleep = staticmethod(asyncio.sleep)

    def __init__(
        self, above: VerifiedTransport, control: ControlPlane, request: httpx.Request, kind: Kind
    ) -> None:
        self._above, self._control, self._request = above, control, request
        self._kind: Kind = kind
        self._held_s = 0.0
        self._until = self.now() + above.policy.deadline_s
        self._said = ""

    def now(self) -> float:
        """Time, but for the time that the other side took."""
        return time.monotonic() - self._held_s

    async def send(self) -> httpx.Response:
        """Send the request once. Raises `_NotFound` for a 404 that may not be true."""
        self._said = ""
        begun = time.monotonic()
        try:
            response = await self._above.inner.handle_async_request(self._request)
            if response.status_code != 404:
                return response
            response, body = await _whole(response)
        finally:
            self._held_s += time.monotonic() - begun
        code, _ = words_of(body)
        should_retry = response.headers.get(SHOULD_RETRY, "")
        if meaning_of(self._kind, 404, code, should_retry) == "ambiguous":
            raise _NotFound(response)
        return response

    async def ask(self, _error: Exception, _attempt: int) -> bool:
        """Whether the control plane contradicts the 404."""
        self._said = "nothing"
        try:
            state = self._said = await self._control.state()
        except Exception as error:
            self._said = f"nothing ({type(error).__name__}: {error})"[:200]
            raise
        return next_step(self._kind, "ambiguous", state) in AGAIN

    def tell(self, attempt: Attempt) -> None:
        """Make an event of a decision."""
        if attempt.verdict == "permanent":
            return  # the connection broke: not a 404
        failures = attempt.attempt
        if attempt.verdict == "recovered":
            failures, step = failures - 1, "recovered"
        else:
            step = next_step(
                self._kind, "ambiguous", RUNNING if attempt.verdict == "retry" else ""
            )
        self._above.emit(
            Doubted(
                kind=self._kind,
                path=self._request.url.path[:200],
                failures=failures,
                left_s=max(0.0, self._until - self.now()),
                control=self._said,
                step=step,
                delay_s=attempt.delay_s,
                detail=attempt.verdict,
            )
        )


async def _whole(response: httpx.Response) -> tuple[httpx.Response, bytes]:
    """The answer with its body, of bounded size, and the body unpacked, if it can be."""
    kept, _ = await raw_of(response, MAX_BODY_BYTES)
    whole = httpx.Response(
        response.status_code, headers=response.headers, stream=httpx.ByteStream(kept)
    )
    try:
        return whole, plain(kept, response.headers.get("content-encoding", ""), MAX_BODY_BYTES)
    except HoldfastError:
        return whole, b""
