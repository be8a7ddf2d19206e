"""Hostile surroundings: servers, certificates, keys, proxies and callers that are not nice."""

import asyncio
import contextlib
import gzip
import ssl
import subprocess
import sys
import time
import traceback
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from gateway.http.wires import self_signed
from holdfast import client as clients
from holdfast import events
from holdfast.client import Client, Target
from holdfast.errors import HoldfastError, Mistake, TimedOut, TooLarge
from holdfast.retry import Policy
from holdfast.timeouts import Timeouts
from jobs.counting_trainer import Reply, problem, reply
from patience import HANG_S, auntil

from .dumb import ACCOUNT, JOB, KEY, LOST, QUICK, Dumb, operation, verified
from .library import PYTHON
from .lines import listening


@contextlib.asynccontextmanager
async def stranger(folder: Path) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A TLS server with a certificate that nobody vouches for, and what it was sent."""
    context, _ = await asyncio.to_thread(self_signed, folder)
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}")
            await writer.drain()
        writer.close()

    async with listening(serve, ssl=context) as port:
        yield f"https://127.0.0.1:{port}", heads


# ---- TLS -----------------------------------------------------------------------


@pytest.mark.parametrize("way", ["in capitals", "redirected"])
async def test_every_way_to_tls_is_verified(tmp_path: Path, dumb: Dumb, way: str) -> None:
    """HTTPS:// is https://, and a load balancer may send us there from http://: a certificate that
    nobody vouches for is refused."""
    async with stranger(tmp_path) as (url, heads):
        dumb.play("optim_step", Reply(307, b"", headers=(("location", f"{url}/api/v1/x"),)))
        target = dumb.target()
        if way == "in capitals":
            target = Target.of(url.replace("https", "HTTPS"), api_key=KEY)
        made = httpx.AsyncClient(transport=target.transport(), follow_redirects=True)
        async with made as http:
            with pytest.raises(httpx.ConnectError):
                await http.post(f"{target.base_url}/api/v1/optim_step", headers={"x-api-key": KEY})
        assert not heads


def test_connect_takes_ones_own_certificates() -> None:
    """A gateway with a private certificate can be connected to."""
    context = ssl.create_default_context()
    made = clients.connect("https://h", api_key=KEY, account=ACCOUNT, job=JOB, tls=context)
    assert made.target.tls is context


# ---- verified retry ------------------------------------------------------------


async def test_many_in_doubt_share_a_question(dumb: Dumb) -> None:
    """A route is lost under 100 polls: one answer of the control plane is enough for many."""
    many = 100
    dumb.play("retrieve_future", *[LOST] * many)
    policy = Policy(attempts=5, base_s=0.3, max_s=0.3, jitter=0.0, deadline_s=60.0)
    async with verified(dumb.data, dumb.plane(timeout_s=30), policy, timeout=60) as http:
        ask = {"request_id": "m:create"}
        polls = [http.post("/api/v1/retrieve_future", json=ask) for _ in range(many)]
        statuses = {response.status_code for response in await asyncio.gather(*polls)}
    assert statuses == {200}
    assert dumb.asked <= many // 4


async def test_an_answer_is_newer_than_the_doubt(dumb: Dumb) -> None:
    """Who doubts while a question is under way does not get its answer, but a later one."""
    go, states = asyncio.Event(), iter(["RUNNING", "DELETED"])

    async def held() -> Reply:
        state = next(states)
        await go.wait()
        return reply(200, {"state": f"JOB_STATE_{state}"})

    dumb.control = held
    control = dumb.plane(timeout_s=20)
    async with asyncio.timeout(HANG_S):
        first = asyncio.create_task(control.state())
        await auntil(lambda: dumb.asked == 1)
        later = [asyncio.create_task(control.state()) for _ in range(9)]
        await auntil(lambda: dumb.asked == 2)
        later[0].cancel()
        go.set()
        assert await first == "RUNNING"
        assert set(await asyncio.gather(*later[1:])) == {"DELETED"}
    assert dumb.asked == 2
    assert {one["cache-control"] for one in dumb.questions} == {"no-cache"}


async def test_a_question_that_nobody_wants_answered_ends(dumb: Dumb) -> None:
    """All who asked have gone: so has the question, and the next one is a new one."""
    control = dumb.plane()
    asking = asyncio.create_task(control.state())
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert await control.state() == "RUNNING"
    assert dumb.asked == 1


async def test_a_busy_loop_is_no_silence(dumb: Dumb) -> None:
    """The control plane's time does not pass while our own loop has other things to do."""
    control = dumb.plane(timeout_s=2.5)

    async def hog() -> None:
        while True:
            time.sleep(0.2)
            await asyncio.sleep(0)

    hogging = asyncio.create_task(hog())
    begun = time.monotonic()
    try:
        assert await control.state() == "RUNNING"
    finally:
        hogging.cancel()
    assert time.monotonic() - begun > 2.5, "it was not busy enough to prove anything"


async def test_a_404_that_grows_when_unpacked_is_bounded(dumb: Dumb) -> None:
    """A small compressed 404 does not fill the memory."""
    bomb = gzip.compress(bytes(128 << 20))
    dumb.state = "JOB_STATE_DELETED"
    dumb.play("optim_step", Reply(404, bomb, headers=(("content-encoding", "gzip"),)))
    async with verified(dumb.data, dumb.plane(), QUICK) as http:
        request = http.build_request("POST", "/api/v1/optim_step", content=operation(1))
        tracemalloc.start()
        try:
            response = await http.send(request, stream=True)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert response.status_code == 404
    assert peak < 32 << 20


# ---- the native client ---------------------------------------------------------


@pytest.mark.parametrize(
    "odd",
    [
        Reply(200, b"<html>back soon</html>", "text/html"),
        Reply(200, b""),
        Reply(200, b"", "application/octet-stream"),
        Reply(200, b"garbage", headers=(("content-encoding", "gzip"),)),
    ],
    ids=["html", "empty", "nothing", "garbled"],
)
async def test_a_page_is_not_a_result(client: Client, dumb: Dumb, odd: Reply) -> None:
    """An answer that no trainer gives is not handed over as the result of an operation."""
    dumb.play("retrieve_future", *[odd] * 9)
    with pytest.raises(HoldfastError):
        await client.future("m:1").result(timeout_s=0.5)


async def test_content_types_have_no_case(client: Client, dumb: Dumb) -> None:
    """Neither those that come nor those that are asked for; parameters do not matter."""
    dumb.play("retrieve_future", Reply(200, b'{"a":1}', "Application/JSON; charset=UTF-8"))
    assert await client.future("m:1").result() == {"a": 1}
    dumb.play("retrieve_future", Reply(200, b"\x01", "application/x-protobuf"))
    asked = "Application/X-Protobuf, application/json"
    assert await client.future("m:1").result(accept=asked) == b"\x01"
    with pytest.raises(Mistake, match="by its name"):
        await client.future("m:1").result(accept="*/*")


@pytest.mark.parametrize("packed", [False, True])
async def test_a_result_has_a_size(dumb: Dumb, packed: bool) -> None:
    """More than was said is not kept in memory, packed or not, and not asked for again."""
    target = dumb.target(policy=QUICK)
    body = b'{"x":"' + b"x" * 100_000 + b'"}'
    headers = (("content-encoding", "gzip"),) if packed else ()
    answer = Reply(200, gzip.compress(body) if packed else body, headers=headers)
    dumb.play("retrieve_future", answer, answer)
    async with Client(target, max_result_bytes=50_000) as small:
        with pytest.raises(TooLarge):
            await small.future("m:1").result(timeout_s=5)
    async with Client(target, max_result_bytes=200_000) as large:
        assert len((await large.future("m:1").result(timeout_s=5))["x"]) == 100_000
    assert len(dumb.of("retrieve_future")) == 2


async def test_a_wish_to_wait_is_heard_by_polls(client: Client, dumb: Dumb) -> None:
    """`retry-after-ms` is a pause, for an error and for a result that is not there yet."""
    dumb.play("retrieve_future", problem(503, "busy", "", retry_after_ms="500"))
    dumb.play("retrieve_future", reply(408, {}, retry_after_ms="500"))
    dumb.play("retrieve_future", reply(408, {}, retry_after_ms="nan"))
    begun = time.monotonic()
    assert (await client.future("m:create").result())["type"] == "create_model"
    assert 1.0 < time.monotonic() - begun < HANG_S


async def test_what_cannot_be_sent_is_a_mistake(client: Client, dumb: Dumb) -> None:
    """A header that the HTTP library refuses is refused at once, and not quoted."""
    odd = "a\n" + "secret"
    async with asyncio.timeout(HANG_S):
        with pytest.raises(Mistake) as caught:
            await client.submit("optim_step", "m", 1, b"x", content_type=odd)
    told = "".join(traceback.format_exception(caught.value, limit=0))
    assert "secret" not in told
    assert not dumb.came


@pytest.mark.parametrize("call", ["submit", "result"])
async def test_an_answer_that_trickles_ends(call: str) -> None:
    """A byte every now and then does not keep a call going beyond its deadline."""
    short = Timeouts(sdk_submit_s=0.5)

    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError), contextlib.closing(writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
            while not writer.is_closing():
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.1)

    begun = time.monotonic()
    async with listening(trickle) as port:
        target = Target.of(f"http://127.0.0.1:{port}", timeouts=short)
        async with asyncio.timeout(HANG_S), Client(target) as client:
            with pytest.raises(TimedOut):
                if call == "submit":
                    await client.submit("optim_step", "m", 1, {})
                else:
                    await client.future("m:1").result(timeout_s=0.5)
    assert time.monotonic() - begun < HANG_S / 2


async def test_a_slow_probe_is_tried_again(dumb: Dumb) -> None:
    """A probe that takes too long is not the end; how long that is, is said."""
    dumb.play("get_server_capabilities", reply(200, {}))
    dumb.hold_s["get_server_capabilities"] = 20.0
    seen: list[events.Event] = []
    await dumb.target().warm_up(limit_s=15, probe_s=0.5, emit=seen.append).run()
    outcomes = [(one.code, one.outcome) for one in seen if isinstance(one, clients.Probed)]
    assert outcomes == [("timeout", "again"), *[("", "ok")] * 3]


async def test_a_warm_up_goes_on_for_as_long_as_was_said(dumb: Dumb) -> None:
    """`limit_s` is the limit, not the deadline of the backoff between the probes."""
    dumb.play("get_server_capabilities", *[LOST] * 10)
    backoff = Policy(attempts=99, base_s=0.1, factor=1.0, max_s=0.1, deadline_s=0.3)
    await dumb.target().warm_up(limit_s=15, backoff=backoff).run()


# ---- connections ---------------------------------------------------------------


async def test_requests_under_way_outlive_a_renewal(dumb: Dumb) -> None:
    """An empty 400 closes nobody else's connection; the next request has a new one."""
    come, go = asyncio.Event(), asyncio.Event()

    async def held(_: str, path: str, *__: object) -> Reply:
        if path.endswith("/forward"):
            come.set()
            await go.wait()
        return Reply(200, b"{}")

    dumb.backend = held
    dumb.play("optim_step", Reply(200, b"{}"), Reply(400, b""))
    target = dumb.target()
    made = httpx.AsyncClient(transport=target.transport(), base_url=dumb.data)
    async with asyncio.timeout(HANG_S), made as http:
        slow = asyncio.create_task(http.post("/api/v1/forward"))
        await come.wait()
        statuses = [(await http.post("/api/v1/optim_step")).status_code for _ in range(4)]
        go.set()
        assert (await slow).status_code == 200
    assert statuses == [200, 400, 200, 200]
    before, refused, after, last = (one.peer for one in dumb.of("optim_step"))
    assert before == refused != after == last


# ---- odds and ends -------------------------------------------------------------


INTERRUPTED = """
import os, signal, threading, time
from holdfast.client import Target
from holdfast.client.sdks import run_aside
target = Target.of("http://127.0.0.1:{port}")
threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()
try:
    run_aside(target.warm_up(limit_s=60).run())
except KeyboardInterrupt:
    time.sleep(1)
    print(*(thread.name for thread in threading.enumerate()))
"""


async def test_ctrl_c_ends_the_warm_up(dumb: Dumb) -> None:
    """Who interrupts a connect has no thread that goes on probing in their name."""
    dumb.play("get_server_capabilities", *[LOST] * 99)
    script = INTERRUPTED.replace("{port}", str(dumb.port))
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", script], capture_output=True, timeout=30, check=True
    )
    assert b"MainThread" in done.stdout
    assert b"holdfast-warm-up" not in done.stdout


CLOSED_EARLY = """
import os, sys, threading
from holdfast.client import Target, tinker
target = Target.of("{url}", api_key="{key}", account="acme", job="one")
service = tinker.service_client(target)
def make():
    try:
        service._get_session_holder()
    except RuntimeError:
        pass
thread = threading.Thread(target=make)
thread.start()
sys.stdin.readline()
service.close("success").result()
thread.join()
holder = service._session_holder
print("closed" if holder is None or holder._closed else "open", flush=True)
os._exit(0)
"""


async def test_what_is_closed_while_it_opens_is_closed(dumb: Dumb) -> None:
    """close() during the making of a session leaves no heartbeat behind (the SDK's does not)."""
    came, go = asyncio.Event(), asyncio.Event()

    async def slow(_: str, path: str, *__: object) -> Reply:
        if not path.endswith("/create_session"):
            return Reply(200, b"{}")
        came.set()
        await go.wait()
        return Reply(200, b'{"type":"create_session","session_id":"s"}')

    dumb.backend = slow
    script = CLOSED_EARLY.replace("{url}", dumb.url).replace("{key}", KEY)
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        str(PYTHON), "-c", script, stdin=pipe, stdout=pipe, env={"TINKER_TELEMETRY": "0"}
    )
    async with asyncio.timeout(HANG_S):
        await came.wait()
        asyncio.get_running_loop().call_later(1.0, go.set)
        said, _ = await child.communicate(b"\n")
    assert said == b"closed\n"
