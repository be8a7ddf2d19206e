"""The fence: what is not meant for this incarnation does not reach it."""

import dataclasses
import json
from collections.abc import MutableMapping
from typing import Any

import pytest

from holdfast.errors import Mistake
from holdfast.jobs.fence import Fence, Incarnation

WHO = Incarnation("r", "a", "j", 3)
Message = MutableMapping[str, Any]


async def ask(
    headers: list[tuple[bytes, bytes]], kind: str = "http", who: Incarnation = WHO
) -> tuple[list[Message], int]:
    """Send a request through the fence: what was answered, and how often the app was reached."""
    reached = 0
    sent: list[Message] = []

    async def app(scope: Message, _receive: Any, send: Any) -> None:
        nonlocal reached
        reached += 1
        assert all(name.lower() != b"x-holdfast-secret" for name, _ in scope.get("headers", ()))
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> Message:
        raise AssertionError("the fence does not read the body")

    async def send(message: Message) -> None:
        sent.append(message)

    await Fence(app, who)({"type": kind, "headers": headers}, receive, send)
    return sent, reached


MEANT = [(b"x-holdfast-job", b"a/j"), (b"x-holdfast-epoch", b"3")]


@pytest.mark.parametrize(
    "headers",
    [
        [],
        MEANT[:1],
        MEANT[1:],
        [MEANT[0], (b"x-holdfast-epoch", b"2")],
        [MEANT[0], (b"x-holdfast-epoch", b"03")],
        [(b"x-holdfast-job", b"b/j"), MEANT[1]],
        [*MEANT, (b"x-holdfast-epoch", b"2")],
        [*MEANT, MEANT[0]],
    ],
)
async def test_others_are_refused(headers: list[tuple[bytes, bytes]]) -> None:
    """With 421, before the body is read, and the connection is not used again."""
    sent, reached = await ask(headers)
    assert reached == 0
    assert sent[0]["status"] == 421
    assert (b"connection", b"close") in sent[0]["headers"]
    assert json.loads(sent[1]["body"])["error"]["code"] == "wrong_incarnation"
    assert b"a/j" not in sent[1]["body"], "who was not meant is told nothing"
    assert b"3" not in sent[1]["body"]


async def test_job_and_epoch_do_not_open_without_the_secret() -> None:
    """Both are no secret. It is shown once, whole, and the trainer's code does not see it."""
    who = dataclasses.replace(WHO, secret="s" * 43)
    right = (b"x-holdfast-secret", b"s" * 43)
    for headers in (
        MEANT,
        [*MEANT, (b"x-holdfast-secret", b"")],
        [*MEANT, (b"x-holdfast-secret", b"s" * 42)],
        [*MEANT, right, right],
        [MEANT[0], (b"x-holdfast-epoch", b"2"), right],
    ):
        sent, reached = await ask(headers, who=who)
        assert (reached, sent[0]["status"]) == (0, 421), headers
    assert (await ask([*MEANT, right], who=who))[1] == 1
    assert (await ask([*MEANT, right]))[1] == 1, "a trainer that was given none asks for none"
    assert "sss" not in repr(who)


async def test_what_is_meant_passes() -> None:
    for headers in (MEANT, MEANT[::-1], [(b"X-Holdfast-Job", b"a/j"), MEANT[1]]):
        assert (await ask(headers))[1] == 1
    assert (await ask([], "lifespan"))[1] == 1, "the server's own messages are not requests"
    assert (await ask([], "websocket"))[0] == [{"type": "websocket.close", "code": 1008}]


def test_who_it_is_comes_from_the_launcher() -> None:
    env = {"HOLDFAST_RUN": "r", "HOLDFAST_JOB": "a/j", "HOLDFAST_EPOCH": "3"}
    assert Incarnation.from_env(env) == WHO
    assert Incarnation.from_env({**env, "HOLDFAST_TRAINER_SECRET": "s"}).secret == "s"
    for name, value in (
        ("HOLDFAST_JOB", "a"),
        ("HOLDFAST_JOB", "a/b/c"),
        ("HOLDFAST_EPOCH", "x"),
    ):
        with pytest.raises(Mistake):
            Incarnation.from_env({**env, name: value})
    with pytest.raises(Mistake, match="holdfast serve"):
        Incarnation.from_env({})
