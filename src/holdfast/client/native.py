"""A small client of the Tinker protocol, for callers that number operations themselves.

    async with connect(target) as client:
        future = await client.submit("optim_step", model_id, 7, {"adam_params": {...}})
        metrics = await future.result()

The caller gives the numbers, so a successor may send what its predecessor may have sent: the
trainer knows (model, number) and does it once. It may attach to a model that exists, and take
up a future by its request id.

- A submit is sent until there is a promise, for `SUBMIT.deadline_s`: always the same bytes.
- A poll is repeated until there is a result. Nothing that a poll meets leads to a submit.
- "Gone" and "not found" are raised at once; behind a gateway that may be wrong about it, give
  the target a control plane.
"""

import asyncio
import contextlib
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, Self

import httpx
import msgspec

from holdfast import events
from holdfast.client.happenings import Retried
from holdfast.client.meaning import SHOULD_RETRY, as_error, words_of
from holdfast.client.target import Target
from holdfast.client.warmup import LIMIT_S, Probe
from holdfast.errors import HoldfastError, Mistake, Retriable, TimedOut, Unavailable
from holdfast.retry import Attempt, Policy, delay_s

__all__ = ["Client", "Future", "connect"]

SUBMIT: Final = Policy(
    attempts=1000, base_s=0.2, factor=2.0, max_s=5.0, jitter=0.5, deadline_s=300.0
)
POLL_S: Final = 45.0
"""Servers hold a poll for less than that."""
PACE_S: Final = 0.2
"""Polls that are not held are at least so far apart."""
RESULT_S: Final = 3600.0
_TIMEOUT = httpx.Timeout(60.0, connect=10.0)
_PENDING = object()


def connect(
    target: Target,
    *,
    warm_up_s: float = LIMIT_S,
    probe: Probe | None = None,
    model_id: str = "",
) -> "Client":
    """A client that warms up when it is entered (`async with`). 0 s: no warm-up."""
    return Client(target, warm_up_s=warm_up_s, probe=probe, model_id=model_id)


class Client:
    """Talks to one job's trainer. Belongs to one event loop; use `async with`."""

    def __init__(
        self,
        target: Target,
        *,
        warm_up_s: float = 0.0,
        probe: Probe | None = None,
        model_id: str = "",
    ) -> None:
        self.target = target
        self._warm_up_s, self._probe, self._model_id = warm_up_s, probe, model_id
        headers = {"x-api-key": target.api_key} if target.api_key else {}
        self._http = httpx.AsyncClient(
            base_url=target.base_url,
            headers=headers,
            transport=target.transport(),
            timeout=_TIMEOUT,
        )

    async def __aenter__(self) -> Self:
        try:
            if self._warm_up_s:
                warm_up = self.target.warm_up(
                    limit_s=self._warm_up_s, probe=self._probe, model_id=self._model_id
                )
                await warm_up.run()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Let go of the connections. Futures can be taken up again by another client."""
        await self._http.aclose()

    # ---- sessions and models -----------------------------------------------------

    async def create_session(self, **more: Any) -> str:
        """Begin a session; it lives as long as it is sent heartbeats."""
        ask = {
            "type": "create_session",
            "tags": [],
            "user_metadata": {},
            "sdk_version": "",
            **more,
        }
        return _member(await self._call("create_session", ask), "session_id")

    async def heartbeat(self, session_id: str) -> None:
        """Keep a session alive. Raises `Gone` when it has ended."""
        await self._call(
            "session_heartbeat", {"type": "session_heartbeat", "session_id": session_id}
        )

    async def create_model(
        self, session_id: str, model_seq_id: int, base_model: str, **more: Any
    ) -> str:
        """Create model number `model_seq_id` of a session; the same number is the same model."""
        ask = {
            "type": "create_model",
            "session_id": session_id,
            "model_seq_id": model_seq_id,
            "base_model": base_model,
            **more,
        }
        promise = _member(await self._call("create_model", ask), "request_id")
        return _member(await self.future(promise).result(), "model_id")

    async def info(self, model_id: str) -> dict[str, Any]:
        """What a model is. Raises `NotFound` when there is none."""
        said = await self._call("get_info", {"type": "get_info", "model_id": model_id})
        return dict(said)

    # ---- operations --------------------------------------------------------------

    async def submit(
        self,
        op: str,
        model_id: str,
        seq_id: int,
        payload: Mapping[str, Any] | bytes,
        *,
        content_type: str = "",
    ) -> "Future":
        """Hand over operation `seq_id` of a model; returns when the trainer has promised it.

        A mapping is sent as JSON, with model and number added. Bytes are sent as they are,
        and carry model and number themselves.
        """
        if type(seq_id) is not int or seq_id < 0:
            raise Mistake(f"an operation's number is 0 or more, not {seq_id!r}")
        if isinstance(payload, bytes):
            if not content_type:
                raise Mistake("give the content_type of a payload in bytes")
            body = payload
        else:
            for name, value in (("model_id", model_id), ("seq_id", seq_id)):
                if payload.get(name, value) != value:
                    raise Mistake(f"the payload has another {name} than the call")
            body = msgspec.json.encode({**payload, "model_id": model_id, "seq_id": seq_id})
            content_type = "application/json"
        said = await self._call(op, body, content_type)
        return self.future(_member(said, "request_id"))

    def future(self, request_id: str) -> "Future":
        """Take up a future by its request id, whoever submitted it."""
        return Future(self, request_id)

    # ---- HTTP --------------------------------------------------------------------

    async def _call(
        self, name: str, ask: Mapping[str, Any] | bytes, content_type: str = "application/json"
    ) -> Any:
        body = ask if isinstance(ask, bytes) else msgspec.json.encode(ask)
        if not name.replace("_", "").isalnum() or not name.isascii():
            raise Mistake(f"{name[:80]!r} is not the name of an operation")

        async def once() -> Any:
            response = await self._post(name, body, content_type, _TIMEOUT)
            if response.status_code != 200:
                raise _error(response, name)
            return _decode(response)

        def tell(attempt: Attempt) -> None:
            if attempt.error is not None:
                _tell(name, attempt.attempt, attempt.verdict, attempt.error, attempt.delay_s)

        return await SUBMIT.acall(once, on=Retriable, on_attempt=tell)

    async def _post(
        self,
        name: str,
        body: bytes,
        content_type: str,
        timeout: httpx.Timeout,
        accept: str = "application/json",
    ) -> httpx.Response:
        headers = {"content-type": content_type, "accept": accept}
        try:
            return await self._http.post(
                f"/api/v1/{name}", content=body, headers=headers, timeout=timeout
            )
        except httpx.TransportError as error:
            # It may have arrived. Sending it again is right all the same: it has a number.
            raise Unavailable(f"{name}: {type(error).__name__}: {error}") from error

    async def _poll(self, request_id: str, accept: str) -> Any:
        """One poll: the result, or `_PENDING`."""
        body = msgspec.json.encode({"request_id": request_id, "allow_metadata_only": False})
        timeout = httpx.Timeout(POLL_S, connect=10.0)
        response = await self._post("retrieve_future", body, "application/json", timeout, accept)
        if response.status_code == 408:
            return _PENDING
        if response.status_code != 200:
            raise _error(response, f"future {request_id}")
        if not response.headers.get("content-type", "").startswith("application/json"):
            return response.content
        said = _decode(response)
        if said.get("type") == "try_again":
            return _PENDING
        if "error" in said:
            kind = Mistake if said.get("category") == "user" else HoldfastError
            raise kind(f"operation {request_id} failed: {str(said['error'])[:2000]}")
        return said


class Future:
    """The result of an operation, on its way. Its `request_id` is all that is needed later."""

    def __init__(self, client: Client, request_id: str) -> None:
        self._client = client
        self.request_id = request_id

    async def result(
        self, *, timeout_s: float = RESULT_S, accept: str = "application/json"
    ) -> Any:
        """Poll until there is a result: JSON decoded, anything else as bytes.

        Raises `Mistake` when the operation was refused, `Gone` or `NotFound` when nobody will
        ever answer, `TimedOut` after `timeout_s`; the operation goes on after the last.
        """
        until, failures = time.monotonic() + timeout_s, 0
        while True:
            begun = time.monotonic()
            if begun > until:
                raise TimedOut(
                    f"no result of {self.request_id} after {timeout_s:.3g} s: ask again later"
                )
            pause_s = PACE_S
            try:
                said = await self._client._poll(self.request_id, accept)
                failures = 0
                if said is not _PENDING:
                    return said
            except Retriable as error:
                failures += 1
                pause_s = max(PACE_S, delay_s(SUBMIT, failures, 0.0))
                _tell("retrieve_future", failures, "retry", error, pause_s)
            # A poll that was held has had its pause.
            await asyncio.sleep(max(0.0, begun + pause_s - time.monotonic()))


def _tell(name: str, failures: int, verdict: str, error: Exception, pause_s: float) -> None:
    events.emit(
        Retried(
            name=name, failures=failures, verdict=verdict, error=str(error)[:500], delay_s=pause_s
        )
    )


def _error(response: httpx.Response, doing: str) -> HoldfastError:
    should_retry = response.headers.get(SHOULD_RETRY, "")
    words = words_of(response.content)
    error = as_error(response.status_code, *words, doing, should_retry=should_retry)
    with contextlib.suppress(ValueError):  # nonsense is no wish
        error.retry_after_s = float(response.headers.get("retry-after-ms", "0")) / 1000
    return error


def _decode(response: httpx.Response) -> dict[str, Any]:
    try:
        return msgspec.json.decode(response.content or b"{}", type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Unavailable(
            f"an answer that is not JSON came from {response.request.url}"
        ) from error


def _member(said: Mapping[str, Any], name: str) -> str:
    value = said.get(name)
    if not isinstance(value, str):
        raise Mistake(f"the answer has no {name}: is this a Tinker server?")
    return value
