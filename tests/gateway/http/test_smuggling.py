"""Whatever a caller sends, in whatever pieces: an upstream sees well-formed requests only,
those that an independent reading of the same bytes finds, each with exactly its body."""

import asyncio
import random
import re

import uvloop
from hypothesis import HealthCheck, example, given, note, settings
from hypothesis import strategies as st

from gateway.http.wires import Passing, called, upstream
from holdfast.gateway.http import Limits

LIMITS = Limits(head_s=0.5, idle_s=0.5, pace_s=0.5, linger_s=0.5)
QUIET_S = 0.05

Told = tuple[bytes, bytes, bytes]
"""Method, target and body."""

TOKENS = [
    b"GET ",
    b"POST ",
    b"/",
    b"/smuggled",
    b" HTTP/1.1",
    b" HTTP/1.0",
    b"\r\n",
    b"\n",
    b"\r",
    b" ",
    b"\t",
    b"\x00",
    b":",
    b"Host: a\r\n",
    b"Content-Length: 5\r\n",
    b"Content-Length: 0\r\n",
    b"Content-Length:5\r\n",
    b"content-length: 30\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: x\r\n",
    b"Transfer-Encoding : chunked\r\n",
    b"Connection: close\r\n",
    b"Connection: content-length\r\n",
    b"0\r\n\r\n",
    b"5\r\nhello\r\n",
    b"5;x\r\nhello\r\n",
    b"0\r\n",
    b"hello",
    b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n",
    b"Expect: 100-continue\r\n",
    b"\x0b",
    b"\xff",
    b"-",
    b"+5",
    b"0x5",
    b"5 ",
    b"Upgrade: h2c\r\n",
]


def sound(method: bytes, number: int, body: bytes, pieces: int) -> tuple[bytes, Told]:
    """A decent request and what it says."""
    target = b"/r%d" % number
    head = b"%s %s HTTP/1.1\r\nHost: a\r\n" % (method, target)
    if pieces == 0:
        raw = head + (b"Content-Length: %d\r\n\r\n" % len(body) + body if body else b"\r\n")
    else:
        step = max(1, len(body) // pieces)
        parts = [body[at : at + step] for at in range(0, len(body), step)]
        coded = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
        raw = head + b"Transfer-Encoding: chunked\r\n\r\n" + coded + b"0\r\n\r\n"
    return raw, (method, target, body)


def reading(stream: bytes) -> list[Told]:
    """What a patient and rather tolerant reader finds in the whole stream, up to the first
    thing that has no clear meaning. Written without looking at the engine: it works on
    all bytes at once, and splits where the engine scans."""
    found: list[Told] = []
    while True:
        stream = stream.removeprefix(b"\r\n")
        head, end, rest = stream.partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        start = re.fullmatch(rb"([A-Z]+) (\S+) HTTP/1\.[01]", lines[0])
        if not end or not start:
            return found
        pairs = [line.partition(b":")[::2] for line in lines[1:]]
        fields = [(name.lower(), value.strip()) for name, value in pairs]
        lengths = [value for name, value in fields if name == b"content-length"]
        codings = [value for name, value in fields if name == b"transfer-encoding"]
        if codings:
            body = b""
            while True:
                line, end, rest = rest.partition(b"\r\n")
                size = re.fullmatch(rb"([0-9a-fA-F]+)(;.*)?", line)
                if not end or not size:
                    return found
                if int(size[1], 16) == 0:
                    break
                body += rest[: int(size[1], 16)]
                rest = rest[int(size[1], 16) + 2 :]
            _trailer, end, behind = (b"\r\n" + rest).partition(b"\r\n\r\n")
            if not end:
                return found
            rest = behind
        elif lengths and lengths[0].isdigit():
            body, rest = rest[: int(lengths[0])], rest[int(lengths[0]) :]
        else:
            body = b""
        found.append((start[1], start[2], body))
        stream = rest


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[Told]]:
    """Decent requests, then perhaps a mutated one, or tokens in any order; and what is certain."""
    certain, raw = [], b""
    for number in range(draw(st.integers(0, 3))):
        method = draw(st.sampled_from([b"GET", b"POST", b"PUT"]))
        one, told = sound(method, number, draw(st.binary(max_size=50)), draw(st.integers(0, 3)))
        raw += one
        certain.append(told)
    kind = draw(st.sampled_from(["mutated", "tokens", "bytes", "nothing"]))
    if kind == "mutated":
        body = draw(st.sampled_from([b"", b"hello", b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n"]))
        one, _ = sound(b"POST", 9, body, draw(st.integers(0, 2)))
        for _ in range(draw(st.integers(1, 3))):
            at = draw(st.integers(0, len(one)))
            gone = draw(st.integers(0, 3))
            one = one[:at] + draw(st.sampled_from([b"", *TOKENS])) + one[at + gone :]
        raw += one
    elif kind == "tokens":
        raw += b"".join(draw(st.lists(st.sampled_from(TOKENS), max_size=25)))
    elif kind == "bytes":
        raw += draw(st.binary(max_size=60))
    if kind != "nothing":
        raw += draw(st.sampled_from([b"", b"GET /last HTTP/1.1\r\nHost: a\r\n\r\n"]))
    return raw, certain


async def passed(stream: bytes, seed: int) -> list[Told]:
    """Send the stream, cut by the seed; return what the upstream saw whole. The upstream
    itself fails the test on anything malformed."""
    dice = random.Random(seed)
    async with upstream() as up:
        async with called(Passing(up), LIMITS) as caller:
            at = 0
            while at < len(stream) and not caller.writer.is_closing():
                size = dice.choice([1, 2, 3, 10, 50, len(stream)])
                caller.writer.write(stream[at : at + size])
                await asyncio.sleep(0)
                at += size
            try:
                while True:  # until it is closed, or nothing more is said
                    async with asyncio.timeout(QUIET_S):
                        if not await caller.reader.read(65536):
                            break
            except (TimeoutError, ConnectionError):
                pass
        return [
            (one.method.encode(), one.target.encode(), one.body) for one in up.seen if one.whole
        ]


@settings(
    deadline=None,
    max_examples=120,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
@given(streams(), st.integers(0, 1 << 32))
@example((b"\r\n\r\nGET /last HTTP/1.1\r\nHost: a\r\n\r\n", []), 0)
def test_an_upstream_sees_only_what_was_said(stream: tuple[bytes, list[Told]], seed: int) -> None:
    """What reaches the upstream is what an independent reader finds at the front of the same
    bytes, in order; the decent requests at the front are all among it."""
    raw, certain = stream
    note(f"stream {raw!r}, seed {seed}")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        seen = runner.run(passed(raw, seed))
    found = reading(raw)
    assert seen == found[: len(seen)]
    assert seen[: len(certain)] == certain
