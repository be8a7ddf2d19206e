"""A replica behind HTTP: `POST /make` with an `Ask`, `GET /healthz`. An ASGI application.

Whoever asks shows the run's token. 503 means: ask somebody else, or later.
"""

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from holdfast.errors import HoldfastError, Mistake
from holdfast.rollout.asks import Ask
from holdfast.rollout.replica import Replica

__all__ = ["App"]

MAX_BODY = 1 << 16

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class App:
    """A replica for an ASGI server."""

    def __init__(self, replica: Replica, token: str) -> None:
        self._replica = replica
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        body = await _read(receive)
        if body is None:
            return
        status, said = await self._answer(scope, body)
        data = msgspec.json.encode(said)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": data})

    async def _answer(self, scope: Scope, body: bytes) -> tuple[int, object]:
        if scope["method"] == "GET" and scope["path"] == "/healthz":
            return 200, {"status": "ok", "replica": self._replica.name}
        if scope["method"] != "POST" or scope["path"] != "/make":
            return 404, {"error": "there are POST /make and GET /healthz"}
        shown = dict(scope["headers"]).get(b"x-run-token", b"")
        if not hmac.compare_digest(shown, self._token):
            return 403, {"error": "the run's token is wrong"}
        if len(body) > MAX_BODY:
            return 413, {"error": f"a body has at most {MAX_BODY} bytes"}
        try:
            return 200, await self._replica.make(msgspec.json.decode(body, type=Ask))
        except (Mistake, msgspec.MsgspecError) as error:
            return 400, {"error": str(error)}
        except HoldfastError as error:
            return 503, {"error": f"{type(error).__name__}: {error}"}


async def _read(receive: Receive) -> bytes | None:
    parts: list[bytes] = []
    while sum(map(len, parts)) <= MAX_BODY:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            break
    return b"".join(parts)
