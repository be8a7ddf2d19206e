"""A small client of the Tinker protocol, for callers that number operations themselves.

    async with connect(target) as client:
        future = await client.submit("optim_step", model_id, 7, {"adam_params": {...}})
        metrics = await future.result()

The caller gives the numbers, so a successor may send what its predecessor may have sent: the
trainer knows (model, number) and does it once. It may attach to a model that exists, and take
up a future by its request id.

- A submit is sent until there is a promise, for `sdk_submit_s`: always the same bytes.
- A poll is repeated until there is a result. Nothing that a poll meets leads to a submit.
- "Gone" and "not found" are raised at once; behind a gateway that may be wrong about it, give
  the target a control plane.
"""

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Self, TypeVar

import httpx
import msgspec

from holdfast import events
from holdfast.client.bodies import fault_of, plain, raw_of
from holdfast.client.happenings import Retried
from holdfast.client.meaning import SHOULD_RETRY, as_error, words_of
from holdfast.client.target import Target
from holdfast.client.warmup import Probe
from holdfast.errors import HoldfastError, Mistake, TimedOut, TooLarge, Unavailable
from holdfast.retry import MAX_S, Attempt, Clock, Policy

__all__ = ["Client", "Future", "connect"]

AGAIN: Final = Policy(attempts=10_000, base_s=0.2, factor=2.0, max_s=5.0)
"""How far apart the tries of a request are; how long there are any depends on the request."""
RESULT_BYTES: Final = 1 << 30
ANSWER_BYTES: Final = 1 << 20
"""As much is read of answers that are not results."""
_JSON = "application/json"

T = TypeVar("T")


def connect(target: Target, *, warm_up_s: float | None = None, **options: Any) -> "Client":
    """A `Client` that warms up when it is entered (`async with`). 0 s: no warm-up."""
    limit_s = target.timeouts.warm_up_s if warm_up_s is None else warm_up_s
    return Client(target, warm_up_s=limit_s, **options)


class Client:
    """Talks to one job's trainer. Belongs to one event loop; use `async with`."""

    def __init__(
        self,
        target: Target,
        *,
        warm_up_s: float = 0.0,
        probe: Probe | None = None,
        model_id: str = "",
        max_result_bytes: int = RESULT_BYTES,
        clock: Clock | None = None,
    ) -> None:
        """`clock` is the system's by default."""
        self._clock = clock
        self.target = target
        self.timeouts = target.timeouts
        self._max_result_bytes = max_result_bytes
        self._warm_up_s, self._probe, self._model_id = warm_up_s, probe, model_id
        headers = {"x-api-key": target.api_key} if target.api_key else {}
        self._http = httpx.AsyncClient(
            base_url=target.base_url,
            headers=headers,
            transport=target.transport(),
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

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Let go of the connections. Futures can be taken up again by another client."""
        await self._http.aclose()

    # ---- sessions and models -----------------------------------------------------

    async def create_session(self, **more: Any) -> str:
        """Begin a session; it lives as long as it is sent heartbeats.

        It has no number: if the answer gets lost, the next attempt begins another one, and the
        first ends for want of heartbeats.
        """
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
        return await self._call("get_info", {"type": "get_info", "model_id": model_id})

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
            content_type = _JSON
        said = await self._call(op, body, content_type)
        return self.future(_member(said, "request_id"))

    def future(self, request_id: str) -> "Future":
        """Take up a future by its request id, whoever submitted it."""
        return Future(self, request_id)

    # ---- HTTP --------------------------------------------------------------------

    async def _call(
        self, name: str, ask: Mapping[str, Any] | bytes, content_type: str = _JSON
    ) -> dict[str, Any]:
        body = ask if isinstance(ask, bytes) else msgspec.json.encode(ask)
        if not name.replace("_", "").isalnum() or not name.isascii():
            raise Mistake(f"{name[:80]!r} is not the name of an operation")
        limit_s = self.timeouts.sdk_submit_s

        async def once() -> dict[str, Any]:
            answer = await self._post(name, body, content_type, self.timeouts.client_call_s)
            if answer.status != 200:
                raise answer.error(name)
            return answer.json(name)

        try:
            async with asyncio.timeout(limit_s):
                return await self._again(name, once, limit_s)
        except TimeoutError:
            raise TimedOut(f"{name}: no answer within {limit_s:.3g} s") from None

    async def _again(
        self, name: str, once: Callable[[], Awaitable[T]], limit_s: float = MAX_S
    ) -> T:
        """Call until there is an answer, and tell of every failure."""
        policy = replace(AGAIN, deadline_s=limit_s)

        def tell(attempt: Attempt) -> None:
            if attempt.error is not None:
                events.emit(
                    Retried(
                        name=name,
                        failures=attempt.attempt,
                        verdict=attempt.verdict,
                        error=str(attempt.error)[:500],
                        delay_s=attempt.delay_s,
                    )
                )

        return await policy.acall(once, on_attempt=tell, clock=self._clock)

    async def _post(
        self,
        name: str,
        body: bytes,
        content_type: str,
        limit_s: float,
        accept: str = _JSON,
        limit: int = ANSWER_BYTES,
    ) -> "_Answer":
        headers = {"content-type": content_type, "accept": accept, "accept-encoding": "gzip"}
        timeout = httpx.Timeout(limit_s, connect=self.timeouts.client_connect_s)
        try:
            async with self._http.stream(
                "POST", f"/api/v1/{name}", content=body, headers=headers, timeout=timeout
            ) as response:
                raw, whole = await raw_of(response, limit)
        except (httpx.RequestError, httpx.InvalidURL) as error:
            # It may have arrived. Sending it again is right all the same: it has a number, or
            # changes nothing, or begins a session; one that nobody knows of ends by itself.
            raise fault_of(error, name) from None
        if not whole:
            raise TooLarge(f"{name}: an answer of more than {limit} bytes")
        unpacked = plain(raw, response.headers.get("content-encoding", ""), limit)
        return _Answer(response.status_code, response.headers, unpacked)

    async def _poll(self, request_id: str, accept: str) -> Any:
        """One poll: the result, or that it is `_Pending`."""
        body = msgspec.json.encode({"request_id": request_id, "allow_metadata_only": False})
        answer = await self._post(
            "retrieve_future",
            body,
            _JSON,
            self.timeouts.sdk_poll_s,
            accept,
            self._max_result_bytes,
        )
        if answer.status == 408:
            return _Pending(answer.wish_s)
        if answer.status != 200:
            raise answer.error(f"future {request_id}")
        if answer.kind != _JSON and answer.body and answer.kind in _kinds(accept):
            return answer.body
        said = answer.json(f"future {request_id}")
        if said.get("type") == "try_again":
            return _Pending(answer.wish_s)
        if "error" in said:
            kind = Mistake if said.get("category") == "user" else HoldfastError
            raise kind(f"operation {request_id} failed: {str(said['error'])[:2000]}")
        return said


class Future:
    """The result of an operation, on its way. Its `request_id` is all that is needed later."""

    def __init__(self, client: Client, request_id: str) -> None:
        self._client = client
        self.request_id = request_id

    async def result(self, *, timeout_s: float | None = None, accept: str = _JSON) -> Any:
        """Poll until there is a result: JSON decoded, another type that `accept` names as bytes.

        What is neither (a page, or nothing at all) is no result, and polled again. Raises
        `Mistake` when the operation was refused, `TooLarge` beyond the client's
        `max_result_bytes`, `Gone` or `NotFound` when nobody will ever answer, `TimedOut` after
        `timeout_s` (an hour, if the target's `timeouts` say nothing else); the operation goes on
        after the last.
        """
        if "*" in accept:
            raise Mistake("ask for a content type by its name: anything else is no result")
        times, now, begun = self._client.timeouts, asyncio.get_running_loop().time, 0.0
        limit_s = times.result_s if timeout_s is None else timeout_s

        async def poll() -> Any:
            nonlocal begun
            begun = now()
            return await self._client._poll(self.request_id, accept)

        try:
            async with asyncio.timeout(limit_s):
                while isinstance(
                    said := await self._client._again("retrieve_future", poll), _Pending
                ):
                    # A poll that was held has had its pause; a wish counts from the answer.
                    pause_s = begun + times.poll_pace_s - now()
                    await asyncio.sleep(max(0.0, pause_s, said.wish_s))
                return said
        except TimeoutError:
            raise TimedOut(
                f"no result of {self.request_id} after {limit_s:.3g} s: ask again later"
            ) from None


@dataclass(frozen=True, slots=True)
class _Pending:
    wish_s: float


@dataclass(frozen=True, slots=True)
class _Answer:
    """What came, whole and unpacked."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def kind(self) -> str:
        """Its content type, without parameters."""
        return _kind(self.headers.get("content-type", ""))

    @property
    def wish_s(self) -> float:
        """How long the other side asks us to wait; nonsense is no wish."""
        try:
            wish_s = float(self.headers.get("retry-after-ms", "0")) / 1000
        except ValueError:
            return 0.0
        return wish_s if 0 < wish_s < math.inf else 0.0

    def error(self, doing: str) -> HoldfastError:
        """What it amounts to, as an error."""
        should_retry = self.headers.get(SHOULD_RETRY, "")
        error = as_error(self.status, *words_of(self.body), doing, should_retry=should_retry)
        error.retry_after_s = self.wish_s
        return error

    def json(self, doing: str) -> dict[str, Any]:
        """The object that it holds. Raises `Unavailable`: no trainer answers anything else."""
        if self.kind == _JSON:
            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                return msgspec.json.decode(self.body, type=dict[str, Any])
        raise Unavailable(f"{doing}: the answer is no JSON object ({self.kind[:80]!r})")


def _kind(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def _kinds(accept: str) -> set[str]:
    return {_kind(one) for one in accept.split(",")}


def _member(said: Mapping[str, Any], name: str) -> str:
    value = said.get(name)
    if not isinstance(value, str):
        raise Mistake(f"the answer has no {name}: is this a Tinker server?")
    return value
