"""The real `tinker` and `fireworks-ai` clients, unmodified, behind a dumb gateway.

Each library lives in a process in its own environment (scripts/setup-sdks) and does what the
tests tell it; the trainer is a process of its own, too.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from holdfast import ledger as ledgers
from holdfast.loopthread import LoopThread
from holdfast.machine import listeners
from holdfast.proc import HeldPort, spawn
from jobs import counts
from jobs.counting_trainer import Reply, reply
from patience import HANG_S

from .dumb import ACCOUNT, BARE, JOB, LOST, RUN, Dumb, admit, incarnation, over_http
from .library import PYTHON, ROOT, Process, started

KEYS = {"tinker": "tml-a-key", "fireworks": "fw_a_key"}
SUBMITS = {"forward", "forward_backward", "optim_step", "save_weights"}


@pytest.fixture(scope="module", autouse=True)
def there() -> None:
    """The client libraries are part of what is tested: without them there is no green."""
    if not PYTHON.exists():
        pytest.fail("the client libraries are not here: run scripts/setup-sdks, or `make test`")


class Library:
    """A client library in its process, the gateway in front of it, and what was counted."""

    def __init__(self, name: str, process: Process, dumb: Dumb, ledger: str) -> None:
        self.name, self.dumb, self._ledger = name, dumb, ledger
        self.do = process.do

    def connect(self, *, wrapped: bool = True, warm_up_s: float = 0.0) -> str:
        """A new service client and a new model; its name."""
        return str(self.connected(wrapped=wrapped, warm_up_s=warm_up_s)["ok"])

    def connected(self, **how: Any) -> dict[str, Any]:
        """What it says when it has connected, and has made a model."""
        said = self.do("connect", gateway=self.dumb.url, key=self.dumb.key, **how)
        assert "ok" in said, said
        self.dumb.came.clear()
        return said

    def submits(self) -> list[tuple[str, int]]:
        """What was submitted, and how it was answered."""
        return [(one.name, one.status) for one in self.dumb.came if one.name in SUBMITS]

    def bodies(self, name: str) -> set[bytes]:
        """The different bodies that came under this name."""
        return {one.body for one in self.dumb.of(name)}

    def applied(self, model: str) -> list[str]:
        """What the trainer did for a model: each operation once and in order, or it raises."""
        done = asyncio.run(counts.read(self._ledger, RUN, ACCOUNT, JOB))
        return [one.op for one in done[model]]


@pytest.fixture(scope="module", params=["tinker", "fireworks"])
def process(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Library]:
    folder = tmp_path_factory.mktemp("sdk")
    url = f"sqlite:///{folder}/run.db"

    async def prepare() -> None:
        async with ledgers.open(url) as ledger:
            await admit(ledger)

    asyncio.run(prepare())
    env = {
        "HOLDFAST_LEDGER": url,
        "HOLDFAST_RUN": RUN,
        "HOLDFAST_JOB": incarnation().name,
        "HOLDFAST_EPOCH": "1",
        "COUNTING_DELAY_S": "0.05",
    }
    with ExitStack() as stack:
        port = stack.enter_context(HeldPort())
        program = [str(PYTHON), str(ROOT / "tests/jobs/counting_trainer.py")]
        env["PORT"] = str(port)
        trainer = stack.enter_context(spawn(program, env=env, log=folder / "trainer.log"))
        child = stack.enter_context(started(request.param))
        trainer.wait_until(lambda: bool(listeners(port)))
        loop = LoopThread("gateway")
        stack.callback(loop.stop)
        dumb = Dumb(over_http(port), key=KEYS[request.param])
        serving = dumb.serve()
        loop.run(serving.__aenter__())
        stack.callback(lambda: loop.run(serving.__aexit__(None, None, None)))
        yield Library(request.param, child, dumb, url)


@pytest.fixture
def library(process: Library) -> Library:
    """The library with a gateway that has nothing in mind."""
    process.dumb.plan.clear()
    process.dumb.came.clear()
    process.dumb.state = "JOB_STATE_RUNNING"
    process.dumb.lost = lambda: False
    process.dumb.asked = 0
    return process


def test_nothing_happens(library: Library) -> None:
    """A whole life without trouble: warm-up, steps, checkpoint; the control plane is not asked."""
    model = library.connect(warm_up_s=20)
    assert library.do("step")["ok"]["step:max"] == 2.0
    assert library.do("forward")["ok"]["seq:max"] == 3.0
    assert library.do("save")["ok"].endswith("/weights/x")
    assert library.dumb.asked == 0
    assert len(library.applied(model)) == 4
    assert library.do("close")["took_s"] < HANG_S


def test_404s_while_running_never_reach_the_caller(library: Library) -> None:
    """The seed's race: RUNNING, but the gateway's routes lag, at connect, on submits and on polls.
    The same bytes are sent again, nothing is done twice, and no poll takes a new number."""
    for name in ("get_server_capabilities", "probe", "create_session", "create_model"):
        library.dumb.play(name, LOST, LOST)
    model = library.connect(warm_up_s=20)
    library.dumb.play("forward_backward", LOST, LOST)
    library.dumb.play("optim_step", LOST)
    library.dumb.play("retrieve_future", LOST, LOST, LOST)
    said = library.do("step")
    assert said["ok"]["step:max"] == 2.0, said
    assert sorted(library.submits()) == [
        ("forward_backward", 200),
        ("forward_backward", 404),
        ("forward_backward", 404),
        ("optim_step", 200),
        ("optim_step", 404),
    ]
    assert len(library.bodies("forward_backward")) == len(library.bodies("optim_step")) == 1
    library.dumb.play("retrieve_future", LOST)
    assert library.do("forward_backward")["ok"]["seq:max"] == 3.0, "a number was skipped"
    assert library.applied(model) == ["forward_backward", "optim_step", "forward_backward"]


@pytest.mark.parametrize("state", ["DELETED", "FAILED", "PAUSED"])
def test_it_fails_at_once_when_the_job_is_gone(library: Library, state: str) -> None:
    """Not RUNNING: the library's own error (for a poll, ValueError) after one send. Nothing is
    submitted again, and no number is taken."""
    model = library.connect()
    library.dumb.state = f"JOB_STATE_{state}"
    library.dumb.play("forward_backward", LOST)
    said = library.do("forward_backward")
    assert said["error"] == "NotFoundError", said
    assert library.submits() == [("forward_backward", 404)]
    assert library.applied(model) == []
    model = library.connect()
    library.dumb.play("retrieve_future", LOST)
    said = library.do("forward_backward")
    assert said["error"] == "ValueError", said
    assert library.submits() == [("forward_backward", 200)]
    assert library.applied(model) == ["forward_backward"]


def after(limit_s: float) -> Callable[[], bool]:
    """A route that is stale for so long from now on."""
    until = time.monotonic() + limit_s
    return lambda: time.monotonic() < until


def one_in_five(seed: int) -> Callable[[], bool]:
    """A route table that one replica in five does not have."""
    luck = random.Random(seed)
    return lambda: luck.random() < 0.2


def test_a_foreign_gateway_is_believed_soon(library: Library) -> None:
    """With the retries that users have. A route that is cold for a while and then answers some
    probes with a bare 404: connected within 3 s after the route is there. One stray 404 in every
    step: it costs 0.5 s at the median at most. One request in five: nothing is lost.
    """
    library.connect()  # its process has imported everything
    cold_s, good = 1.5, reply(200, {})
    warm_s = library.connected(wrapped=True, warm_up_s=60, patient=True)["took_s"]
    library.dumb.lost = after(cold_s)
    library.dumb.play("probe", good, BARE, good, BARE)
    said = library.connected(wrapped=True, warm_up_s=60, patient=True)
    # A busy machine makes every connection slow: what counts is what doubt adds to it.
    assert said["took_s"] - cold_s - warm_s < 3.0
    plain_s = statistics.median(library.do("step")["took_s"] for _ in range(3))
    stray_s = []
    for name in ("forward_backward", "optim_step", "retrieve_future"):
        library.dumb.play(name, BARE)
        stray_s.append(library.do("step")["took_s"])
    # One more request is sent, which takes less than a whole step does here and now.
    assert statistics.median(stray_s) - 2 * plain_s <= 0.5
    library.dumb.came.clear()
    library.dumb.lost = one_in_five(2)
    assert [library.do("step")["ok"]["step:max"] for _ in range(3)] == [14.0, 16.0, 18.0]
    assert any(one.status == 404 for one in library.dumb.came)
    assert len(library.applied(said["ok"])) == 18


@pytest.mark.long
def test_a_route_that_is_stale_for_20_s(library: Library) -> None:
    """In the middle of training, with the retries that users have: the step takes as long, and
    is done once. A job that is deleted meanwhile fails at once.
    """
    said = library.connected(wrapped=True, patient=True)
    assert "ok" in library.do("step")
    library.dumb.lost = after(20.0)
    stale = library.do("step")
    assert stale["ok"]["step:max"] == 4.0, stale
    assert 19.0 < stale["took_s"] < 24.0
    assert len(library.applied(said["ok"])) == 4
    library.dumb.lost, library.dumb.state = after(HANG_S), "JOB_STATE_DELETED"
    gone = library.do("step")
    assert "error" in gone, gone
    assert gone["took_s"] < 3.0


def test_a_library_without_the_way_in_is_refused(library: Library) -> None:
    """Another version of the library, without what we hold on to: an error that names it."""
    module, name, version = {
        "tinker": ("tinker.lib.internal_client_holder", "AsyncTinker", "tinker 0.36.0"),
        "fireworks": (
            "fireworks.training.sdk._core._client",
            "AsyncTrainingHTTPClient",
            "fireworks-ai 1.2.30",
        ),
    }[library.name]
    said = library.do("without", module=module, name=name)
    assert said["error"] == "Mistake", said
    assert said["text"].startswith(f"{version} has no ")


def test_a_connection_that_was_refused_is_not_used_again(library: Library) -> None:
    """An empty 400 makes the libraries open a new connection; they do with us as well."""
    library.connect()
    library.dumb.play("forward_backward", Reply(400, b""))
    assert "ok" in library.do("forward_backward")
    first, second = (one.peer for one in library.dumb.of("forward_backward"))
    assert first != second
