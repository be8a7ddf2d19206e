"""The real, unmodified SDKs against gateways that hear of everything late.

Each gateway replica lags by up to 10 s. A trainer becomes RUNNING, is killed twice (so its
successor is another incarnation at another address), and its job is deleted. No caller ever
hears "not found" before that, and the trainer's counters show every operation exactly once.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from client import library
from gateway.service import Service, serve
from jobs import counts
from patience import until
from trainer import journaled

TRAINER = f"{library.PYTHON} -u {library.ROOT / 'tests/jobs/counting_trainer.py'}"
OWN = "holdfast"
"""Holdfast's own trainer."""
BASES = {TRAINER: "holdfast/counting", OWN: "holdfast/tiny"}
WORDS = {TRAINER: "counting_trainer.py", OWN: "holdfast.trainer"}
FLAGS = ("--account", "acme", "--gateways", "3", "--lease", "2")


def kill_trainer(service: Service, word: str) -> None:
    """SIGKILL for the one trainer there is, as soon as there is one."""
    until(lambda: len(service.processes(word)) == 1, "there is a trainer")
    service.kill(word)


def _step_of_its_own(said: list[dict[str, Any]]) -> None:
    """Wait for a whole step: the one that was on its way may be its predecessor's work."""
    steps = len(said)
    until(lambda: len(said) > steps + 1, "a step of its own", 60)


def _move(service: Service, said: list[dict[str, Any]], word: str) -> None:
    """Kill the trainer after it has done a step, and wait for its successor."""
    _step_of_its_own(said)
    epoch = service.ask("GET", service.jobs("one")).json["epoch"]
    kill_trainer(service, word)
    until(lambda: service.ask("GET", service.jobs("one")).json["epoch"] > epoch, "the next")
    service.wait("one")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("trainer", [TRAINER, pytest.param(OWN, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["tinker", "fireworks"])
def test_no_spurious_not_found_behind_stale_routes(
    name: str, trainer: str, tmp_path: Path
) -> None:
    """From RUNNING over two moves to the delete; the library is not wrapped."""
    with (
        serve(tmp_path, *FLAGS, trainer=trainer, lag_s=10.0) as service,
        library.started(name, BASES[trainer]) as client,
    ):
        service.account = "acme"
        service.create("one")
        # At once: the trainer is not even started.
        made = client.do("connect", gateway=service.url, key=service.key, wrapped=False)
        assert "ok" in made, made
        model = made["ok"]
        said: list[dict[str, Any]] = []
        moved = threading.Event()

        def work() -> None:
            while not moved.is_set() or len(said) < 10:
                said.append(client.do("step"))

        working = threading.Thread(target=work)
        working.start()
        for _ in range(2):
            _move(service, said, WORDS[trainer])
        _step_of_its_own(said)
        moved.set()
        working.join(120)
        assert not working.is_alive()
        wrong = [one for one in said if "ok" not in one]
        assert not wrong, wrong

        ledger = f"sqlite:///{tmp_path}/ledger.db"
        read: Callable[..., Any] = counts.read if trainer == TRAINER else journaled.read
        done = asyncio.run(read(ledger, "default", "acme", "one"))[model]
        assert [op.seq for op in done] == list(range(1, len(done) + 1))
        assert len(done) == 2 * len(said)
        assert len({op.epoch for op in done}) == 3, "every incarnation did a part"

        assert service.ask("DELETE", service.jobs("one")).status == 200
        began = time.monotonic()
        told = client.do("forward_backward")
        took_s = time.monotonic() - began
        assert "error" in told, told
        assert "DELET" in told["text"], told
        # A quarter of a second on a quiet machine. One who was not told would ask for minutes.
        assert took_s < 20.0, f"{took_s:.1f} s until the caller knew"
        print(f"{name}: {len(done)} operations, 3 incarnations, gone after {took_s:.2f} s")


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", ["tinker", "fireworks"])
def test_a_naive_gateway_and_what_the_client_makes_of_it(name: str, tmp_path: Path) -> None:
    """A gateway that believes its stale table says 404 for a RUNNING trainer: the bare library
    gives up, the wrapped one warms up, asks the control plane, and does every step once."""
    flags = ("--account", "acme", "--gateways", "2")
    with (
        serve(tmp_path, *flags, trainer=TRAINER, lag_s=6.0, naive=True) as service,
        library.started(name) as client,
    ):
        service.account = "acme"
        service.create("one")
        service.wait("one")
        how = {"gateway": service.url, "key": service.key}
        bare = client.do("connect", **how, wrapped=False)
        assert "error" in bare, "the tables are not stale: this shows nothing"
        assert "404" in bare["text"] or "Not Found" in bare["text"], bare
        # Three probes may all meet the same gateway: the other one is stale for up to 6 s more.
        wrapped = client.do("connect", **how, wrapped=True, warm_up_s=60.0, patient=True)
        assert "ok" in wrapped, wrapped
        steps = [client.do("step") for _ in range(5)]
        assert all("ok" in step for step in steps), steps
        ledger = f"sqlite:///{tmp_path}/ledger.db"
        done = asyncio.run(counts.read(ledger, "default", "acme", "one"))[wrapped["ok"]]
        assert [op.seq for op in done] == list(range(1, 11))
