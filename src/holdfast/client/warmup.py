"""Warm-up at connect: the data path must answer several times in a row before it is used.

- A probe takes the path that training calls take, each on a connection of its own: three
  successes on one connection prove one replica of a gateway.
- A 404, `route_not_ready`, a page instead of JSON (a load balancer's own), and no answer within
  `probe_s` are what a route that is on its way looks like: tried again with backoff, and the
  count begins anew. A success makes the waits short again. Any other error is raised at once.
- If a control plane is known and says that the job is gone, that is raised at once as well.
- It ends after `limit_s`, whatever happens.

What is probed: a server's capabilities may name a path as `probe`; it runs a small forward
pass without touching any model or its numbers. Otherwise a model's `get_info`, if the caller
knows one; otherwise the capabilities. Those two prove a route, not an engine: they have been
seen to answer 200 on a server whose engine had died. A caller who knows better gives `probe`.
"""

import asyncio
import contextlib
import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final, NoReturn

import httpx
import msgspec

from holdfast import events
from holdfast.client.addresses import check_key, check_url, proxy_of, verify
from holdfast.client.bodies import fault_of
from holdfast.client.control import ControlPlane
from holdfast.client.happenings import Probed, Ready
from holdfast.client.meaning import SHOULD_RETRY, Outcome, as_error, outcome_of, words_of
from holdfast.errors import Gone, HoldfastError, Mistake, TimedOut, Unavailable
from holdfast.events import Event
from holdfast.jobs.records import GONE
from holdfast.retry import Policy
from holdfast.timeouts import DEFAULTS

__all__ = ["Probe", "WarmUp"]

SUCCESSES: Final = 3
BACKOFF: Final = Policy(
    attempts=10_000, base_s=0.1, factor=2.0, max_s=0.5, jitter=0.25, deadline_s=DEFAULTS.warm_up_s
)
"""Waits stay short: the first probes after a route is there may meet a stray 404 as well."""
_CAPABILITIES = "/api/v1/get_server_capabilities"
_INFO = "/api/v1/get_info"
_MAX_BODY_BYTES = 1 << 20
_GONE: Final = GONE | {"NOT_FOUND"}
"""What the control plane says of a job that no route will ever lead to again by itself."""

Probe = Callable[[httpx.AsyncClient], Awaitable[httpx.Response]]
"""Sends something that computes, with a client that has the data path as its base URL.

Only an answer that is a JSON object counts as a success."""


class _NotReady(Unavailable):
    """The route is on its way."""


@dataclass(kw_only=True)
class WarmUp:
    """One warm-up of one data path: `await WarmUp(base_url=..., api_key=...).run()`."""

    base_url: str
    api_key: str = field(default="", repr=False)
    control: ControlPlane | None = None
    model_id: str = ""
    probe: Probe | None = None
    limit_s: float = DEFAULTS.warm_up_s
    probe_s: float = DEFAULTS.probe_s
    """How long one probe may take; a slow one is tried again within `limit_s`."""
    backoff: Policy = BACKOFF
    """How far apart the probes are; its deadline is `limit_s`."""
    tls: ssl.SSLContext | None = None
    emit: Callable[[Event], None] = events.emit

    def __post_init__(self) -> None:
        check_url(self.base_url)
        check_key(self.api_key)
        if not 0 < self.limit_s <= 3600 or not self.probe_s > 0:
            raise Mistake("a warm-up takes more than 0 s and an hour at most")
        self._offer: str | None = None  # not known; "" is known not to be
        self._streak = self._probes = 0
        self._last: HoldfastError | None = None

    async def run(self) -> None:
        """Probe until it is ready. Raises `TimedOut`, or what a probe met."""
        begun = time.monotonic()
        backoff = replace(self.backoff, deadline_s=self.limit_s)
        try:
            async with asyncio.timeout(self.limit_s):
                while self._streak < SUCCESSES:
                    await backoff.acall(self._try, on=_NotReady)
        except (_NotReady, TimeoutError):
            raise TimedOut(
                f"{self.base_url} was not ready within {self.limit_s:.3g} s "
                f"({self._probes} probes; the last: {self._last})"
            ) from self._last
        took_s = time.monotonic() - begun
        computed = bool(self.probe or self._offer)
        self.emit(Ready(probes=self._probes, took_s=took_s, computed=computed))

    async def _try(self) -> None:
        """Probe until there is one more success in a row. Raises `_NotReady` on a setback."""
        try:
            response = await self._once()
        except (httpx.TimeoutException, TimeoutError):
            await self._judge_silence()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise fault_of(error, f"probing {self.base_url}") from None
        else:
            await self._judge(response)

    async def _judge_silence(self) -> NoReturn:
        path = self._offer or (_INFO if self._offer == "" and self.model_id else _CAPABILITIES)
        path = "" if self.probe else path
        self._count(path, 0, "timeout", "again")
        self._last = TimedOut(f"probing {path}: no answer within {self.probe_s:.3g} s")
        await self._not_ready()

    async def _judge(self, response: httpx.Response) -> None:
        status, path = response.status_code, response.request.url.path
        code, message = words_of(response.content)
        outcome = _outcome(response)
        self._count(path, status, code, outcome)
        if outcome == "ok":
            return
        if 200 <= status < 300:
            self._last = Unavailable(f"probing {path[:200]}: HTTP {status}, but not with JSON")
        else:
            self._last = as_error(status, code, message, f"probing {path[:200]}")
        if outcome != "again":
            raise self._last
        await self._not_ready()

    def _count(self, path: str, status: int, code: str, outcome: Outcome) -> None:
        self._probes += 1
        self._streak = self._streak + 1 if outcome == "ok" else 0
        self.emit(
            Probed(path=path[:200], status=status, code=code, outcome=outcome, streak=self._streak)
        )

    async def _not_ready(self) -> NoReturn:
        """Try again, but not for a job that is gone. Not knowing is no reason to stop."""
        state = ""
        if self.control is not None:
            with contextlib.suppress(HoldfastError):
                state = await self.control.state()
        if self.control is not None and state in _GONE:
            job = f"{self.control.account}/{self.control.job}"
            raise Gone(f"job {job} is {state}: there is nothing to connect to") from self._last
        raise _NotReady(str(self._last))

    async def _once(self) -> httpx.Response:
        """One probe. Only its own connection is used, and it is closed."""
        headers = {"connection": "close"}
        if self.api_key:
            headers["x-api-key"] = self.api_key
        async with (
            asyncio.timeout(self.probe_s),
            httpx.AsyncClient(
                base_url=self.base_url,
                headers=headers,
                verify=verify(self.tls),
                proxy=proxy_of(self.base_url),
                trust_env=False,
                timeout=self.probe_s,
            ) as client,
        ):
            return await (self.probe or self._default)(client)

    async def _default(self, client: httpx.AsyncClient) -> httpx.Response:
        if self._offer is None:
            response = await client.get(_CAPABILITIES)
            outcome = _outcome(response)
            if outcome == "ok":
                self._offer = _offered(response.content)
            elif outcome == "none" and self.model_id:
                self._offer = ""
            else:
                return response
        if self._offer:
            return await client.post(self._offer, json={"type": "probe"})
        if self.model_id:
            return await client.post(_INFO, json={"type": "get_info", "model_id": self.model_id})
        return await client.get(_CAPABILITIES)


def _outcome(response: httpx.Response) -> Outcome:
    """What a probe found. Somebody's page is no trainer that answers."""
    code, _ = words_of(response.content)
    should_retry = response.headers.get(SHOULD_RETRY, "")
    outcome = outcome_of(response.status_code, code, should_retry)
    if outcome == "ok":
        try:
            msgspec.json.decode(response.content, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return "again"
    return outcome


class _Capabilities(msgspec.Struct):
    probe: str = ""


def _offered(body: bytes) -> str:
    """The path of the probe that the server offers, if it does; never another server's."""
    try:
        path = msgspec.json.decode(body[:_MAX_BODY_BYTES], type=_Capabilities).probe
    except msgspec.MsgspecError:
        return ""
    sound = path.startswith("/api/v1/") and path.isascii() and path.isprintable()
    return path if sound and not {"..", "?", "#", "\\"} & {*path.split("/"), *path} else ""
