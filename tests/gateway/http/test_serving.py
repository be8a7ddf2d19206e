"""One caller's connection: order, reuse, time and number."""

import asyncio
import contextlib
import itertools
import ssl
from pathlib import Path

import pytest

from gateway.http.wires import (
    Caller,
    Flood,
    Passing,
    answers,
    called,
    calling,
    chunked,
    drip,
    gate,
    passing,
    request,
    self_signed,
    settled,
    upstream,
)
from holdfast.errors import Mistake
from holdfast.gateway.http import Exchange, Limits, Server
from patience import auntil


async def echo(exchange: Exchange) -> None:
    """Answers with the request's target and body."""
    body = await exchange.body(1 << 20)
    await exchange.answer(
        200, [(b"x-peer", exchange.peer.encode())], exchange.head.target.encode() + b" " + body
    )


async def test_requests_of_one_connection_are_answered_in_order() -> None:
    """Keep-alive and pipelining: many requests in one write, of every framing."""
    async with upstream() as up, gate(Passing(up)) as server, calling(server.port) as caller:
        coded = ["Transfer-Encoding: chunked"]
        for number in range(1, 11):
            await caller.send(
                request("GET", f"/{number}")
                + request("POST", f"/{number}", body=b"x" * number * 100)
                + request("PUT", f"/{number}", coded)
                + chunked(b"ab", b"c" * number)
            )
        for number in range(1, 11):
            for said in (b"GET /%d 0", b"POST /%d %d00", b"PUT /%d %d"):
                figures = (number, number + 2 * said.startswith(b"PUT"))[: said.count(b"%d")]
                assert (await caller.answer()).body == said % figures
        assert up.connections == 1


async def test_pipelined_requests_wait_outside_of_memory() -> None:
    """While a request is in work, what the caller sends ahead is read up to a bound only."""
    count, release = 1000, asyncio.Event()
    async with called(answers(200, after=release), Limits(waiting_bytes=10_000)) as caller:
        await caller.send(request())
        flood = Flood(caller, request(fields=["X: " + "a" * 20_000]), count)
        assert await settled(lambda: flood.sent) < count
        (connection,) = caller.server._connections
        assert len(connection._ahead) <= 10_000 + 256 * 1024
        release.set()
        for _ in range(count + 1):
            assert (await caller.answer()).status == 200
        await flood.sending


async def test_callers_of_http_1_0() -> None:
    """They are closed on, unless they ask not to be; an answer of unknown length ends with
    the connection."""
    async with gate(echo) as server:
        async with calling(server.port) as caller:
            answer = await caller.ask(b"GET /a HTTP/1.0\r\n\r\n")
            assert (answer.body, answer.fields["connection"]) == (b"/a ", "close")
            assert await caller.closed()
        async with calling(server.port) as caller:
            for _ in range(2):
                answer = await caller.ask(
                    b"POST /a HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: 1\r\n\r\nx"
                )
                assert (answer.body, answer.fields["connection"]) == (b"/a x", "keep-alive")


async def test_head_has_no_body() -> None:
    """HEAD gets the fields and no byte of a body, from us and from an upstream."""
    async with passing(ours="/ours") as (_up, _handler, caller):
        for target, length in (("/ours", "12"), ("/theirs", "14"), ("/ours", "12")):
            answer = await caller.ask(request("HEAD", target), "HEAD")
            assert answer.fields["content-length"] == length


async def test_100_continue_is_said_when_the_body_is_wanted() -> None:
    """By us, not by the upstream, and only if somebody wants the body."""
    fields = ["Expect: 100-continue", "Content-Length: 4"]
    async with passing(ours="/no") as (up, _handler, caller):
        await caller.send(request("POST", fields=fields))
        said = await caller.reader.readuntil(b"\r\n\r\n")
        assert said == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert (await caller.ask(b"body")).body == b"POST / 4"
        assert up.seen[0].get(b"expect") is None
        answer = await caller.ask(request("POST", "/no", fields))
        assert (answer.status, answer.interim) == (403, [])
        assert answer.fields["connection"] == "close"


@pytest.mark.parametrize(("size", "kept"), [(1000, True), (500_000, True), (5_000_000, False)])
async def test_an_unread_body_is_dropped_or_ends_the_connection(size: int, kept: bool) -> None:
    """An answer without reading the body: a little of it is dropped and the connection goes
    on; of much, the caller still gets the answer."""
    async with called(answers(401, b"who are you?")) as caller:
        sending = asyncio.create_task(caller.send(request("POST", body=bytes(size)) + request()))
        answer = await caller.answer()
        assert (answer.status, answer.body) == (401, b"who are you?")
        assert answer.fields.get("connection") == (None if kept else "close")
        if kept:
            assert (await caller.answer()).status == 401
            await sending
        else:
            sending.cancel()


async def test_a_body_beyond_what_the_handler_wants() -> None:
    """`body(limit)` raises TooLarge, from the declared length or on the way; let through, it
    becomes 413."""
    large = bytes(600 << 10)
    coded = request("POST", fields=["Transfer-Encoding: chunked"]) + chunked(large, large)
    for raw in (request("POST", body=large + large), coded):
        async with called(echo) as caller:
            assert (await caller.ask(raw)).status == 413


async def test_a_request_is_answered_once() -> None:
    """A second answer is a mistake of the handler; the caller sees only the first, and the end
    of the connection that it asked for."""

    async def handler(exchange: Exchange) -> None:
        await exchange.answer(200, [], b"one")
        with pytest.raises(Mistake):
            await exchange.answer(200, [], b"two")

    async with called(handler) as caller:
        both = request(fields=["Connection: x, Close"]) + request(target="/ignored")
        answer = await caller.ask(both)
        assert (answer.body, answer.fields["connection"]) == (b"one", "close")
        assert await caller.closed()


@pytest.mark.parametrize("field", [(b"x", b"a\r\nset-cookie: b"), (b"x y", b"a"), (b"x", b"a\0")])
async def test_a_field_that_would_inject_another_is_refused(field: tuple[bytes, bytes]) -> None:
    """Values that a handler took from somewhere cannot end a line, in either direction."""
    async with upstream() as up:

        async def handler(exchange: Exchange) -> None:
            for call in (
                lambda: exchange.answer(200, [field]),
                lambda: exchange.forward(up.address, replace=dict([field])),
                lambda: exchange.forward(up.address, path="/a b"),
            ):
                with pytest.raises(Mistake):
                    await call()
            await exchange.answer(200)

        async with called(handler) as caller:
            assert (await caller.ask(request())).status == 200
    assert not up.seen


async def test_a_handler_that_fails_is_an_answer_of_500() -> None:
    """The caller hears that it was us, without details; the error is recorded."""
    failures: list[Exception] = []

    async def handler(_exchange: Exchange) -> None:
        raise LookupError("secret")

    server = Server(handler, record=lambda error, _: failures.append(error))
    await server.start("127.0.0.1", 0)
    async with calling(server.port) as caller:
        answer = await caller.ask(request())
        assert answer.status == 500
        assert b"secret" not in answer.body
    await server.stop(0.1)
    assert [type(error) for error in failures] == [LookupError]


# Time.


async def test_a_slow_head_gets_408() -> None:
    """Slow loris: a head that does not arrive in time ends with 408, however busily its
    bytes drip; a caller that says nothing at all is closed on."""
    async with gate(echo, Limits(head_s=0.3)) as server:
        async with calling(server.port) as caller, calling(server.port) as mute:
            answer = asyncio.create_task(caller.answer())
            head = request(target="/" + "a" * 4000)
            await drip(caller, (bytes([byte]) for byte in head), answer)
            assert (await answer).status == 408
            assert await caller.closed()
            assert await mute.closed()
        assert server.counts["head_too_slow"] == 1


async def test_empty_lines_do_not_keep_a_connection() -> None:
    """Line ends in front of a request do not renew the time for it."""
    async with called(echo, Limits(head_s=0.3)) as caller:
        closed = asyncio.create_task(caller.closed())
        await drip(caller, itertools.repeat(b"\r\n", 500), closed)


async def test_a_body_without_progress_gets_408() -> None:
    """A body must keep its pace; the upstream never sees it end."""
    async with upstream() as up:
        limits = Limits(pace_s=0.4, pace_bytes_per_s=1000)
        async with called(Passing(up), limits) as caller:
            await caller.send(request("POST", fields=["Content-Length: 1000000"]))
            answer = asyncio.create_task(caller.answer())
            await drip(caller, itertools.repeat(b"x", 1000), answer)
            assert (await answer).status == 408
        assert [seen.whole for seen in up.seen] == [False]


async def test_a_caller_that_does_not_read_is_cut() -> None:
    """An answer that nobody takes does not hold a connection for ever."""
    async with called(answers(200, bytes(30_000_000)), Limits(pace_s=0.3)) as caller:
        caller.writer.transport.pause_reading()  # type: ignore[attr-defined]  # it reads, too
        await caller.send(request())
        await auntil(lambda: caller.server.counts["slow_reader"] == 1)
        await auntil(lambda: caller.server.connections == 0)


# Number.


async def test_strangers_that_say_nothing_make_room() -> None:
    """Idle connections keep nobody out: the oldest ones close, and who asks is answered."""
    limits = Limits(strangers=2, connections=12, greeting_s=0.01)
    async with gate(echo, limits) as server, contextlib.AsyncExitStack() as stack:
        idle = [await stack.enter_async_context(calling(server.port)) for _ in range(12)]
        await auntil(lambda: server.connections > 1)
        await asyncio.sleep(2 * limits.greeting_s)
        for _ in range(12):
            async with calling(server.port) as caller:
                assert (await caller.ask(request())).status == 200
        assert await idle[0].closed()


async def test_strangers_that_come_at_once_are_not_cut_before_they_speak() -> None:
    """Many callers at once all get their answers; one beyond all places gets 503."""
    limits = Limits(strangers=2, connections=12, greeting_s=60.0)
    async with gate(echo, limits) as server, contextlib.AsyncExitStack() as stack:
        callers = [await stack.enter_async_context(calling(server.port)) for _ in range(12)]
        await auntil(lambda: server.connections == 12)
        async with calling(server.port) as caller:
            answer = await caller.answer()
            assert (answer.status, answer.fields["retry-after"]) == (503, "1")
            assert await caller.closed()
        for one in callers:
            assert (await one.ask(request())).status == 200


async def test_connections_rest_for_a_while_and_an_owners_for_longer() -> None:
    """Between requests a connection rests for a bounded time, and gets no answer for it. A request
    that was charged to nobody does not keep its connection for as long as an owner's."""

    async def handler(exchange: Exchange) -> None:
        if exchange.head.path == "/mine":
            assert exchange.charge("me") == ""
        await exchange.answer(200)

    async with (
        gate(handler, Limits(stranger_s=0.6, idle_s=2.0)) as server,
        calling(server.port) as silent,
        calling(server.port) as stranger,
        calling(server.port) as owner,
    ):
        assert (await owner.ask(request(target="/mine"))).status == 200
        assert (await stranger.ask(request())).status == 200
        assert await silent.closed()
        assert await stranger.closed()
        assert (await owner.ask(request())).status == 200
        assert await owner.closed()


@pytest.mark.parametrize("what", ["requests", "polls"])
async def test_an_owner_leaves_as_many_places_as_it_takes(what: str) -> None:
    """Half for one that is alone, half of the rest for the next, and back when they are done."""
    release = asyncio.Event()
    over: list[str] = []

    async def handler(exchange: Exchange) -> None:
        if said := exchange.charge(exchange.head.path[1:], poll=what == "polls"):
            over.append(said)
            await exchange.answer(429)
        else:
            await release.wait()
            await exchange.answer(200)

    limits = Limits(requests=12, polls=8) if what == "polls" else Limits(requests=8)
    async with gate(handler, limits) as server, contextlib.AsyncExitStack() as stack:

        async def send(owner: str) -> Caller:
            caller = await stack.enter_async_context(calling(server.port))
            await caller.send(request(target=f"/{owner}"))
            return caller

        callers = [await send("greedy") for _ in range(4)]
        await auntil(lambda: server.requests == 4)
        assert (await (await send("greedy")).answer()).status == 429
        callers += [await send("modest") for _ in range(2)]
        await auntil(lambda: server.requests == 6)
        assert (await (await send("greedy")).answer()).status == 429
        callers.append(await send("third"))
        await auntil(lambda: server.requests == 7)
        assert over == [what, what]
        release.set()
        for caller in callers:
            assert (await caller.answer()).status == 200
        assert (await (await send("greedy")).answer()).status == 200, "the places are free again"


async def test_an_owner_leaves_room_for_others_connections() -> None:
    """One connection above its share is told so and closed; another owner's are taken."""

    async def handler(exchange: Exchange) -> None:
        over = exchange.charge(exchange.head.path[1:])
        await exchange.answer(429 if over else 200, [], over.encode())

    limits = Limits(connections=12, strangers=4)
    async with gate(handler, limits) as server, contextlib.AsyncExitStack() as stack:

        async def ask(owner: str) -> tuple[Caller, int]:
            caller = await stack.enter_async_context(calling(server.port))
            await caller.send(request(target=f"/{owner}"))
            return caller, (await caller.answer()).status

        for _ in range(4):
            assert (await ask("greedy"))[1] == 200
        caller, status = await ask("greedy")
        assert status == 429
        assert await caller.closed()
        caller, status = await ask("modest")
        assert status == 200
        await caller.send(
            request(target="/greedy")
        )  # a proxy's connection, with another's request
        assert (await caller.answer()).status == 429


async def test_one_request_too_many_gets_503() -> None:
    """Requests in work are bounded; a refused one took no effect."""
    release = asyncio.Event()
    async with (
        gate(answers(200, after=release), Limits(requests=1)) as server,
        calling(server.port) as first,
        calling(server.port) as second,
    ):
        await first.send(request())
        await auntil(lambda: server.requests)
        assert (await second.ask(request())).status == 503
        release.set()
        assert (await first.answer()).status == 200


async def test_limits_must_be_positive() -> None:
    """A bound of nothing is refused when the server is made, by name."""
    with pytest.raises(Mistake, match="head_s"):
        Server(echo, limits=Limits(head_s=0))


# TLS.


async def test_callers_may_come_over_tls(tmp_path: Path) -> None:
    """The same exchange over TLS: bodies both ways, keep-alive, refusals; plain HTTP on a TLS
    port, and TLS without a handshake, end without an answer."""
    server_side, cert = self_signed(tmp_path)
    caller_side = ssl.create_default_context(cafile=str(cert))
    async with upstream() as up, gate(Passing(up), tls=server_side) as server:
        async with calling(server.port, caller_side) as caller:
            for size in (10, 3_000_000):
                assert (
                    await caller.ask(request("POST", body=bytes(size)))
                ).body == b"POST / %d" % size
            assert (await caller.ask(b"GET / HTTP/1.1\r\n\r\n")).status == 400
            assert await caller.closed()
        async with calling(server.port) as plain:
            await plain.send(request())
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await plain.answer()
