"""The fence in front of a trainer: only requests for this incarnation come in.

A gateway says in two headers which incarnation a request is meant for, and in a third one the
secret of that incarnation. `Fence` is ASGI middleware that answers everything else with 421
(Misdirected Request), before the body is read and before the trainer sees it. So a request
that went to a port which belongs to another trainer by now, or to an incarnation that was
replaced, does nothing; and a local user who finds the port can neither use it nor learn from
the answer which trainer listens there.

The host makes the secret, new for every incarnation. The trainer gets it in its environment,
gateways read it from the incarnation's sign of life in the ledger. It is compared in constant
time and is not passed on to the trainer's own code. Without one (a host of an older version)
the other two headers decide alone.

That is the half that a trainer's process can know by itself. A process that was stopped and
replaced believes in its old epoch; so every effect that outlives it goes through a
transaction with `Incarnation.guard()` among its conditions.
"""

import hmac
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec

from holdfast.errors import Mistake
from holdfast.jobs.records import Checkpoint, Keys, check_name
from holdfast.ledger.records import put
from holdfast.ledger.types import Compare, Delete, Put, join

__all__ = [
    "EPOCH_HEADER",
    "JOB_HEADER",
    "JOB_RUN",
    "SECRET",
    "SECRET_HEADER",
    "Fence",
    "Incarnation",
]

JOB_HEADER = "x-holdfast-job"
EPOCH_HEADER = "x-holdfast-epoch"
SECRET_HEADER = "x-holdfast-secret"  # noqa: S105 -- the header's name
SECRET = "HOLDFAST_TRAINER_SECRET"  # noqa: S105 -- the variable's name
"""The variable that brings an incarnation its secret: other users cannot read it."""
JOB_RUN = "HOLDFAST_JOB_RUN"
"""The job's run, for workers of `holdfast launch`, whose HOLDFAST_RUN is the launch's own."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One incarnation of one job's trainer: who it is, and what it compares."""

    run: str
    account: str
    job: str
    epoch: int
    secret: str = field(default="", repr=False)

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Self:
        """Who this process is, as its launcher said it."""
        try:
            account, _, job = env["HOLDFAST_JOB"].partition("/")
            epoch = int(env["HOLDFAST_EPOCH"])
            run = env.get(JOB_RUN) or env["HOLDFAST_RUN"]
        except (KeyError, ValueError):
            raise Mistake(
                "HOLDFAST_RUN, HOLDFAST_JOB (account/job) and HOLDFAST_EPOCH are not set: "
                "start the trainer through `holdfast serve`, or set them"
            ) from None
        check_name("account", account)
        return cls(run, account, check_name("job", job), epoch, env.get(SECRET, ""))

    @property
    def name(self) -> str:
        """What the header says."""
        return f"{self.account}/{self.job}"

    def guard(self) -> Compare:
        """True while nobody has replaced this incarnation: a condition of every effect."""
        return Keys(self.run).guard(self.account, self.job, self.epoch)

    def saved(self, checkpoint: Checkpoint) -> Put:
        """The operation that tells the control plane of a checkpoint: users list it there."""
        folder = Keys(self.run).checkpoints(self.account, self.job)
        return put(folder + join(checkpoint.name)[1:], checkpoint)

    def unsaved(self, name: str) -> Delete:
        """The operation that takes word of a checkpoint back."""
        return Delete(Keys(self.run).checkpoints(self.account, self.job) + join(name)[1:])

    def is_meant(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether every header is there, once, and says what it should."""
        expected = {name.encode(): value.encode() for name, value in self.headers().items()}
        said = [(name.lower(), value) for name, value in headers if name.lower() in expected]
        return hmac.compare_digest(
            repr(sorted(said)).encode(), repr(sorted(expected.items())).encode()
        )

    def headers(self) -> dict[str, str]:
        """The headers of a request that is meant for this incarnation."""
        secret = {SECRET_HEADER: self.secret} if self.secret else {}
        return {JOB_HEADER: self.name, EPOCH_HEADER: str(self.epoch), **secret}


class Fence:
    """ASGI middleware: `app = Fence(app, Incarnation.from_env())`."""

    def __init__(self, app: App, incarnation: Incarnation) -> None:
        self._app = app
        self._incarnation = incarnation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
        elif self._incarnation.is_meant(scope["headers"]):
            await self._app({**scope, "headers": _public(scope["headers"])}, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(_REFUSAL)).encode()),
                # The body was not read: the next request cannot be told from it.
                (b"connection", b"close"),
            ]
            await send({"type": "http.response.start", "status": 421, "headers": headers})
            await send({"type": "http.response.body", "body": _REFUSAL})


_REFUSAL = msgspec.json.encode(
    {
        "error": {
            "code": "wrong_incarnation",
            "message": "this request is not meant for this trainer: ask the gateway",
        }
    }
)


def _public(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """What the trainer's own code may see, log and pass on."""
    return [header for header in headers if header[0].lower() != SECRET_HEADER.encode()]
