"""The native client: the caller's numbers, futures that can be taken up, errors that say what."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast import client as clients
from holdfast import events
from holdfast.client import Client, Target
from holdfast.client.addresses import proxy_of
from holdfast.errors import Gone, HoldfastError, Mistake, NotFound, TimedOut
from holdfast.ledger import Ledger
from holdfast.retry import Policy
from jobs.counting_trainer import Counting, Reply, problem, reply
from jobs.counts import assert_exactly_once

from .dumb import ACCOUNT, JOB, KEY, LOST, NOT_READY, RUN, Dumb, counting

QUICK = Policy(attempts=5, base_s=0.02, max_s=0.1, deadline_s=3.0)
STEP: dict[str, Any] = {"type": "optim_step", "adam_params": {"learning_rate": 1e-4}}


@asynccontextmanager
async def connected(
    **how: float,
) -> AsyncIterator[tuple[Client, Dumb, Ledger, Counting]]:
    async with (
        counting(**how) as (trainer, ledger),
        Dumb(trainer.answer).serve() as dumb,
        Client(dumb.target(policy=QUICK)) as client,
    ):
        yield client, dumb, ledger, trainer


async def model(client: Client) -> str:
    return await client.create_model(await client.create_session(), 0, "holdfast/counting")


async def test_from_a_session_to_a_result() -> None:
    """Session, model, operations by number, results; connected with a warm-up."""
    async with counting(delay_s=0.1) as (trainer, ledger), Dumb(trainer.answer).serve() as dumb:
        connecting = clients.connect(dumb.url, account=ACCOUNT, job=JOB, api_key=KEY)
        async with connecting as client:
            assert len(dumb.of("probe")) == 3
            session = await client.create_session()
            await client.heartbeat(session)
            name = await client.create_model(session, 0, "holdfast/counting")
            assert (await client.info(name))["model_id"] == name
            data = [{"model_input": {"chunks": [{"tokens": [1, 2, 3]}]}, "loss_fn_inputs": {}}]
            given = {"forward_backward_input": {"data": data, "loss_fn": "cross_entropy"}}
            first = await client.submit("forward_backward", name, 1, given)
            second = await client.submit("optim_step", name, 2, STEP)
            outputs = (await first.result())["loss_fn_outputs"]
            assert outputs[0]["logprobs"]["shape"] == [3]
            assert (await second.result())["metrics"] == {"step:max": 2.0}
        await assert_exactly_once(ledger, RUN, ACCOUNT, JOB, expected={name: 2})


async def test_a_successor_sends_again_and_takes_up_the_future() -> None:
    """Same model, same number, another client: done once, with the same result for both."""
    async with connected() as (client, _, ledger, _):
        name = await model(client)
        promise = await client.submit("optim_step", name, 1, STEP)
        async with Client(client.target) as successor:
            again = await successor.submit("optim_step", name, 1, STEP)
            assert again.request_id == promise.request_id
            taken = successor.future(promise.request_id)
            assert await taken.result() == await promise.result()
            await successor.submit("optim_step", name, 2, STEP)
        await assert_exactly_once(ledger, RUN, ACCOUNT, JOB, expected={name: 2})


async def test_operations_that_arrive_in_another_order() -> None:
    """Numbers decide, not arrivals."""
    async with connected() as (client, _, ledger, _):
        name = await model(client)
        sent = [asyncio.create_task(client.submit("optim_step", name, n, STEP)) for n in (3, 2)]
        while not all(task.get_coro() for task in sent):
            await asyncio.sleep(0)
        await client.submit("optim_step", name, 1, STEP)
        await asyncio.gather(*sent)
        await assert_exactly_once(ledger, RUN, ACCOUNT, JOB, expected={name: 3})


async def test_the_route_gets_lost_in_between(tmp_path: Path) -> None:
    """404, 503 and route_not_ready on the way: same bytes again, one effect, one result."""
    events.configure(tmp_path / "log", "test")
    async with connected() as (client, dumb, ledger, _):
        name = await model(client)
        dumb.play("optim_step", LOST, NOT_READY, problem(502, "", ""), LOST)
        future = await client.submit("optim_step", name, 1, STEP)
        assert len({one.body for one in dumb.of("optim_step")}) == 1
        assert len(dumb.of("optim_step")) == 5
        pending = reply(200, {"type": "try_again", "request_id": "x", "queue_state": "active"})
        held = reply(408, {"queue_state": "active"})
        dumb.play("retrieve_future", LOST, held, NOT_READY, pending, problem(500, "", ""), LOST)
        assert (await future.result(timeout_s=20))["metrics"] == {"step:max": 1.0}
        assert len(dumb.of("optim_step")) == 5, "a poll led to a submit"
        events.unconfigure()
        seen = [type(one).__name__ for one in events.read(tmp_path / "log")]
        # Every 404 and what became of it, every error that passed: nothing goes unsaid.
        assert (seen.count("Doubted"), seen.count("Retried")) == (8, 4), seen
        await assert_exactly_once(ledger, RUN, ACCOUNT, JOB, expected={name: 1})


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (problem(410, "job_gone", "deleted", x_should_retry="false"), Gone),
        (problem(404, "job_not_found", "never heard of"), NotFound),
        (problem(423, "job_paused", "resume it", x_should_retry="false"), Mistake),
        (problem(409, "no", "never", x_should_retry="false"), Mistake),
        (problem(400, "bad_request", "no"), Mistake),
    ],
)
async def test_what_is_sure_is_raised_at_once(answer: Reply, kind: type[HoldfastError]) -> None:
    """Gone, not found, paused, wrong: no retry, for submit and poll."""
    async with connected() as (client, dumb, _, _):
        dumb.play("optim_step", answer)
        dumb.play("retrieve_future", answer)
        with pytest.raises(kind):
            await client.submit("optim_step", "m", 1, STEP)
        with pytest.raises(kind):
            await client.future("m:1").result()
        assert len(dumb.came) == 2


async def test_a_deleted_job_is_reported_within_a_second() -> None:
    """A 404 that the control plane confirms is raised as "not found", without waiting."""
    async with connected() as (client, dumb, _, _):
        dumb.state = "JOB_STATE_DELETED"
        dumb.play("optim_step", *[LOST] * 9)
        dumb.play("retrieve_future", *[LOST] * 9)
        async with asyncio.timeout(1):
            with pytest.raises(NotFound):
                await client.submit("optim_step", "m", 1, STEP)
        async with asyncio.timeout(1):
            with pytest.raises(NotFound):
                await client.future("m:1").result()


@pytest.mark.parametrize(("category", "kind"), [("user", Mistake), ("server", HoldfastError)])
async def test_a_failed_operation(category: str, kind: type[HoldfastError]) -> None:
    """What the trainer says of its failure reaches the caller."""
    async with connected() as (client, dumb, _, _):
        dumb.play("retrieve_future", reply(200, {"error": "loss is nan", "category": category}))
        with pytest.raises(kind, match="loss is nan") as caught:
            await client.future("m:1").result()
        assert type(caught.value) is kind


async def test_a_result_that_takes_too_long() -> None:
    """The wait ends, the operation does not: its future can be asked again."""
    async with connected(delay_s=0.6, hold_s=0.05) as (client, dumb, _, _):
        name = await model(client)
        future = await client.submit("optim_step", name, 1, STEP)
        with pytest.raises(TimedOut, match="ask again"):
            await future.result(timeout_s=0.2)
        assert len(dumb.of("retrieve_future")) < 5, "polls without a pause"
        assert (await future.result())["metrics"] == {"step:max": 1.0}


async def test_mistakes_are_told_before_anything_is_sent() -> None:
    """Numbers and payloads that contradict each other, and names that are none."""
    async with connected() as (client, dumb, _, _):
        with pytest.raises(Mistake, match="another seq_id"):
            await client.submit("optim_step", "m", 2, {"seq_id": 1})
        with pytest.raises(Mistake, match="content_type"):
            await client.submit("forward_backward", "m", 1, b"x")
        with pytest.raises(Mistake, match="name of an operation"):
            await client.submit("../v1", "m", 1, {})
        with pytest.raises(Mistake, match="number"):
            await client.submit("optim_step", "m", -1, {})
        assert not dumb.came


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"gateway": "gateway:80"}, "not the URL of a gateway"),
        ({"gateway": "ftp://x"}, "not the URL of a gateway"),
        ({"gateway": "http://x", "account": "a"}, "both account and job"),
        ({"gateway": "http://x", "control": "http://y"}, "give account and job"),
        ({"gateway": "http://x", "account": "a/../b", "job": "j"}, "account .* is not valid"),
        ({"gateway": "http://x", "account": "a", "job": "J?"}, "job .* is not valid"),
        ({"gateway": "http://["}, "not the URL of a gateway"),
        ({"gateway": "http://x:y"}, "not the URL of a gateway"),
        ({"gateway": "http://x\n"}, "not the URL of a gateway"),
        ({"gateway": "http://x?key=1"}, "no query"),
        ({"gateway": "http://x#y"}, "no fragment"),
        ({"gateway": "http://me@x"}, "no password"),
        (
            {"gateway": "http://x", "account": "a", "job": "j", "control": "http://a:b@y"},
            "no password",
        ),
        ({"gateway": "http://x", "api_key": "tml-x "}, "API key"),
        ({"gateway": "http://x", "api_key": "tml-\xfc"}, "API key"),
    ],
)
def test_targets_that_make_no_sense(how: dict[str, str], words: str) -> None:
    """What cannot be meant is said at once."""
    with pytest.raises(Mistake, match=words):
        Target.of(**how)  # type: ignore[arg-type]  # all of it is text


def test_a_target_keeps_its_key_to_itself() -> None:
    """A key is in no repr."""
    target = Target.of("http://x/", api_key="tml-secret", account="a", job="j-1")
    assert "tml-secret" not in repr(target)
    assert target.base_url == "http://x/training/v1/rlorTrainerJobs/a/j-1"


def test_a_proxy_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """What httpx does for its own transports is done for ours."""
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:3128")
    monkeypatch.setenv("no_proxy", "inside.example")
    assert proxy_of("https://gateway.example/x") == "http://127.0.0.1:3128"
    assert proxy_of("https://inside.example:8443/x") is None


def test_a_wrapper_that_is_not_there() -> None:
    """The names that there are are in the error."""
    with pytest.raises(Mistake, match="tinker, fireworks or native"):
        clients.connect("http://x", api_key="k", sdk="curl")  # type: ignore[arg-type]  # on purpose
