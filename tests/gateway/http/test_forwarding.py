"""What becomes of a request that is passed on, and when it may be passed on again."""

import asyncio

import pytest

from gateway.http.wires import (
    HOST,
    Passing,
    Reader,
    Seen,
    Upstream,
    Writer,
    called,
    calling,
    chunked,
    gate,
    passing,
    polite,
    read_body,
    request,
    says,
    upstream,
)
from holdfast.errors import Mistake
from holdfast.gateway.http import (
    Exchange,
    Fields,
    Forwarded,
    Limits,
    Lost,
    Refused,
    Relayed,
    Truncated,
    Withheld,
)
from holdfast.proc import HeldPort
from patience import auntil

MISDIRECTED = (
    b"HTTP/1.1 421 Misdirected Request\r\ncontent-length: 5\r\nconnection: close\r\n\r\nwrong"
)


def not_421(status: int, _headers: Fields) -> bool:
    return status != 421


async def fence(_up: Upstream, _reader: Reader, writer: Writer, _seen: Seen) -> None:
    """Refuses before it reads the body, and closes, like `holdfast.jobs.fence`."""
    writer.write(MISDIRECTED)
    await writer.drain()
    writer.close()


class Fallback:
    """A handler that tries one upstream after the other."""

    def __init__(self, *addresses: tuple[str, int], **options: object) -> None:
        self.addresses = addresses
        self.options = options
        self.outcomes: list[Forwarded] = []
        self.cannot_replay: list[bool] = []

    async def __call__(self, exchange: Exchange) -> None:
        for address in self.addresses:
            outcome = await exchange.forward(address, relay=not_421, **self.options)  # type: ignore[arg-type]  # given by the test
            self.outcomes.append(outcome)
            if exchange.answered:
                return
            self.cannot_replay.append(exchange.cannot_replay)
            if exchange.cannot_replay:
                break
        await exchange.answer(503, [], b"no upstream")


@pytest.mark.parametrize("size", [0, 10, 200_000, 1_000_000])
@pytest.mark.parametrize("coding", ["length", "chunked"])
async def test_a_withheld_or_refused_request_goes_elsewhere_whole(size: int, coding: str) -> None:
    """After 421 and after a refused connection, the same request reaches another upstream,
    once, with every byte of its body; the caller sees only that answer."""
    body = bytes(range(256)) * (size // 256 + 1)
    body = body[:size]
    async with upstream(fence) as wrong, upstream() as right:
        nobody = HeldPort(HOST)
        handler = Fallback((HOST, nobody.port), wrong.address, right.address)
        async with called(handler) as caller:
            if coding == "length":
                await caller.send(request("POST", "/a?b=c", body=body))
            else:
                pieces = chunked(body[: size // 2], body[size // 2 :]) if size else chunked()
                fields = ["Transfer-Encoding: chunked"]
                await caller.send(request("POST", "/a?b=c", fields) + pieces)
            answer = await caller.answer()
        assert (answer.status, answer.body) == (200, b"POST /a?b=c %d" % size)
        refused, withheld, relayed = handler.outcomes
        assert isinstance(refused, Refused)
        # An upstream that closes over unread bytes may reset the line before we have read.
        assert isinstance(withheld, Withheld | Lost)
        if size <= 10:
            assert isinstance(withheld, Withheld)
            assert (withheld.status, withheld.body) == (421, b"wrong")
        assert isinstance(relayed, Relayed)
        assert [seen.body == body for seen in right.seen] == [True]
        assert handler.cannot_replay == [False, False]


async def test_a_body_beyond_the_bound_cannot_be_replayed() -> None:
    """More than `replay_bytes` has passed: the exchange says so and refuses to send again."""

    async def script(_up: Upstream, reader: Reader, writer: Writer, _seen: Seen) -> None:
        await reader.readexactly(300_000)
        writer.write(MISDIRECTED)

    async with upstream(script) as wrong:

        async def handler(exchange: Exchange) -> None:
            assert isinstance(await exchange.forward(wrong.address, relay=not_421), Withheld)
            assert exchange.cannot_replay
            with pytest.raises(Mistake):
                await exchange.forward(wrong.address)
            await exchange.answer(503, [], b"too late")

        async with called(handler, Limits(replay_bytes=100_000)) as caller:
            assert (await caller.ask(request("POST", body=bytes(400_000)))).body == b"too late"
        assert len(wrong.seen) == 1


async def test_a_large_body_is_held_until_the_upstream_wants_it() -> None:
    """With `hold_s`, a body that could not be replayed is not sent to an upstream that
    refuses the request: it reaches the right one, whole."""
    body = bytes(3_000_000)
    async with upstream(fence) as wrong, upstream() as right:
        handler = Fallback(wrong.address, right.address, hold_s=10.0)
        async with called(handler) as caller:
            assert (await caller.ask(request("POST", body=body))).body == b"POST / 3000000"
        assert isinstance(handler.outcomes[0], Withheld)
        assert wrong.seen[0].get(b"expect") == b"100-continue"
        assert len(right.seen[0].body) == 3_000_000


async def test_an_upstream_that_ignores_the_expectation_gets_the_body_all_the_same() -> None:
    """RFC 9110, 10.1.1: one must not wait for ever."""

    async def script(up: Upstream, reader: Reader, writer: Writer, seen: Seen) -> None:
        seen.fields = [one for one in seen.fields if one[0] != b"expect"]
        await polite(up, reader, writer, seen)

    async with passing(script, hold_s=0.05) as (_up, _handler, caller):
        assert (await caller.ask(request("POST", body=bytes(2_000_000)))).body == b"POST / 2000000"


@pytest.mark.parametrize("kept", [False, True], ids=["a new line", "a kept line"])
async def test_lost_means_that_it_may_have_taken_effect(kept: bool) -> None:
    """An upstream that reads the request and dies: Lost, the request was sent exactly once, and
    the caller has seen nothing."""

    async def script(up: Upstream, reader: Reader, writer: Writer, seen: Seen) -> None:
        if seen.target == "/first":
            await polite(up, reader, writer, seen)
        else:
            await read_body(reader, writer, seen)
            writer.transport.abort()

    async with passing(script) as (up, handler, caller):
        if kept:
            await caller.ask(request("POST", "/first", body=b"x"))
        answer = await caller.ask(request("POST", body=b"gradient"))
        assert (answer.status, answer.body) == (502, b"Lost")
        assert up.connections == 1
    assert [seen.body for seen in up.seen][kept:] == [b"gradient"]
    assert isinstance(handler.outcomes[-1], Lost)


HALF = {
    "length": b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n",
    "chunked": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\n",
    "for HTTP/1.0": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\n",
}


@pytest.mark.parametrize("end", ["it dies", "a malformed chunk"])
@pytest.mark.parametrize("name", HALF)
async def test_the_upstream_fails_in_the_middle_of_the_answer(name: str, end: str) -> None:
    """The caller's connection is cut, whichever way the answer was framed, and where only
    the end of the connection tells the end of the answer it is reset; the outcome is
    Truncated, with what had passed."""
    go = asyncio.Event()

    async def script(_up: Upstream, _reader: Reader, writer: Writer, _seen: Seen) -> None:
        writer.write(HALF[name] + b"hello")
        await go.wait()
        if end == "it dies" or name == "length":
            writer.transport.abort()
        else:
            writer.write(b"more\r\n0\r\n\r\n")

    async with passing(script) as (_up, handler, caller):
        await caller.send(b"GET / HTTP/1.0\r\n\r\n" if "1.0" in name else request())
        await caller.reader.readuntil(b"hello")
        go.set()
        with pytest.raises(ConnectionResetError):
            await caller.rest()
        await auntil(lambda: handler.outcomes)
    (outcome,) = handler.outcomes
    assert isinstance(outcome, Truncated)
    assert (outcome.status, outcome.bytes_out) == (200, 5)


HINTS = b"HTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n"
ANSWERS: dict[str, tuple[bytes, int, bytes]] = {
    "until close": (b"HTTP/1.1 200 OK\r\n\r\nall of it", 200, b"all of it"),
    "HTTP/1.0": (b"HTTP/1.0 200 OK\r\n\r\nold", 200, b"old"),
    "chunked": (
        b"HTTP/1.1 201 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunked(b"a", b"bc"),
        201,
        b"abc",
    ),
    "204": (b"HTTP/1.1 204 No Content\r\ncontent-length: 3\r\n\r\n", 204, b""),
    "304": (b"HTTP/1.1 304 Not Modified\r\ncontent-length: 3\r\n\r\n", 304, b""),
    "hints first": (
        HINTS + b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx",
        200,
        b"x",
    ),
    "unknown status": (b"HTTP/1.1 299 Odd\r\ncontent-length: 0\r\n\r\n", 299, b""),
    "two cookies": (b"HTTP/1.1 200 OK\r\nset-cookie: a\r\ncontent-length: 0\r\n\r\n", 200, b""),
}


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("cut", [0, 1, 7])
async def test_every_kind_of_answer_arrives(name: str, cut: int) -> None:
    """Whatever way the upstream frames its answer, and however TCP cuts it."""
    raw, status, body = ANSWERS[name]

    async def script(_up: Upstream, _reader: Reader, writer: Writer, _seen: Seen) -> None:
        for at in range(0, len(raw), cut or len(raw)):
            writer.write(raw[at : at + (cut or len(raw))])
            await asyncio.sleep(0)
        await writer.drain()
        if name in ("until close", "HTTP/1.0"):
            writer.close()

    async with passing(script) as (_up, handler, caller):
        for _ in range(2):  # the connection stays usable
            answer = await caller.ask(request())
            assert (answer.status, answer.body) == (status, body)
        assert name != "304" or answer.fields["content-length"] == "3"
        assert name != "204" or "content-length" not in answer.fields
    assert [type(outcome) for outcome in handler.outcomes] == [Relayed, Relayed]


BAD_ANSWERS = {
    "no HTTP": b"hello\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
    "length and coding": b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n"
    b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "odd coding": b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n",
    "bare LF": b"HTTP/1.1 200 OK\ncontent-length: 0\r\n\r\n",
    "folded": b"HTTP/1.1 200 OK\r\nx: a\r\n b\r\ncontent-length: 0\r\n\r\n",
    "control character": b"HTTP/1.1 200 OK\r\nx: a\x01\r\ncontent-length: 0\r\n\r\n",
    "switching": b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    "never final": b"HTTP/1.1 102 Processing\r\n\r\n" * 30,
    "endless": b"HTTP/1.1 200 OK\r\n" + b"x: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\r\n" * 2000,
    "HTTP/2": b"HTTP/2.0 200 OK\r\ncontent-length: 0\r\n\r\n",
}


@pytest.mark.parametrize("name", BAD_ANSWERS)
async def test_an_answer_that_cannot_be_understood_is_lost(name: str) -> None:
    """The request may have taken effect; the caller gets nothing of the doubtful answer."""
    async with passing(says(BAD_ANSWERS[name])) as (_up, _handler, caller):
        answer = await caller.ask(request())
        assert (answer.status, answer.body) == (502, b"Lost")


async def test_more_bytes_than_the_answer_has_are_not_the_next_answer() -> None:
    """Bytes behind an answer belong to nobody: the line is not used again."""
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n%d"
    poison = b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\npoison"
    async with passing(says(answer % 1 + poison, answer % 2)) as (up, _handler, caller):
        for number in (b"1", b"2"):
            assert (await caller.ask(request())).body == number
        assert up.connections == 2


async def test_a_silent_upstream_is_lost_after_its_time() -> None:
    """`answer_s` bounds the silence, not the whole: an upstream that says something goes on."""

    async def script(_up: Upstream, _reader: Reader, writer: Writer, seen: Seen) -> None:
        if seen.target == "/slow":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 12\r\n\r\n")
            for _ in range(12):
                await asyncio.sleep(0.2)
                writer.write(b"x")
                await writer.drain()
        else:
            await asyncio.sleep(60)

    async with passing(script, Limits(answer_s=1.5)) as (_up, _handler, caller):
        assert (await caller.ask(request(target="/slow"))).body == b"x" * 12
        assert (await caller.ask(request(target="/silent"))).body == b"Lost"


async def test_the_caller_leaves_while_the_upstream_works() -> None:
    """`gone` is true, forward raises CallerLeft, which is counted; the upstream's line is cut."""
    heard: list[bool] = []

    async def script(_up: Upstream, reader: Reader, _writer: Writer, _seen: Seen) -> None:
        await reader.read()

    async with upstream(script) as up:

        async def handler(exchange: Exchange) -> None:
            try:
                await exchange.forward(up.address)
            finally:
                heard.append(exchange.gone)

        async with gate(handler) as server:
            async with calling(server.port) as caller:
                await caller.send(request())
                await auntil(lambda: up.seen)
            await auntil(lambda: heard and not up._tasks)
            assert heard == [True]
            assert server.counts["caller_left"] == 1


@pytest.mark.parametrize(
    ("field", "part"),
    [
        ("Content-Length: 1000", b"x" * 500),
        ("Transfer-Encoding: chunked", b"1f4\r\n" + b"x" * 500 + b"\r\n"),
    ],
)
async def test_a_caller_that_leaves_in_the_middle_of_its_body_makes_no_request(
    field: str, part: bytes
) -> None:
    """The upstream never sees the end of the body, in either framing."""
    async with upstream() as up, gate(Passing(up)) as server:
        async with calling(server.port) as caller:
            await caller.send(request("POST", fields=[field]) + part)
            await auntil(lambda: up.seen)
        await auntil(lambda: not up._tasks)
    assert [seen.whole for seen in up.seen] == [False]


async def test_connections_to_an_upstream_are_bounded_and_shared() -> None:
    """With two lines allowed, five requests at once are served over two connections; when
    none becomes free in time, the request was Refused and never sent."""
    release = asyncio.Event()

    async def script(up: Upstream, reader: Reader, writer: Writer, seen: Seen) -> None:
        if seen.target == "/wait":
            await release.wait()
        await polite(up, reader, writer, seen)

    async with upstream(script) as up:
        handler = Passing(up)
        limits = Limits(upstream_connections=2, connect_s=0.3)
        async with gate(handler, limits) as server:

            async def one(target: str) -> int:
                async with calling(server.port) as caller:
                    await caller.send(request(target=target))
                    return (await caller.answer()).status

            assert await asyncio.gather(*(one(f"/{n}") for n in range(5))) == [200] * 5
            assert up.connections <= 2
            waiting = [asyncio.create_task(one("/wait")) for _ in range(2)]
            await auntil(lambda: len(up.seen) == 7)
            assert await one("/late") == 502
            release.set()
            assert await asyncio.gather(*waiting) == [200, 200]
        assert isinstance(handler.outcomes[5], Refused)
        assert "/late" not in [seen.target for seen in up.seen]


async def test_idle_lines_are_closed_after_their_time() -> None:
    """Nothing is kept for an upstream that nobody asks any more."""
    async with passing(limits=Limits(upstream_idle_s=0.1)) as (_up, _handler, caller):
        await caller.ask(request())
        assert caller.server.pool.open_lines == 1
        await auntil(lambda: caller.server.pool.open_lines == 0)


async def test_an_early_answer_reaches_a_caller_that_is_still_sending() -> None:
    """The upstream refuses a large body from its head alone: the caller gets the refusal."""

    async def script(_up: Upstream, reader: Reader, writer: Writer, _seen: Seen) -> None:
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno")
        await reader.read()

    async with passing(script) as (_up, _handler, caller):
        head = request("POST", fields=["Content-Length: 50000000"])
        answer = await caller.ask(head + bytes(1000))
        assert (answer.status, answer.body) == (413, b"no")
        assert answer.fields["connection"] == "close"
        assert await caller.closed()


async def test_relay_that_raises_is_the_handlers_error() -> None:
    """The error comes out of `forward`, and another answer can be given."""

    def relay(_status: int, _headers: Fields) -> bool:
        raise LookupError("no")

    async with upstream() as up:

        async def handler(exchange: Exchange) -> None:
            try:
                await exchange.forward(up.address, relay=relay)
            except LookupError:
                await exchange.answer(500, [], b"mine")

        async with called(handler) as caller:
            assert (await caller.ask(request())).body == b"mine"
