"""A gateway that plays a part: dumb as in the incident behind all this, and scripted.

It listens on a real port. For each call (`forward_backward`, `retrieve_future`, ...) it may be
given answers to play first; after those it passes requests on to a trainer that counts. It is
also the control plane, with a state that the test sets. It writes down what came.
"""

import asyncio
import json
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from aiohttp import web

from holdfast.client import ControlPlane, Target, VerifiedTransport
from holdfast.jobs.fence import Incarnation
from holdfast.jobs.records import Keys
from holdfast.ledger import Ledger, Put
from holdfast.retry import Policy
from jobs.counting_trainer import Reply, problem, reply
from jobs.counts import assert_exactly_once

from .lines import hang_up

ACCOUNT, JOB, RUN = "acme", "one", "r"
KEY = "tml-a-key"
QUICK = Policy(attempts=999, base_s=0.02, factor=1.5, max_s=0.1, jitter=0.25, deadline_s=3.0)
LOST = Reply(404, b'{"error":"not found"}')
BARE = Reply(404, b"404 page not found\n", "text/plain")
NOT_READY = problem(503, "route_not_ready", "soon", retry_after_ms="10")

Backend = Callable[[str, str, Mapping[str, str], bytes], Awaitable[Reply]]


@dataclass(frozen=True)
class Came:
    """A request that came."""

    name: str
    body: bytes
    peer: tuple[str, int]
    status: int


@dataclass
class Dumb:
    """The gateway. `plan` has what is played first, by the call's name."""

    backend: Backend
    state: str = "JOB_STATE_RUNNING"
    key: str = KEY
    control: Callable[[], Awaitable[Reply]] | None = None
    """What the control plane answers instead of the state."""
    plan: dict[str, deque[Reply]] = field(default_factory=lambda: defaultdict(deque))
    hold_s: dict[str, float] = field(default_factory=dict)
    """How long a played answer is held back."""
    lost: Callable[[], bool] = lambda: False
    came: list[Came] = field(default_factory=list)
    asked: int = 0
    questions: list[Mapping[str, str]] = field(default_factory=list)
    """The headers of what the control plane was asked."""
    port: int = 0
    trainer: Any = None
    ledger: Any = None
    """Of a trainer in this process, and what it counts in."""

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def data(self) -> str:
        """The data path of the job."""
        return f"{self.url}/training/v1/rlorTrainerJobs/{ACCOUNT}/{JOB}"

    def play(self, name: str, *answers: Reply) -> None:
        """Play these answers to the next calls of that name."""
        self.plan[name].extend(answers)

    def of(self, name: str) -> list[Came]:
        """The calls of that name that came."""
        return [one for one in self.came if one.name == name]

    def target(self, **more: Any) -> Target:
        """The job's target behind this gateway."""
        return Target.of(self.url, api_key=KEY, account=ACCOUNT, job=JOB, **more)

    def plane(self, key: str = KEY, **more: Any) -> ControlPlane:
        """This gateway as the control plane that is asked about the job."""
        return ControlPlane(self.url, ACCOUNT, JOB, key, **more)

    async def applied(self) -> dict[str, int]:
        """How many operations each model has had: each once and in order, or it raises."""
        done = await assert_exactly_once(self.ledger, RUN, ACCOUNT, JOB)
        return {model: len(ops) for model, ops in done.items()}

    async def _data(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        body = await request.read()
        planned = self.plan[name]
        if self.lost():
            answer = BARE
        elif planned:
            answer = planned.popleft()
            await asyncio.sleep(self.hold_s.get(name, 0.0))
        else:
            headers = {key.lower(): value for key, value in request.headers.items()}
            answer = await self.backend(request.method, f"/api/v1/{name}", headers, body)
        assert request.transport is not None
        peer = request.transport.get_extra_info("peername")
        self.came.append(Came(name, body, peer, answer.status))
        return web.Response(
            status=answer.status,
            body=answer.body,
            headers={"content-type": answer.content_type, **dict(answer.headers)},
        )

    async def _control(self, request: web.Request) -> web.Response:
        self.asked += 1
        self.questions.append(request.headers)
        if request.headers.get("x-api-key") != self.key:
            answer = problem(401, "unauthorized", "no such key")
        elif self.control is not None:
            answer = await self.control()
        elif not self.state:
            answer = problem(404, "job_not_found", "no such job")
        else:
            answer = reply(200, {"name": f"accounts/{ACCOUNT}/x", "state": self.state})
        return web.Response(
            status=answer.status, body=answer.body, content_type=answer.content_type
        )

    @asynccontextmanager
    async def serve(self) -> AsyncIterator["Dumb"]:
        """Listen."""
        app = web.Application(client_max_size=64 << 20)
        path = f"/training/v1/rlorTrainerJobs/{ACCOUNT}/{JOB}/api/v1/{{name:.+}}"
        app.router.add_route("*", path, self._data)
        app.router.add_get(f"/v1/accounts/{ACCOUNT}/rlorTrainerJobs/{JOB}", self._control)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=2048)
        await site.start()
        self.port = runner.addresses[0][1]
        try:
            yield self
        finally:
            await runner.cleanup()
            await hang_up(self.port)


def verified(
    url: str, control: ControlPlane | None, policy: Policy, *, timeout: float = 5.0, **more: Any
) -> httpx.AsyncClient:
    """A client whose 404s are doubted, and nothing else between it and a server."""
    transport = VerifiedTransport(httpx.AsyncHTTPTransport(), control, policy=policy, **more)
    return httpx.AsyncClient(transport=transport, base_url=url, timeout=timeout)


def incarnation(epoch: int = 1) -> Incarnation:
    """Who the trainer is."""
    return Incarnation(RUN, ACCOUNT, JOB, epoch)


async def admit(ledger: Ledger, epoch: int = 1) -> None:
    """Make this epoch the job's present one."""
    await ledger.txn((), [Put(Keys(RUN).epoch(ACCOUNT, JOB), str(epoch).encode())])


def over_http(port: int) -> Backend:
    """Passes requests on to a trainer's own process."""

    async def send(method: str, path: str, headers: Mapping[str, str], body: bytes) -> Reply:
        kept = {k: v for k, v in headers.items() if k in ("content-type", "accept")}
        kept |= incarnation().headers()
        async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
            url = f"http://127.0.0.1:{port}{path}"
            said = await client.request(method, url, headers=kept, content=body)
        given = tuple((k, v) for k, v in said.headers.items() if k.startswith("x-"))
        kind = said.headers.get("content-type", "application/octet-stream")
        return Reply(said.status_code, said.content, kind, headers=given)

    return send


def operation(seq: int) -> bytes:
    """An operation's body."""
    return json.dumps({"model_id": "m", "seq_id": seq, "adam_params": {}}).encode()
