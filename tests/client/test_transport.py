"""Verified retry over real sockets: a doubted 404, a control plane, a trainer that counts."""

import asyncio
import contextlib
import math
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
import pytest

from holdfast.client import POLICY, ControlPlane, Doubted
from holdfast.client.meaning import AGAIN, next_step
from holdfast.events import Event
from holdfast.ledger import Put
from holdfast.retry import Policy
from jobs.counting_trainer import Reply, problem, reply
from patience import HANG_S

from .dumb import ACCOUNT, JOB, KEY, LOST, NOT_READY, QUICK, Dumb, operation, verified
from .lines import listening


@dataclass
class Bench:
    """A client over the transport, and all that is behind it."""

    dumb: Dumb
    http: httpx.AsyncClient
    events: list[Event]

    @property
    def doubted(self) -> list[Doubted]:
        return [one for one in self.events if isinstance(one, Doubted)]

    async def submit(self, seq: int = 1) -> httpx.Response:
        return await self.http.post("/api/v1/optim_step", content=operation(seq))

    async def poll(self, seq: int = 1) -> httpx.Response:
        return await self.http.post("/api/v1/retrieve_future", json={"request_id": f"m:{seq}"})

    async def applied(self) -> int:
        return (await self.dumb.applied())["m"]


@pytest.fixture
async def bench(dumb: Dumb, seen: list[Event]) -> AsyncIterator[Bench]:
    await dumb.ledger.txn((), [Put(dumb.trainer.keys.model("m"), b"0")])
    plane = dumb.plane(timeout_s=0.5)
    async with verified(dumb.data, plane, QUICK, emit=seen.append) as http:
        yield Bench(dumb, http, seen)


def within(bench: Bench, limit_s: float) -> httpx.AsyncClient:
    """Another client, which doubts for so long only."""
    short = Policy(attempts=999, base_s=0.01, max_s=0.02, deadline_s=limit_s)
    return verified(bench.dumb.data, bench.dumb.plane(), short, emit=bench.events.append)


BROKEN: dict[str, Reply | None] = {
    "silent": None,
    "broken": problem(500, "oops", "it broke"),
    "nonsense": Reply(200, b'{"state": 7}'),
    "page": Reply(200, b"<html>RUNNING</html>", "text/html"),
    "huge": Reply(200, b'{"state":"JOB_STATE_RUNNING","x":"' + b"x" * (2 << 20) + b'"}'),
    "almost": reply(200, {"state": "JOB_STATE_RUNNING_DOWN"}),
}


@pytest.mark.parametrize("why", [*BROKEN, "not there", "another's", "none"])
async def test_without_a_word_of_the_control_plane_it_fails_at_once(
    bench: Bench, why: str
) -> None:
    """No answer, an error, no answer that means RUNNING, a control plane that refuses our key, or
    none at all: the original 404, not another, after one send. The key is in no event."""

    async def answer() -> Reply:
        if (said := BROKEN[why]) is None:
            await asyncio.sleep(2 * HANG_S)
        return said or LOST

    bench.dumb.control = answer if why in BROKEN else None
    control = {
        "not there": ControlPlane("http://127.0.0.1:9", ACCOUNT, JOB, KEY, timeout_s=0.5),
        "another's": bench.dumb.plane("another-key"),
        "none": None,
    }.get(why, bench.dumb.plane(timeout_s=0.5))
    bench.dumb.play("optim_step", LOST, LOST)
    client = verified(bench.dumb.data, control, QUICK, emit=bench.events.append)
    async with asyncio.timeout(HANG_S), client as http:
        response = await http.post("/api/v1/optim_step", content=operation(1))
    assert (response.status_code, response.content) == (404, LOST.body)
    assert len(bench.dumb.came) == 1
    assert {one.step for one in bench.doubted} == ({"raise"} if control else set())
    assert "another-key" not in repr(bench.events) + repr(control)


async def test_a_404_that_stays_is_raised_in_the_end(bench: Bench) -> None:
    """When the time is used up, though the control plane keeps saying RUNNING. If it asked for
    retries, it has had them: it does not ask whoever is above for more."""
    asks = Reply(404, LOST.body, headers=(("x-should-retry", "true"),))
    bench.dumb.play("optim_step", *[asks] * 999)
    async with within(bench, 0.8) as http:
        response = await http.post("/api/v1/optim_step", content=operation(1))
    assert (response.status_code, response.content) == (404, LOST.body)
    assert response.headers["x-should-retry"] == "false"
    sent = len(bench.dumb.of("optim_step"))
    *again, last = bench.doubted
    assert {one.step for one in again} == {"send again"}
    # The time may be used up while it waits: then what was decided is not sent any more.
    assert len(again) in (sent - 1, sent)
    assert str(last) == f"404 on submit, still at try {sent}: raise"


class Virtual:
    """A clock that goes on when somebody sleeps, and a route that is stale for a while."""

    random = random.Random(1)

    def __init__(self, stale_s: float, deleted_s: float = math.inf) -> None:
        self.at, self._stale_s, self._deleted_s = 0.0, stale_s, deleted_s

    def now(self) -> float:
        return self.at

    async def sleep(self, s: float) -> None:
        self.at += s

    async def send(self) -> str:
        if self.at < self._stale_s:
            raise LookupError
        return "there"

    def ask(self, _error: Exception, _attempt: int) -> bool:
        state = "RUNNING" if self.at < self._deleted_s else "DELETED"
        return next_step("poll", "ambiguous", state) in AGAIN

    async def run(self) -> str:
        return await POLICY.acall(self.send, on=LookupError, verify=self.ask, clock=self)


@pytest.mark.parametrize("stale_s", [0.01, 1.0, 5.0, 20.0, 26.0])
async def test_a_stale_route_costs_little_more_than_it_is_stale(stale_s: float) -> None:
    """With the retries that users have: a stray 404 costs 0.1 s, a stale route 2 s at most."""
    clock = Virtual(stale_s)
    assert await clock.run() == "there"
    assert clock.at <= min(0.1 + 2 * stale_s, stale_s + 2.0)


@pytest.mark.parametrize(
    "other",
    [
        NOT_READY,
        problem(500, "", ""),
        problem(410, "job_gone", "deleted", x_should_retry="false"),
        reply(408, {"queue_state": "active"}),
        problem(409, "job_paused", "resume it", x_should_retry="false"),
    ],
)
async def test_other_errors_are_the_callers(bench: Bench, other: Reply) -> None:
    """Anything but a 404 goes to whoever is above, at once: retries are never nested."""
    bench.dumb.play("optim_step", other)
    bench.dumb.play("retrieve_future", other)
    for response in (await bench.submit(), await bench.poll()):
        assert (response.status_code, response.content) == (other.status, other.body)
    assert (len(bench.dumb.came), bench.dumb.asked) == (2, 0)


async def test_other_paths_are_left_alone(bench: Bench) -> None:
    """Clients learn from a 404 what a server lacks: it comes through untouched."""
    bench.dumb.play("client/dynamic_config", LOST)
    response = await bench.http.post("/api/v1/client/dynamic_config", json={})
    assert (response.status_code, bench.dumb.asked) == (404, 0)


@pytest.mark.parametrize(
    ("deleted_s", "least_s", "most_s"),
    [(0.0, 0.0, 0.0), (3.0, 3.0, 5.0), (17.0, 17.0, 19.0), (math.inf, 28.0, 30.0)],
)
async def test_what_is_not_waited_for(deleted_s: float, least_s: float, most_s: float) -> None:
    """A job that the control plane says is gone fails at once, or at the end of a wait; a route
    that never comes back is given up after 30 s."""
    clock = Virtual(math.inf, deleted_s)
    with pytest.raises(LookupError):
        await clock.run()
    assert least_s <= clock.at <= most_s


async def test_the_job_ends_while_we_wait(bench: Bench) -> None:
    """RUNNING at the first question, deleted at the next: the 404 is raised then."""
    states = iter(["JOB_STATE_RUNNING", "JOB_STATE_RUNNING", "JOB_STATE_DELETED"])

    async def changing() -> Reply:
        return reply(200, {"state": next(states)})

    bench.dumb.control = changing
    bench.dumb.play("retrieve_future", *[LOST] * 9)
    assert (await bench.poll()).status_code == 404
    assert len(bench.dumb.of("retrieve_future")) == 3
    assert [one.control for one in bench.doubted] == ["RUNNING", "RUNNING", "DELETED"]


async def test_the_time_a_poll_is_held_is_not_counted(bench: Bench) -> None:
    """A poll that is held for longer than the whole budget, then gets a 404, is polled again."""
    await bench.submit()
    bench.dumb.play("retrieve_future", LOST, LOST)
    bench.dumb.hold_s["retrieve_future"] = 0.5
    async with within(bench, 0.4) as http:
        response = await http.post("/api/v1/retrieve_future", json={"request_id": "m:1"})
    assert response.status_code == 200


async def test_a_streamed_body_is_the_same_every_time(bench: Bench) -> None:
    """A body that can be read once only is kept, so that the second send has it too."""

    async def parts() -> AsyncIterator[bytes]:
        yield operation(1)[:7]
        yield operation(1)[7:]

    bench.dumb.play("optim_step", LOST, LOST)
    assert (await bench.http.post("/api/v1/optim_step", content=parts())).status_code == 200
    assert {one.body for one in bench.dumb.came} == {operation(1)}


async def test_an_endless_404_ends(bench: Bench) -> None:
    """A 404 whose body never ends is a 404 nevertheless."""

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\ntransfer-encoding: chunked\r\n\r\n")
        with contextlib.suppress(ConnectionError), contextlib.closing(writer):
            while True:
                writer.write(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
                await writer.drain()

    bench.dumb.state = "JOB_STATE_DELETED"
    plane = bench.dumb.plane()
    async with (
        asyncio.timeout(HANG_S),
        listening(endless) as port,
        verified(f"http://127.0.0.1:{port}", plane, QUICK) as http,
    ):
        response = await http.post("/api/v1/optim_step", content=operation(1))
    assert (response.status_code, len(response.content)) == (404, 1 << 20)


async def test_a_broken_connection_is_not_a_404() -> None:
    """A refused connection is raised as it is: the client above knows what to do with it."""
    nowhere = "http://127.0.0.1:9"
    control = ControlPlane(nowhere, ACCOUNT, JOB, KEY)
    seen: list[Event] = []
    async with verified(nowhere, control, QUICK, emit=seen.append) as http:
        with pytest.raises(httpx.ConnectError):
            await http.post("/api/v1/optim_step", content=operation(1))
    assert not seen
