"""The service as an ASGI application: reads bounded bodies, writes answers."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from holdfast.trainer.service import Request, Service
from holdfast.trainer.wire import answers
from holdfast.trainer.wire.answers import Answer
from holdfast.trainer.wire.body import DEFAULT_LIMITS

__all__ = ["App"]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class App:
    """`Service` for an ASGI server."""

    def __init__(self, service: Service, body_bytes: int = DEFAULT_LIMITS.body_bytes) -> None:
        self._service = service
        self._body_bytes = body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        body = await self._read(receive)
        if body is None:
            return  # whoever asked has gone
        if len(body) > self._body_bytes:
            text = f"a body has at most {self._body_bytes} bytes"
            await _reply(send, answers.problem(413, "too_large", text, connection="close"))
            return
        headers = {
            name.decode("latin-1").lower(): text.decode("latin-1")
            for name, text in scope["headers"]
        }
        query = scope.get("query_string", b"").decode("latin-1")
        request = Request(scope["method"], scope["path"], headers, body, query)
        await _reply(send, await self._service.answer(request))

    async def _read(self, receive: Receive) -> bytes | None:
        """The body; a little more than allowed, if there is more."""
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if not message.get("more_body") or size > self._body_bytes:
                return b"".join(parts)


async def _reply(send: Send, answer: Answer) -> None:
    given = [
        ("content-type", answer.content_type),
        ("content-length", str(len(answer.body))),
        *answer.headers,
    ]
    headers = [(name.encode("latin-1"), text.encode("latin-1")) for name, text in given]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})
