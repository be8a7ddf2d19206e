"""HTTP/1.1 as a streaming reverse proxy: the engine under the gateway.

    async def handler(exchange: Exchange) -> None:
        outcome = await exchange.forward(("127.0.0.1", 8001))
        if isinstance(outcome, Refused | Lost):
            await exchange.answer(502, [], outcome.reason.encode())

    server = Server(handler)
    await server.start("127.0.0.1", 8000)

The engine knows how messages are framed, bounded, streamed, kept and sent again. It does
not know where a request belongs, or what an answer means.

    head, answers, framing, serialize, pace, shares, limits, outcomes     pure
    intake → passage → exchange → connection → server             a request's way in
    line, pool                                                    the way to upstreams
"""

from holdfast.gateway.http.exchange import Exchange
from holdfast.gateway.http.head import Fields, Head
from holdfast.gateway.http.limits import Limits
from holdfast.gateway.http.outcomes import Forwarded, Lost, Refused, Relayed, Truncated, Withheld
from holdfast.gateway.http.pool import Pool
from holdfast.gateway.http.server import Handler, Server, run

__all__ = [
    "Exchange",
    "Fields",
    "Forwarded",
    "Handler",
    "Head",
    "Limits",
    "Lost",
    "Pool",
    "Refused",
    "Relayed",
    "Server",
    "Truncated",
    "Withheld",
    "run",
]
