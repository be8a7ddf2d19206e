"""What callers meet: who they are, which path they are on, and who answers.

    /training/v1/rlorTrainerJobs/<account>/<job>/…    the job's trainer, at /…
    /api/v1/…                                         the trainer of the account's default job
    /v1/accounts…                                     the control plane
    /healthz /readyz /metrics                         this process

An API key says who the caller is (`X-Api-Key`, or `Authorization: Bearer`). It goes no further:
trainers do not see it. Keys are not logged.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

from holdfast import events
from holdfast.errors import Denied, Retriable, TooLarge, UnknownOutcome
from holdfast.gateway import answers
from holdfast.gateway.answers import Answer, Route
from holdfast.gateway.desk import Desk, Sent
from holdfast.gateway.http import Exchange, Head, Lost, Refused, Relayed, Truncated, Withheld
from holdfast.gateway.routes import Routes
from holdfast.gateway.strangers import Strangers
from holdfast.jobs.accounts import Guests
from holdfast.jobs.api import BODY_BYTES, Api, Request
from holdfast.jobs.fence import SECRET_HEADER, Incarnation
from holdfast.jobs.records import NAME
from holdfast.timeouts import DEFAULTS

__all__ = ["Access", "Front", "Unlogged"]

_TRAINER = re.compile(r"/training/v1/rlorTrainerJobs/([^/]*)/([^/]*)(/.*)")
_TINKER: Final = "/api/v1/"
_CONTROL: Final = "/v1/"
_MISDIRECTED: Final = 421
_JSON: Final = (b"content-type", b"application/json")


class Access(events.Event, frozen=True, tag="gateway.access"):
    """One request, answered."""

    labels = ("status",)

    account: str
    job: str
    method: str
    path: str
    status: int
    ms: float
    received: int
    sent: int
    code: str = ""


class Unlogged(events.Event, frozen=True, tag="gateway.unlogged"):
    """Requests of callers without a key that were refused and have no line of their own."""

    count: int


@dataclass(eq=False)
class Front:
    """The handler of one gateway process."""

    guests: Guests
    routes: Routes
    desk: Desk
    api: Api
    metrics: Callable[[], bytes] = lambda: b""
    access_log: bool = True

    def __post_init__(self) -> None:
        self._strangers = Strangers(time.monotonic)

    async def handle(self, exchange: Exchange) -> None:
        """Answer one request."""
        visit = _Visit(exchange)
        path = exchange.head.path
        if path in ("/healthz", "/readyz", "/metrics"):
            await visit.answer(self._about(path))
            return
        try:
            if wait_s := await self._know(visit):
                await visit.answer(answers.too_often(wait_s))
            elif over := exchange.charge(visit.account, poll=answers.kind_of(path) == "poll"):
                await visit.answer(answers.too_many(over))
            else:
                await self._serve(visit, path)
        except Denied as error:
            await visit.answer(answers.final(401, "denied", str(error)))
        except (Retriable, UnknownOutcome) as error:
            await visit.answer(answers.late("submit", f"the ledger cannot be asked now ({error})"))
        if self.access_log:
            self._log(visit)

    def _log(self, visit: "_Visit") -> None:
        """Write a line; for callers without a key, so many that they cannot fill the disk."""
        if visit.account or self._strangers.may_log():
            self.tell_unlogged()
            visit.log()

    def tell_unlogged(self) -> None:
        """Say how many requests had no line, if there were any. Also when this gateway ends."""
        if count := self._strangers.unlogged():
            events.emit(Unlogged(count=count))

    async def _serve(self, visit: "_Visit", path: str) -> None:
        if path.startswith(_CONTROL):
            await self._control(visit)
        elif path.startswith(_TINKER):
            job = await self.guests.default_job(visit.account)
            await self._pass_on(visit, visit.account, job, path)
        elif found := _TRAINER.fullmatch(path):
            await self._pass_on(visit, unquote(found[1]), unquote(found[2]), found[3])
        else:
            told = (
                "there is nothing at this path: trainers are below "
                "/training/v1/rlorTrainerJobs/<account>/<job>/, the control plane below /v1/"
            )
            await visit.answer(answers.final(404, "no_such_path", told))

    # ---- who ---------------------------------------------------------------------

    async def _know(self, visit: "_Visit") -> int:
        """Find the account that the caller's key belongs to. Returns 0, or in how many seconds a
        stranger may ask. A key that is known is never held up."""
        key, complaint = _given(visit.exchange.head)
        if not complaint:
            visit.account = self.guests.known(key)
        if not visit.account:
            if wait_s := self._strangers.knock(visit.exchange.peer):
                return wait_s
            if complaint:
                raise Denied(complaint)
            visit.account = await self.guests.who(key)
        return 0

    # ---- the ways ----------------------------------------------------------------

    async def _pass_on(self, visit: "_Visit", account: str, job: str, path: str) -> None:
        """Bring the request to a trainer."""
        exchange, visit.job = visit.exchange, job
        if account != visit.account or not NAME.fullmatch(job):
            # The same for what is not there and for what is somebody else's.
            await visit.answer(answers.not_found())
            return
        query = exchange.head.query
        target = f"{path}?{query}" if query else path

        async def forward(route: Route) -> Sent:
            return await _forward(visit, route, target)

        answer = await self.desk.serve(
            account,
            job,
            answers.kind_of(path),
            forward,
            lambda: not exchange.gone,
            harmless=exchange.head.method in ("GET", "HEAD"),
            abandon=exchange.abandon,
        )
        if answer is not None:
            await visit.answer(answer)

    async def _control(self, visit: "_Visit") -> None:
        """Bring the request to the control plane, which is here."""
        head = visit.exchange.head
        try:
            body = await visit.exchange.body(BODY_BYTES)
        except TooLarge as error:
            await visit.answer(answers.problem(413, "body_too_large", str(error)))
            return
        request = Request(head.method, head.path, head.query, body)
        reply = await self.api.handle(visit.account, request)
        await visit.answer(Answer(reply.status, reply.body, reply.headers))

    def _about(self, path: str) -> Answer:
        if path == "/metrics":
            text = (("content-type", "text/plain; version=0.0.4"),)
            return Answer(200, self.metrics(), text)
        ready = self.routes.ready.is_set() and self.guests.ready.is_set()
        if path == "/healthz" or ready:
            return Answer(200, b'{"status":"ok"}')
        return answers.problem(503, "not_ready", "the ledger has not been read yet")


def _given(head: Head) -> tuple[str, str]:
    """The key that came with a request, or what is wrong with it."""
    key, bearer = head.get(b"x-api-key"), head.get(b"authorization")
    if bearer is not None:
        scheme, _, token = bearer.partition(b" ")
        if scheme.lower() != b"bearer" or (key is not None and key != token.strip()):
            return "", "give one API key, as X-Api-Key or as a bearer token"
        key = token.strip()
    if key is None:
        return "", "give an API key, as X-Api-Key or as a bearer token"
    return key.decode("latin-1"), ""


class _Visit:
    """One request on its way, and what there is to say about it."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.account = ""
        self.job = ""
        self.status = 0
        self.sent = 0
        self.code = ""
        self._began = time.monotonic()

    async def answer(self, answer: Answer) -> None:
        """Give an answer of the gateway's own."""
        self.status, self.sent, self.code = answer.status, len(answer.body), answer.code
        headers = [(name.encode(), value.encode()) for name, value in answer.headers]
        if not any(name == b"content-type" for name, _ in headers):
            headers.append(_JSON)
        await self.exchange.answer(answer.status, headers, answer.body)

    def log(self) -> None:
        """Write one line of the access log."""
        head = self.exchange.head
        events.emit(
            Access(
                account=self.account,
                job=self.job,
                method=head.method,
                path=head.path[:200],
                status=self.status,
                ms=round((time.monotonic() - self._began) * 1000, 3),
                received=self.exchange.received_bytes,
                sent=self.sent,
                code=self.code,
            )
        )


async def _forward(visit: _Visit, route: Route, target: str) -> Sent:
    """Send the request to one incarnation, and its answer to the caller."""
    host, _, port = route.address.rpartition(":")
    exchange = visit.exchange
    meant = Incarnation("", route.account, route.job, route.epoch, route.secret).headers()
    outcome = await exchange.forward(
        (host, int(port)),
        path=target,
        replace={
            b"host": route.address.encode(),
            **{name.encode(): value.encode() for name, value in meant.items()},
        },
        remove=(b"x-api-key", b"authorization", SECRET_HEADER.encode()),
        relay=_is_for_the_caller,
        hold_s=DEFAULTS.body_hold_s,
    )
    again = not exchange.cannot_replay
    match outcome:
        case Relayed(status, sent):
            visit.status, visit.sent = status, sent
            return Sent("done")
        case Truncated(status, sent, reason):
            visit.status, visit.sent, visit.code = status, sent, "truncated"
            return Sent("done", reason)
        case Withheld():
            reason = "the trainer at this address is another incarnation, or another job's"
            return Sent("misdirected", reason, again)
        case Refused(reason):
            return Sent("refused", reason, again)
        case Lost(reason):
            return Sent("lost", reason, again)


def _is_for_the_caller(status: int, _headers: object) -> bool:
    return status != _MISDIRECTED
