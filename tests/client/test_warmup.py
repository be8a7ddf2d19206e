"""Warm-up over real sockets: what counts, what is tried again, what is raised at once."""

import time

import httpx
import pytest

from holdfast.client import Probed, Ready, WarmUp
from holdfast.errors import Denied, Gone, HoldfastError, NotFound, TimedOut, Unavailable
from holdfast.events import Event
from holdfast.retry import Policy
from jobs.counting_trainer import Reply, problem, reply
from patience import HANG_S

from .dumb import KEY, LOST, NOT_READY, Dumb

QUICK = Policy(attempts=1000, base_s=0.01, max_s=0.05, jitter=0.0, deadline_s=10.0)
CAPABILITIES = "get_server_capabilities"
PAGE = Reply(200, b"<html>welcome</html>", "text/html")
PLAIN = reply(200, {"supported_models": []})


def warm_up(dumb: Dumb, seen: list[Event], **more: object) -> WarmUp:
    return WarmUp(
        base_url=dumb.data,
        api_key=KEY,
        emit=seen.append,
        **{"limit_s": 5.0, "backoff": QUICK, **more},  # type: ignore[arg-type]  # whatever the test wants
    )


async def test_three_in_a_row_each_on_its_own_connection(dumb: Dumb, seen: list[Event]) -> None:
    """Three probes of the kind that computes, on three connections; then it is ready."""
    await warm_up(dumb, seen).run()
    probes = dumb.of("probe")
    assert len(probes) == 3
    assert len({one.peer for one in probes}) == 3, "one connection proves one replica"
    assert isinstance(seen[-1], Ready)
    assert (seen[-1].probes, seen[-1].computed) == (3, True)


async def test_a_404_on_the_way_is_waited_out_and_begins_the_count_anew(
    dumb: Dumb, seen: list[Event]
) -> None:
    """404, route_not_ready and a load balancer's own page are tried again; what succeeded before
    them does not count."""
    dumb.play(CAPABILITIES, LOST, NOT_READY, PAGE)
    good = reply(200, {})
    dumb.play("probe", good, good, LOST, good, NOT_READY)
    await warm_up(dumb, seen).run()
    streaks = [one.streak for one in seen if isinstance(one, Probed)]
    assert streaks == [0, 0, 0, 1, 2, 0, 1, 0, 1, 2, 3]
    assert len({one.peer for one in dumb.came}) == len(dumb.came)


async def test_a_success_makes_the_waits_short_again(dumb: Dumb, seen: list[Event]) -> None:
    """After 404s in a row the waits grow; after a success they begin anew."""
    steep = Policy(attempts=1000, base_s=0.01, factor=1e3, max_s=1e4, jitter=0, deadline_s=HANG_S)
    good = reply(200, {})
    dumb.play("probe", *[good, LOST] * 6)
    # A third wait that had grown would be 10,000 s.
    await warm_up(dumb, seen, backoff=steep, limit_s=HANG_S).run()
    assert len(dumb.of("probe")) == 15


async def test_a_404_that_stays_ends_in_time(dumb: Dumb, seen: list[Event]) -> None:
    """Nothing but 404s: an error that says so, within the limit."""
    dumb.play(CAPABILITIES, *[LOST] * 1000)
    begun = time.monotonic()
    with pytest.raises(TimedOut, match=r"not ready within 0\.5 s .* HTTP 404"):
        await warm_up(dumb, seen, limit_s=0.5).run()
    assert 0.4 < time.monotonic() - begun < HANG_S
    assert len(dumb.came) > 1


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (problem(500, "engine", "dead"), Unavailable),
        (problem(503, "", "overloaded"), Unavailable),
        (problem(401, "unauthorized", "no such key"), Denied),
        (problem(410, "job_gone", "deleted", x_should_retry="false"), Gone),
        (Reply(404, b'{"error":{"code":"job_not_found"}}'), NotFound),
    ],
)
async def test_any_other_error_is_raised_at_once(
    dumb: Dumb, seen: list[Event], answer: Reply, kind: type[HoldfastError]
) -> None:
    """One probe, one error: a trainer that is broken is not waited for."""
    dumb.play(CAPABILITIES, *[answer] * 5)
    with pytest.raises(kind):
        await warm_up(dumb, seen).run()
    assert len(dumb.came) == 1


async def test_nobody_listens() -> None:
    """A refused connection is an error at once, too."""
    with pytest.raises(Unavailable, match="ConnectError"):
        await WarmUp(base_url="http://127.0.0.1:9", backoff=QUICK, limit_s=5).run()


async def test_what_computes_is_probed(dumb: Dumb, seen: list[Event]) -> None:
    """An engine that has died is found out, though everything else answers 200."""
    dumb.trainer.engine_dead = True
    with pytest.raises(Unavailable, match="the engine has died"):
        await warm_up(dumb, seen).run()
    assert [one.status for one in dumb.of(CAPABILITIES)] == [200]


@pytest.mark.parametrize("model", ["", "m"])
async def test_a_server_without_a_probe(dumb: Dumb, seen: list[Event], model: str) -> None:
    """Where nothing computes, a model's info is asked for, or the capabilities."""
    dumb.play(CAPABILITIES, *[PLAIN] * 9)
    dumb.play("get_info", LOST, *[reply(200, {})] * 3)
    await warm_up(dumb, seen, model_id=model).run()
    assert len(dumb.of("get_info")) == (4 if model else 0)
    assert isinstance(seen[-1], Ready)
    assert not seen[-1].computed


async def test_a_server_that_says_that_it_has_no_capabilities(
    dumb: Dumb, seen: list[Event]
) -> None:
    """A sure 404 is not a route on its way: the model's info is asked for instead."""
    dumb.play(CAPABILITIES, problem(404, "no_such_path", "", x_should_retry="false"))
    dumb.play("get_info", *[reply(200, {})] * 3)
    await warm_up(dumb, seen, model_id="m").run()
    assert (len(dumb.of(CAPABILITIES)), len(dumb.of("get_info"))) == (1, 3)


@pytest.mark.parametrize(
    "offer",
    ["http://127.0.0.1:9/api/v1/x", "//other/api/v1/x", "/v1/accounts", "/api/v1/../../v1/x", 7],
)
async def test_an_offer_leads_nowhere_else(dumb: Dumb, seen: list[Event], offer: object) -> None:
    """A probe stays on the data path, whatever a server's capabilities say."""
    dumb.play(CAPABILITIES, *[reply(200, {"supported_models": [], "probe": offer})] * 4)
    await warm_up(dumb, seen).run()
    assert {one.name for one in dumb.came} == {CAPABILITIES}


async def test_the_callers_own_probe(dumb: Dumb, seen: list[Event]) -> None:
    """A caller who knows what computes says so; 404s count as always."""
    dumb.play("forward", LOST, *[reply(200, {})] * 3)

    async def probe(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post("/api/v1/forward", json={"model_id": "scratch"})

    await warm_up(dumb, seen, probe=probe).run()
    assert {one.name for one in dumb.came} == {"forward"}
    assert len({one.peer for one in dumb.came}) == len(dumb.came) == 4


@pytest.mark.parametrize("state", ["DELETED", "FAILED", ""])
async def test_a_job_that_is_gone_is_not_waited_for(
    dumb: Dumb, seen: list[Event], state: str
) -> None:
    """The control plane says that the job is gone: that is raised, not waited out."""
    dumb.state = f"JOB_STATE_{state}" if state else ""
    dumb.play(CAPABILITIES, *[LOST] * 1000)
    control = dumb.plane()
    with pytest.raises(Gone, match=f"acme/one is {state or 'NOT_FOUND'}"):
        await warm_up(dumb, seen, control=control).run()
    assert len(dumb.came) == 1


@pytest.mark.parametrize("state", ["RUNNING", "CREATING", "broken"])
async def test_a_job_that_is_on_its_way_is(dumb: Dumb, seen: list[Event], state: str) -> None:
    """Not gone, or not known: waited for."""
    dumb.state = f"JOB_STATE_{state}"
    dumb.play(CAPABILITIES, LOST, LOST)
    key = "wrong" if state == "broken" else KEY
    control = dumb.plane(key)
    await warm_up(dumb, seen, control=control).run()
    assert isinstance(seen[-1], Ready)
