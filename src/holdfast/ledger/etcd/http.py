"""Carries requests to an etcd cluster: endpoints, fail-over, login, TLS, time limits.

Invariants:

- A request whose answer was lost is sent again only if the caller says that this does
  no harm (`again=True`); otherwise it ends in `UnknownOutcome`.
- A request that surely was not applied (no connection, no leader, a stale login) is
  tried on the next endpoint, round and round, until `timeout_s` is over.
- No call lasts longer than `timeout_s`, whatever the servers do.
- Nothing runs in the background: no call, no traffic, no task.

The endpoint that last worked is tried first. A write goes only to an endpoint that has
answered since it last failed; where that is not known, a cheap question comes first. So
a server that accepts connections but does not answer (stopped, starting, behind a cut
cable) costs a wait, not an unknown outcome.
"""

import asyncio
import contextlib
import io
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict, TypeVar, Unpack

import aiohttp
import msgspec

from holdfast.errors import (
    Denied,
    HoldfastError,
    Mistake,
    Unavailable,
)
from holdfast.ledger.etcd import wire
from holdfast.ledger.etcd.trouble import (
    Endpoint,
    Forbidden,
    Lost,
    Refused,
    client_certificate,
    error_of,
    no_tls,
    one_line,
    unknown,
    untrusted,
)
from holdfast.retry import Pauses, Policy

__all__ = ["PACE", "Client", "Login"]

T = TypeVar("T")

RENEWALS_MAX = 3
CONNECTIONS_MAX = 64
PACE = Policy(base_s=0.1, max_s=0.5)
"""How long it waits when no server took a request, or a watch broke off."""
_STATUS = "/v3/maintenance/status"
_RANGE = "/v3/kv/range"
# aiohttp rounds long limits up to whole seconds; ours are exact.
_NEVER_ROUND = 1e9


class Login(TypedDict, total=False):
    """Who we are to a cluster, and the files for TLS."""

    user: str
    password: str
    tls: bool
    ca: Path | None
    cert: Path | None
    key: Path | None


class Client:
    """A cluster as one place to send requests to. Belongs to one event loop."""

    def __init__(
        self,
        endpoints: Sequence[tuple[str, int]],
        timeout_s: float,
        **login: Unpack[Login],
    ) -> None:
        if not endpoints:
            raise Mistake("an etcd ledger needs at least one endpoint (host and port)")
        if timeout_s <= 0:
            raise Mistake(f"the time limit must be more than 0 s, not {timeout_s}")
        user, password = login.get("user", ""), login.get("password", "")
        ca, cert, key = login.get("ca"), login.get("cert"), login.get("key")
        if (cert is None) != (key is None):
            raise Mistake("cert and key go together: give both or none")
        if user and not password:
            raise Mistake(f"the etcd user {user!r} needs a password")
        self._tls = login.get("tls", False) or ca is not None or cert is not None
        self._ca, self._cert, self._key = ca, cert, key
        scheme = "https" if self._tls else "http"
        self.endpoints = [Endpoint(host, port, scheme) for host, port in endpoints]
        self.timeout_s = timeout_s
        # Short enough that a silent server leaves time for the others.
        self.attempt_s = max(timeout_s / max(2, len(endpoints)), min(0.5, timeout_s))
        self._user, self._password = user, password
        self._token: str | None = None if user else ""
        self._login = asyncio.Lock()
        self._preferred = 0
        self._session: aiohttp.ClientSession | None = None
        self._streams: aiohttp.ClientSession | None = None

    # ---- life ------------------------------------------------------------------

    @property
    def open(self) -> bool:
        """Whether `start` has been called and `close` has not."""
        return self._session is not None

    def start(self) -> None:
        """Get ready to connect; nothing is sent yet."""
        if self._session is None:
            context = self._context()
            self._session = _session(context, CONNECTIONS_MAX)
            # A watch holds its connection: it must not take one away from the calls.
            self._streams = _session(context, 0)

    async def close(self) -> None:
        """Drop all connections. Calls that are under way fail."""
        sessions, self._session, self._streams = (self._session, self._streams), None, None
        for session in sessions:
            if session is not None:
                await session.close()

    def _context(self) -> ssl.SSLContext | bool:
        if not self._tls:
            return True
        for path in (self._ca, self._cert, self._key):
            if path is not None and not path.is_file():
                raise Mistake(f"the file {path} is not there")
        try:
            context = ssl.create_default_context(cafile=self._ca)
            if self._cert is not None:
                context.load_cert_chain(self._cert, self._key)
        except (ssl.SSLError, OSError) as error:
            raise Mistake(f"the TLS files for etcd cannot be used: {one_line(error)}") from None
        return context

    # ---- calls -----------------------------------------------------------------

    def deadline(self) -> float:
        """When a call that begins now must have ended, by the event loop's clock."""
        return _now() + self.timeout_s

    async def call(
        self,
        path: str,
        request: wire.Json,
        kind: type[T],
        *,
        again: bool,
        changes: bool = False,
        fresh: bool = False,
        deadline: float | None = None,
    ) -> T:
        """Send a request to whichever endpoint takes it, and return the answer.

        `again` says that the request may be sent twice; `changes` that it changes something
        all the same, so that without an answer its outcome is unknown. `fresh` lets the
        endpoint catch up with the cluster first, for questions that etcd answers from one
        member's memory. `deadline` is for calls that are part of a longer one. Raises
        `wire.Fault` for errors whose meaning only the caller knows.
        """
        body = wire.encode(request)
        deadline = self.deadline() if deadline is None else deadline
        changes, lost = changes or not again, ""
        count = len(self.endpoints)
        cursor, tries, pauses = self._preferred, 0, Pauses(pace=PACE)
        reasons: dict[str, str] = {}
        hopeless: dict[str, HoldfastError | None] = {}
        while _now() < deadline:
            endpoint = self.endpoints[cursor]
            soon = min(deadline, _now() + self.attempt_s)
            try:
                if not again and not endpoint.proven:
                    await self.probe(endpoint, soon)
                if fresh:
                    await self._catch_up(endpoint, soon)
                data = await self._ask(endpoint, path, body, soon if again else deadline)
            except (Refused, Lost) as error:
                if isinstance(error, Lost) and changes:
                    lost = f"{endpoint.name} {error}"
                    if not again:
                        self.failed(endpoint)
                        raise unknown(lost) from None
                if soon < deadline or endpoint.name not in reasons:
                    # An attempt cut short by the deadline does not hide a better reason.
                    reasons[endpoint.name] = str(error)
                    hopeless[endpoint.name] = error.hopeless
            else:
                endpoint.proven = True
                self._preferred = cursor
                try:
                    return _decoded(endpoint, data, kind)
                except Mistake:
                    if changes:
                        raise unknown(f"{endpoint.name} gave an answer nobody can read") from None
                    raise
            self.failed(endpoint)
            cursor, tries = (cursor + 1) % count, tries + 1
            if tries % count == 0:
                if (wrong := next(iter(hopeless.values()))) and all(hopeless.values()):
                    raise unknown(lost) if lost else wrong
                await asyncio.sleep(min(pauses.next_s(), max(0.0, deadline - _now())))
        raise unknown(lost) if lost else self._unavailable(reasons)

    async def probe(self, endpoint: Endpoint, until: float) -> int:
        """Ask one endpoint whether it is there and has a leader; return its revision.

        Changes nothing. `until` is a time of the event loop's clock; the revision is 0
        when it is not told. Raises `Refused`.
        """
        revision = 0
        try:
            data = await self._ask(endpoint, _STATUS, b"{}", until)
            revision = wire.decode(data, wire.Answer).header.revision
        except Lost as error:
            raise Refused(str(error)) from None
        except (Denied, wire.Fault, msgspec.MsgspecError):
            pass  # an answer all the same: the real request will say what is wrong
        endpoint.proven = True
        return revision

    async def _catch_up(self, endpoint: Endpoint, until: float) -> None:
        """Let the endpoint apply everything that was committed before this moment."""
        with contextlib.suppress(Forbidden):
            body = wire.encode(wire.range_json(b"/"))
            await self._ask(endpoint, _RANGE, body, until)

    async def stream(
        self, endpoint: Endpoint, path: str, request: wire.Json
    ) -> tuple[aiohttp.ClientResponse, str]:
        """Open a stream on one endpoint; return it with the login it was opened with."""
        until = _now() + self.attempt_s
        token = await self._token_for(endpoint, until)
        body = wire.encode(request)
        response = await self._send(self._streams, endpoint, path, body, token, until)
        if response.status == 200:
            _keep_watching(response)
            return response, token
        fault = wire.fault_of(*await self._read(response, until))
        if fault.verdict == "token":
            self.forget_token(token)
        raise fault

    def failed(self, endpoint: Endpoint) -> None:
        """Remember that this endpoint did not work, and prefer another one."""
        endpoint.proven = False
        if self.endpoints[self._preferred] is endpoint:
            self._preferred = (self._preferred + 1) % len(self.endpoints)

    def preferred(self) -> int:
        """The position of the endpoint to try first."""
        return self._preferred

    def forget_token(self, token: str) -> None:
        """Log in again before the next request, unless somebody has already done so."""
        if self._user and self._token == token:
            self._token = None

    # ---- one endpoint ------------------------------------------------------------

    async def _ask(self, endpoint: Endpoint, path: str, body: bytes, until: float) -> bytes:
        """Send a request to one endpoint; renew the login as often as it takes."""
        for _ in range(RENEWALS_MAX):
            token = await self._token_for(endpoint, until)
            status, data = await self._post(endpoint, path, body, token, until)
            if status == 200:
                return data
            fault = wire.fault_of(status, data)
            if fault.verdict != "token" or not self._user:
                raise error_of(fault, self._user)
            self.forget_token(token)
        raise Denied(
            f"etcd at {endpoint.name} refuses the login it has just given to {self._user!r}: "
            "compare the clocks and the token settings of its members"
        )

    async def _token_for(self, endpoint: Endpoint, until: float) -> str:
        if self._token is not None:
            return self._token
        try:
            async with asyncio.timeout_at(until), self._login:
                if self._token is None:
                    self._token = await self._log_in(endpoint, until)
                return self._token
        except (TimeoutError, Lost):
            raise Refused("did not answer the login in time") from None

    async def _log_in(self, endpoint: Endpoint, until: float) -> str:
        body = wire.encode({"name": self._user, "password": self._password})
        status, data = await self._post(endpoint, "/v3/auth/authenticate", body, "", until)
        if status == 200:
            return _decoded(endpoint, data, wire.Authenticated).token
        fault = wire.fault_of(status, data)
        if fault.verdict == "no_auth":
            return ""
        if fault.verdict == "mistake":
            raise Denied(f"etcd refuses the login of {self._user!r}: {fault.message}")
        raise error_of(fault, self._user)

    async def _post(
        self, endpoint: Endpoint, path: str, body: bytes, token: str, until: float
    ) -> tuple[int, bytes]:
        response = await self._send(self._session, endpoint, path, body, token, until)
        return await self._read(response, until)

    async def _read(self, response: aiohttp.ClientResponse, until: float) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout_at(until), response:
                return response.status, await response.read()
        except TimeoutError:
            raise Lost("did not finish its answer in time") from None
        except (aiohttp.ClientError, OSError) as error:
            raise Lost(f"broke off its answer ({one_line(error)})") from None

    async def _send(
        self,
        session: aiohttp.ClientSession | None,
        endpoint: Endpoint,
        path: str,
        body: bytes,
        token: str,
        until: float,
    ) -> aiohttp.ClientResponse:
        """Send a request and wait for the head of the answer."""
        if session is None or session.closed:
            raise Mistake("this etcd ledger is closed (or was never started)")
        # A member that is cut off from its leader refuses at once instead of waiting.
        headers = {"Content-Type": "application/json", "Grpc-Metadata-hasleader": "true"}
        if token:
            headers["Authorization"] = token
        # Connecting has the shorter limit, so that "not sent" and "no answer" stay apart.
        limit_s = until - _now()
        if limit_s <= 0:
            raise Refused("no time left")
        connect_s = min(self.attempt_s, limit_s) * 0.8
        limits = aiohttp.ClientTimeout(total=None, connect=connect_s, ceil_threshold=_NEVER_ROUND)
        try:
            async with asyncio.timeout_at(until):
                return await session.post(
                    endpoint.url + path,
                    data=io.BytesIO(body),  # sent in pieces: a large body blocks nobody
                    headers=headers,
                    timeout=limits,
                    allow_redirects=False,
                )
        except aiohttp.ConnectionTimeoutError:
            raise Refused(f"no connection within {connect_s:.1f} s") from None
        except aiohttp.ClientConnectorCertificateError as error:
            raise untrusted(endpoint, error.certificate_error) from None
        except aiohttp.ClientSSLError as error:
            raise no_tls(endpoint, error) from None
        except aiohttp.ClientConnectorError as error:
            reset = self._tls and isinstance(error.os_error, ConnectionResetError)
            hint = " (does it speak TLS?)" if reset else ""
            raise Refused(f"no connection: {one_line(error.os_error)}{hint}") from None
        except TimeoutError:
            raise Lost(f"did not answer within {limit_s:.1f} s") from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._session is None and task is not None and not task.cancelling():
                # How aiohttp tells those who wait for a connection that it is closed.
                raise Mistake("this etcd ledger was closed: the call was not sent") from None
            raise
        except (aiohttp.ClientError, OSError) as error:
            if self._tls and (refused := client_certificate(endpoint, error)) is not None:
                raise refused from None
            if self._session is None:
                raise Lost("was not heard any more: this ledger was closed") from None
            hint = "" if self._tls or endpoint.proven else " (does it want TLS?)"
            raise Lost(f"closed the connection without an answer{hint}") from None

    def _unavailable(self, reasons: dict[str, str]) -> Unavailable:
        if not reasons:
            reasons = {one.name: "no time left" for one in self.endpoints}
        told = "; ".join(f"{name} ({why})" for name, why in reasons.items())
        return Unavailable(f"no etcd server could be used within {self.timeout_s:g} s: {told}")


def _decoded(endpoint: Endpoint, data: bytes, kind: type[T]) -> T:
    try:
        return wire.decode(data, kind)
    except msgspec.MsgspecError:
        raise Mistake(
            f"{endpoint.name} answers, but not like an etcd v3 server: check the address"
        ) from None


def _now() -> float:
    return asyncio.get_running_loop().time()


def _session(context: ssl.SSLContext | bool, limit: int) -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=limit, ssl=context)
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())


def _keep_watching(response: aiohttp.ClientResponse) -> None:
    """Let the kernel notice when the other end of an idle stream is no longer there."""
    transport = response.connection.transport if response.connection is not None else None
    sock = transport.get_extra_info("socket") if transport is not None else None
    if sock is None:
        return
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
