"""Bytes that are no request, or more than one: each with the exact status that it gets, and
none of them reaches an upstream."""

import asyncio
import json

import pytest

from gateway.http.wires import chunked, passing, request, says
from holdfast.gateway.http import Limits

OK = b"GET / HTTP/1.1\r\nHost: a\r\n"
POST_X = b"POST /x HTTP/1.1\r\nHost: a\r\n"
POST = b"POST / HTTP/1.1\r\nHost: a\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"

MALFORMED: dict[str, bytes] = {
    # Where the body ends must be said in one way.
    "two lengths": POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    "the same length twice": POST + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
    "a list of lengths": POST + b"Content-Length: 3, 3\r\n\r\nabc",
    "length and coding": POST
    + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "coding and length": POST
    + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
    "negative length": POST + b"Content-Length: -1\r\n\r\n",
    "signed length": POST + b"Content-Length: +3\r\n\r\nabc",
    "hexadecimal length": POST + b"Content-Length: 0x3\r\n\r\nabc",
    "empty length": POST + b"Content-Length: \r\n\r\n",
    "length with a blank inside": POST + b"Content-Length: 1 2\r\n\r\nabc",
    "length with an underscore": POST + b"Content-Length: 1_0\r\n\r\n0123456789",
    "length of too many digits": POST + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n",
    "unknown coding": POST + b"Transfer-Encoding: gzip\r\n\r\n0\r\n\r\n",
    "coding in front of chunked": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "coding behind chunked": POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "identity": POST + b"Transfer-Encoding: identity\r\n\r\n",
    "chunked twice": POST
    + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked with a tab": POST + b"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
    "quoted chunked": POST + b'Transfer-Encoding: "chunked"\r\n\r\n0\r\n\r\n',
    "coding of HTTP/1.0": CHUNKED.replace(b"1.1", b"1.0") + b"0\r\n\r\n",
    # Lines and fields.
    "bare LF after the request line": b"GET / HTTP/1.1\nHost: a\r\n\r\n",
    "bare LF throughout": b"GET / HTTP/1.1\nHost: a\n\n",
    "bare LF after a field": OK + b"X: 1\nY: 2\r\n\r\n",
    "bare CR in a value": OK + b"X: a\rb\r\n\r\n",
    "CR CR LF": OK + b"X: a\r\r\n\r\n",
    "NUL in a value": OK + b"X: a\0b\r\n\r\n",
    "NUL in a name": OK + b"X\0Y: a\r\n\r\n",
    "control character in a value": OK + b"X: a\x01b\r\n\r\n",
    "DEL in a value": OK + b"X: a\x7fb\r\n\r\n",
    "folded line": OK + b"X: a\r\n b\r\n\r\n",
    "folded length": POST + b"Content-Length:\r\n 3\r\n\r\nabc",
    "first field begins with a blank": b"GET / HTTP/1.1\r\n Host: a\r\n\r\n",
    "blank before the colon": OK + b"X : a\r\n\r\n",
    "blank before the colon of the length": POST + b"Content-Length : 3\r\n\r\nabc",
    "tab before the colon of the coding": POST + b"Transfer-Encoding\t: chunked\r\n\r\n0\r\n\r\n",
    "no colon": OK + b"nonsense\r\n\r\n",
    "empty name": OK + b": a\r\n\r\n",
    "parenthesis in a name": OK + b"X(Y): a\r\n\r\n",
    "high byte in a name": OK + b"X\xe9: a\r\n\r\n",
    "no Host": b"GET / HTTP/1.1\r\n\r\n",
    "two Hosts": OK + b"Host: b\r\n\r\n",
    "empty Host": b"GET / HTTP/1.1\r\nHost: \r\n\r\n",
    "Host with a path": b"GET / HTTP/1.1\r\nHost: a/b\r\n\r\n",
    "Host with a user": b"GET / HTTP/1.1\r\nHost: a@b\r\n\r\n",
    "two keys": OK + b"X-API-Key: a\r\nX-Api-Key: b\r\n\r\n",
    "two authorizations": OK + b"Authorization: a\r\nAuthorization: b\r\n\r\n",
    # The request line.
    "absolute form": b"GET http://b/ HTTP/1.1\r\nHost: a\r\n\r\n",
    "authority form": b"GET b:80 HTTP/1.1\r\nHost: a\r\n\r\n",
    "asterisk form": b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n",
    "no target": b"GET HTTP/1.1\r\nHost: a\r\n\r\n",
    "two blanks": b"GET  / HTTP/1.1\r\nHost: a\r\n\r\n",
    "blank in the target": b"GET /a b HTTP/1.1\r\nHost: a\r\n\r\n",
    "tab for a blank": b"GET\t/ HTTP/1.1\r\nHost: a\r\n\r\n",
    "blank at the end": b"GET / HTTP/1.1 \r\nHost: a\r\n\r\n",
    "fragment": b"GET /a#b HTTP/1.1\r\nHost: a\r\n\r\n",
    "half a percent-encoding": b"GET /a%4 HTTP/1.1\r\nHost: a\r\n\r\n",
    "wrong percent-encoding": b"GET /a%zz HTTP/1.1\r\nHost: a\r\n\r\n",
    "wrong percent-encoding in the query": b"GET /?a=%g0 HTTP/1.1\r\nHost: a\r\n\r\n",
    "encoded NUL": b"GET /a%00b HTTP/1.1\r\nHost: a\r\n\r\n",
    "encoded line end": b"GET /a%0d%0ab HTTP/1.1\r\nHost: a\r\n\r\n",
    "encoded backslash": b"GET /a%5c..%5cb HTTP/1.1\r\nHost: a\r\n\r\n",
    "backslash": b"GET /a\\b HTTP/1.1\r\nHost: a\r\n\r\n",
    "high byte in the target": b"GET /\xe9 HTTP/1.1\r\nHost: a\r\n\r\n",
    "dot segments": b"GET /a/../b HTTP/1.1\r\nHost: a\r\n\r\n",
    "encoded dot segments": b"GET /a/%2e%2E/b HTTP/1.1\r\nHost: a\r\n\r\n",
    "dot segments between encoded slashes": b"GET /a%2f..%2fb HTTP/1.1\r\nHost: a\r\n\r\n",
    "HTTP/0.9": b"GET /\r\n\r\n",
    "HTTP/1.10": b"GET / HTTP/1.10\r\nHost: a\r\n\r\n",
    "lower-case version": b"GET / http/1.1\r\nHost: a\r\n\r\n",
    "RTSP": b"GET / RTSP/1.0\r\nHost: a\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "method with a colon": b"GET: / HTTP/1.1\r\nHost: a\r\n\r\n",
    # Chunks.
    "chunk size with a sign": CHUNKED + b"+1\r\na\r\n0\r\n\r\n",
    "chunk size with 0x": CHUNKED + b"0x1\r\na\r\n0\r\n\r\n",
    "chunk size with a blank": CHUNKED + b" 1\r\na\r\n0\r\n\r\n",
    "no chunk size": CHUNKED + b"\r\na\r\n0\r\n\r\n",
    "huge chunk size": CHUNKED + b"fffffffffffffffff\r\n",
    "chunk too short": CHUNKED + b"1\r\nab\r\n0\r\n\r\n",
    "chunk line ends with LF": CHUNKED + b"1\na\r\n0\r\n\r\n",
    "chunk ends with LF": CHUNKED + b"1\r\na\n0\r\n\r\n",
    "control character in an extension": CHUNKED + b"1;a=\0\r\na\r\n0\r\n\r\n",
    "chunk followed by something else": CHUNKED + b"1\r\naXX0\r\n\r\n",
    "extension ends with LF": CHUNKED + b"1;ab\na\r\n0\r\n\r\n",
    "trailer ends with LF": CHUNKED + b"0\r\nX: a\nY: b\r\n\r\n",
    "endless extension": CHUNKED + b"1;" + b"a" * 9000,
    "long trailer of short lines": CHUNKED + b"0\r\n" + b"X: a\r\n" * 2000 + b"\r\n",
    "malformed trailer": CHUNKED + b"0\r\nno colon\r\n\r\n",
    "folded trailer": CHUNKED + b"0\r\nX: a\r\n b\r\n\r\n",
}
"""Each is answered with 400."""
HOSTILE: dict[str, tuple[bytes, int]] = {
    **{name: (raw, 400) for name, raw in MALFORMED.items()},
    "HTTP/1.2": (b"GET / HTTP/1.2\r\nHost: a\r\n\r\n", 505),
    "HTTP/2": (b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", 505),
    "HTTP/2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    "CONNECT": (b"CONNECT b:80 HTTP/1.1\r\nHost: b:80\r\n\r\n", 405),
    "TRACE": (b"TRACE / HTTP/1.1\r\nHost: a\r\n\r\n", 405),
    "unknown method": (b"GRADIENT / HTTP/1.1\r\nHost: a\r\n\r\n", 405),
    "lower-case method": (b"get / HTTP/1.1\r\nHost: a\r\n\r\n", 405),
    "unknown expectation": (POST + b"Expect: a-miracle\r\nContent-Length: 1\r\n\r\n", 417),
    "10 GB declared": (POST + b"Content-Length: 10000000000\r\n\r\n", 413),
    "an undeclared body beyond the bound": (CHUNKED + chunked(*[bytes(10_000)] * 11), 413),
    "long target": (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 414),
    "endless target": (b"GET /" + b"a" * 9000, 414),
    "large field": (OK + b"X: " + b"a" * 33000 + b"\r\n\r\n", 431),
    "endless fields": (OK + b"X: a\r\n" * 8000, 431),
    "many fields": (OK + b"X: a\r\n" * 100 + b"\r\n", 431),
}


WHOLE = 1 << 20
CASES = [(name, WHOLE) for name in HOSTILE]
CASES += [("bare CR in a value", 1), ("no Host", 1), ("two lengths", 1), ("endless target", 700)]


@pytest.mark.parametrize(("name", "cut"), CASES)
async def test_hostile_bytes_get_their_status_and_nothing_behind_them_counts(
    name: str, cut: int
) -> None:
    """A hostile message, however it is cut, gets its exact status and ends the connection: what
    follows it, also when it looks like a request, never reaches an upstream; nor does the message
    itself, or the end of a body beyond the bound."""
    stream, status = HOSTILE[name]
    stream += request(target="/smuggled")
    # Time does not close what should be closed.
    limits = Limits(head_s=100.0, idle_s=100.0, body_bytes=100_000)
    async with passing(limits=limits) as (up, _, caller):
        for at in range(0, len(stream), cut):
            caller.writer.write(stream[at : at + cut])
            await asyncio.sleep(0)
        answer = await caller.answer()
        assert (answer.status, answer.fields["connection"]) == (status, "close")
        assert answer.fields["content-type"] == "application/json"
        assert json.loads(answer.body)["error"].keys() == {"code", "message"}
        assert ("allow" in answer.fields) == (status == 405)
        assert await caller.closed()
    assert [seen for seen in up.seen if seen.whole] == []


async def test_a_hostile_message_behind_a_good_one_spoils_only_itself() -> None:
    """A pipelined good request is answered first, then the bad one refused."""
    async with passing() as (up, _, caller):
        assert (
            await caller.ask(request(target="/good") + b"GET / HTTP/1.1\r\n\r\n" + request())
        ).body == b"GET /good 0"
        assert (await caller.answer()).status == 400
        assert await caller.closed()
        assert [seen.target for seen in up.seen] == ["/good"]


GOOD: dict[str, bytes] = {
    "an empty line first": b"\r\n" + request(target="/x"),
    "HTTP/1.0 without Host": b"GET /x HTTP/1.0\r\n\r\n",
    "an upgrade is ignored": request(
        target="/x", fields=["Connection: Upgrade", "Upgrade: websocket"]
    ),
    "HTTP/2 is not taken up": request(
        target="/x",
        fields=["Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: A"],
    ),
    "odd but valid": b"GET /x HTTP/1.1\r\nHOST:a:80\r\nX-Empty:\r\nX-High: \xe9\t\xff\r\n\r\n",
    "IPv6 Host": b"GET /x HTTP/1.1\r\nHost: [::1]:80\r\n\r\n",
    "upper-case coding": POST_X + b"Transfer-Encoding: Chunked\r\n\r\n0\r\n\r\n",
    "extensions and a trailer": POST_X
    + b"Transfer-Encoding: chunked\r\n\r\n"
    + b'1;a="b"\r\nz\r\n000;c\r\nX-T: 1\r\n\r\n',
}


@pytest.mark.parametrize("name", GOOD)
async def test_unusual_but_valid_requests_pass(name: str) -> None:
    """Strict is not narrow: what the standard allows reaches the upstream."""
    async with passing() as (up, _, caller):
        assert (await caller.ask(GOOD[name])).status == 200
        assert [seen.target for seen in up.seen] == ["/x"]


async def test_fields_of_one_connection_are_not_passed_on() -> None:
    """RFC 9110, 7.6.1, in both directions: Connection, what it names, and the known ones."""

    answered = (
        b"HTTP/1.1 200 OK\r\nConnection: keep-alive, X-Mine\r\nX-Mine: 1\r\nKeep-Alive: a\r\n"
        b"Proxy-Authenticate: b\r\nTrailer: c\r\nUpgrade: d\r\nX-Yours: 2\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    )
    hop = [
        "Connection: close, X-Named, Host",
        "X-Named: 1",
        "Keep-Alive: timeout=5",
        "Proxy-Authorization: Basic abc",
        "Proxy-Connection: keep-alive",
        "TE: trailers",
        "Trailer: X",
        "Upgrade: websocket",
        "X-Kept: yes",
        "X_Job: mine",
        "X-Job: mine",
    ]
    script, theirs = says(answered), {b"x-job": b"ours"}
    async with passing(script, replace=theirs, remove=[b"x-gone"]) as (up, _, caller):
        answer = await caller.ask(request(fields=[*hop, "X-Gone: 1", "X_Gone: 1"]))
        assert answer.fields == {
            "x-yours": "2",
            "transfer-encoding": "chunked",
            "connection": "close",
        }
    assert dict(up.seen[0].fields) == {
        b"host": b"gate",
        b"x-kept": b"yes",
        b"x-job": b"ours",
        b"via": b"1.1 holdfast",
    }
