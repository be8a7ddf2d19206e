"""The service as an ASGI application: reads bounded bodies, writes answers.

A body has a bound, and so have all bodies of the requests in work together: a request that
exceeds the second one is answered with 503 and may be sent again.
"""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from holdfast.errors import Unavailable
from holdfast.trainer.service import Request, Service
from holdfast.trainer.wire import answers
from holdfast.trainer.wire.answers import Answer
from holdfast.trainer.wire.body import DEFAULT_LIMITS, Budget, Limits, Share

__all__ = ["App"]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class App:
    """`Service` for an ASGI server."""

    def __init__(self, service: Service, limits: Limits = DEFAULT_LIMITS) -> None:
        self._service = service
        self._body_bytes = limits.body_bytes
        self._budget = Budget(limits.all_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        with self._budget.share() as share:
            try:
                body = await self._read(receive, share)
            except Unavailable as error:
                # The rest of the body is not read: the next request cannot be told from it.
                answer = self._service.refusal(scope["path"], error)
                closing = (*answer.headers, ("connection", "close"))
                await _reply(send, msgspec.structs.replace(answer, headers=closing))
                return
            if body is not None:  # else whoever asked has gone
                await _reply(send, await self._answer(scope, body, share))

    async def _answer(self, scope: Scope, body: bytes, share: Share) -> Answer:
        if len(body) > self._body_bytes:
            text = f"a body has at most {self._body_bytes} bytes"
            return answers.problem(413, "too_large", text, connection="close")
        headers = {
            name.decode("latin-1").lower(): text.decode("latin-1")
            for name, text in scope["headers"]
        }
        query = scope.get("query_string", b"").decode("latin-1")
        request = Request(scope["method"], scope["path"], headers, body, query, share)
        return await self._service.answer(request)

    async def _read(self, receive: Receive, share: Share) -> bytes | None:
        """The body; a little more than allowed, if there is more."""
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return None
            parts.append(message.get("body", b""))
            share.take(len(parts[-1]))
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
