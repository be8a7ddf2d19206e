"""The fence in front of a trainer: only requests for this incarnation come in.

A gateway says in two headers which incarnation a request is meant for. `Fence` is ASGI
middleware that answers everything else with 421 (Misdirected Request), before the body is
read and before the trainer sees it. So a request that went to a port which belongs to
somebody else by now, or to an incarnation that was replaced, does nothing.

That is the half that a trainer's process can know by itself. A process that was stopped and
replaced believes in its old epoch; so every effect that outlives it goes through a
transaction with `Incarnation.guard()` among its conditions.
"""

import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Self

import msgspec

from holdfast.errors import Mistake
from holdfast.jobs.records import Checkpoint, Keys, check_name
from holdfast.ledger.records import put
from holdfast.ledger.types import Compare, Delete, Put, join

__all__ = ["EPOCH_HEADER", "JOB_HEADER", "JOB_RUN", "Fence", "Incarnation"]

JOB_HEADER = "x-holdfast-job"
EPOCH_HEADER = "x-holdfast-epoch"
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
        return cls(run, check_name("account", account), check_name("job", job), epoch)

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
        """Whether both headers are there, once each, and say what they should."""
        names = {JOB_HEADER.encode(), EPOCH_HEADER.encode()}
        said = [(name.lower(), value) for name, value in headers if name.lower() in names]
        return sorted(said) == sorted(
            (name.encode(), value.encode()) for name, value in self.headers().items()
        )

    def headers(self) -> dict[str, str]:
        """The headers of a request that is meant for this incarnation."""
        return {JOB_HEADER: self.name, EPOCH_HEADER: str(self.epoch)}


class Fence:
    """ASGI middleware: `app = Fence(app, Incarnation.from_env())`."""

    def __init__(self, app: App, incarnation: Incarnation) -> None:
        self._app = app
        self._incarnation = incarnation
        self._body = msgspec.json.encode(
            {
                "error": {
                    "code": "wrong_incarnation",
                    "message": f"this is {incarnation.name}, epoch {incarnation.epoch}: "
                    "look up where your job's trainer is",
                }
            }
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] not in ("http", "websocket") or self._incarnation.is_meant(
            scope["headers"]
        ):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(self._body)).encode()),
                # The body was not read: the next request cannot be told from it.
                (b"connection", b"close"),
            ]
            await send({"type": "http.response.start", "status": 421, "headers": headers})
            await send({"type": "http.response.body", "body": self._body})
