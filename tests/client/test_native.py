"""The native client: the caller's numbers, futures that can be taken up, errors that say what."""

import collections
import gzip
from pathlib import Path
from typing import Any

import pytest

from holdfast import client as clients
from holdfast import events
from holdfast.client import Client, Doubted, Retried, Target
from holdfast.client.addresses import proxy_of
from holdfast.errors import Gone, HoldfastError, Mistake, NotFound, TimedOut
from jobs.counting_trainer import Reply, problem, reply

from .dumb import ACCOUNT, JOB, KEY, LOST, NOT_READY, Dumb

PATH = f"/training/v1/rlorTrainerJobs/{ACCOUNT}/{JOB}/api/v1/"
PACKED = (("content-encoding", "gzip"),)
STEP: dict[str, Any] = {"type": "optim_step", "adam_params": {"learning_rate": 1e-4}}


async def model(client: Client) -> str:
    return await client.create_model(await client.create_session(), 0, "holdfast/counting")


async def test_from_a_session_to_a_result(dumb: Dumb) -> None:
    """Session, model, operations by number, results; connected with a warm-up."""
    dumb.trainer.delay_s = 0.1
    async with clients.connect(dumb.url, account=ACCOUNT, job=JOB, api_key=KEY) as client:
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
    assert await dumb.applied() == {name: 2}


async def test_a_successor_sends_again_and_takes_up_the_future(client: Client, dumb: Dumb) -> None:
    """Same model, same number, another client: done once, with the same result for both."""
    name = await model(client)
    promise = await client.submit("optim_step", name, 1, STEP)
    async with Client(client.target) as successor:
        again = await successor.submit("optim_step", name, 1, STEP)
        assert again.request_id == promise.request_id
        taken = successor.future(promise.request_id)
        assert await taken.result() == await promise.result()
        await successor.submit("optim_step", name, 2, STEP)
    assert await dumb.applied() == {name: 2}


async def test_the_route_gets_lost_in_between(client: Client, dumb: Dumb, tmp_path: Path) -> None:
    """404, 503 and route_not_ready on the way: same bytes again, one effect, one result."""
    events.configure(tmp_path / "log", "test")
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
    seen = list(events.read(tmp_path / "log"))
    # Every 404 and what became of it, every error that passed: nothing goes unsaid.
    assert collections.Counter(map(type, seen)) == {Doubted: 8, Retried: 4}, seen
    told = [str(one) for one in seen if isinstance(one, Doubted)]
    assert told[:2] == [
        "404 on submit, control plane says RUNNING, try 1, 3 s left: send again",
        "submit of " + PATH + "optim_step succeeded after 1 404s",
    ]
    assert "404 on poll, control plane says RUNNING, try 1, 3 s left: poll again" in told
    assert await dumb.applied() == {name: 1}


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (problem(410, "job_gone", "deleted", x_should_retry="false"), Gone),
        (problem(404, "job_not_found", "never heard of"), NotFound),
        (Reply(404, b'{"error":{"code":"job_gone"}}'), NotFound),
        (Reply(404, b"", headers=(("x-should-retry", "false"),)), NotFound),
        (
            Reply(404, gzip.compress(b'{"error":{"code":"job_not_found"}}'), headers=PACKED),
            NotFound,
        ),
        (problem(423, "job_paused", "resume it", x_should_retry="false"), Mistake),
        (problem(409, "no", "never", x_should_retry="false"), Mistake),
        (problem(400, "bad_request", "no"), Mistake),
    ],
)
async def test_what_is_sure_is_raised_at_once(
    client: Client, dumb: Dumb, answer: Reply, kind: type[HoldfastError]
) -> None:
    """Gone, not found, paused, wrong: no question and no retry, for submit and poll. A gateway
    that asked before it answered is believed."""
    dumb.play("optim_step", answer)
    dumb.play("retrieve_future", answer)
    with pytest.raises(kind):
        await client.submit("optim_step", "m", 1, STEP)
    with pytest.raises(kind):
        await client.future("m:1").result()
    assert (len(dumb.came), dumb.asked) == (2, 0)


@pytest.mark.parametrize(("category", "kind"), [("user", Mistake), ("server", HoldfastError)])
async def test_a_failed_operation(
    client: Client, dumb: Dumb, category: str, kind: type[HoldfastError]
) -> None:
    """What the trainer says of its failure reaches the caller."""
    dumb.play("retrieve_future", reply(200, {"error": "loss is nan", "category": category}))
    with pytest.raises(kind, match="loss is nan") as caught:
        await client.future("m:1").result()
    assert type(caught.value) is kind


async def test_a_result_that_takes_too_long(client: Client, dumb: Dumb) -> None:
    """The wait ends, the operation does not: its future can be asked again."""
    dumb.trainer.delay_s, dumb.trainer.hold_s = 0.6, 0.05
    name = await model(client)
    future = await client.submit("optim_step", name, 1, STEP)
    with pytest.raises(TimedOut, match="ask again"):
        await future.result(timeout_s=0.2)
    assert len(dumb.of("retrieve_future")) < 5, "polls without a pause"
    assert (await future.result())["metrics"] == {"step:max": 1.0}


async def test_mistakes_are_told_before_anything_is_sent(client: Client, dumb: Dumb) -> None:
    """Numbers and payloads that contradict each other, and names that are none."""
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
        ({"gateway": "http://me:secret@x"}, "no password"),
        (
            {"gateway": "http://x", "account": "a", "job": "j", "control": "http://a:b@y"},
            "no password",
        ),
        ({"gateway": "http://x", "api_key": "tml-secret "}, "API key"),
        ({"gateway": "http://x", "api_key": "tml-secret\n"}, "API key"),
        ({"gateway": "http://x", "api_key": "tml-\xfc"}, "API key"),
    ],
)
def test_targets_that_make_no_sense(how: dict[str, str], words: str) -> None:
    """What cannot be meant is said at once, and without the key or password."""
    with pytest.raises(Mistake, match=words) as caught:
        Target.of(**how)  # type: ignore[arg-type]  # all of it is text
    assert "secret" not in str(caught.value)


def test_a_target_keeps_its_key_to_itself() -> None:
    """A key is in no repr."""
    target = Target.of("http://x/", api_key="tml-secret", account="a", job="j-1")
    assert "tml-secret" not in repr(target)
    assert target.base_url == "http://x/training/v1/rlorTrainerJobs/a/j-1"


@pytest.mark.parametrize(
    ("named", "url", "proxy"),
    [
        ({"https_proxy": "http://h:3128"}, "https://gateway.example/x", "http://h:3128"),
        ({"https_proxy": "http://h:3128"}, "http://gateway.example/x", None),
        ({"https_proxy": "http://h:1", "no_proxy": "in.side"}, "https://in.side:8443/x", None),
        ({"ALL_PROXY": "h:9"}, "HTTPS://gateway.invalid/x", "http://h:9"),
        ({"ALL_PROXY": "h:9", "HTTPS_PROXY": "http://h:8"}, "https://a.invalid/x", "http://h:8"),
    ],
)
def test_proxies_that_the_environment_names(
    monkeypatch: pytest.MonkeyPatch, named: dict[str, str], url: str, proxy: str | None
) -> None:
    """What httpx does for its own transports is done for ours; a scheme may be missing."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in named.items():
        monkeypatch.setenv(name, value)
    assert proxy_of(url) == proxy
    Target.of(url).transport()


def test_a_wrapper_that_is_not_there() -> None:
    """The names that there are are in the error."""
    with pytest.raises(Mistake, match="tinker, fireworks or native"):
        clients.connect("http://x", api_key="k", sdk="curl")  # type: ignore[arg-type]  # on purpose
