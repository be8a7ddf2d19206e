"""`holdfast serve` with real processes: reached, killed, paused, gone, and always told right."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from gateway.service import Service, serve
from patience import HANG_S, until


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    flags = ("--gateways", "2", "--lease", "2", "--submit-wait", "2.5", "--poll-hold", "4")
    with serve(tmp_path_factory.mktemp("serve"), *flags) as it:
        yield it


def all_end(processes: list[psutil.Process]) -> bool:
    """Whether all of them end in time."""
    return not psutil.wait_procs(processes, timeout=HANG_S)[1]


def test_a_trainer_is_reached_on_both_paths(service: Service) -> None:
    """The Fireworks path, and the Tinker path for the account's first job; the key stays here."""
    service.create("reached")
    answer = service.ask("POST", service.way("reached", "/api/v1/optim_step?x=1"), b"body")
    assert answer.status == 200, answer
    told = answer.json
    assert (told["path"], told["body"]) == ("/api/v1/optim_step?x=1", 4)
    assert (told["headers"]["x-holdfast-job"], told["headers"]["x-holdfast-epoch"]) == (
        "local/reached",
        "1",
    )
    assert "x-api-key" not in told["headers"]
    encoded = service.ask("GET", service.way("%72eached"))
    assert encoded.status == 200, "%72 is r, as the control plane says too"
    assert service.ask("GET", service.jobs("%72eached")).json["name"].endswith("/reached")
    assert service.ask("GET", "/api/v1/healthz").json["job"] == "local/reached"


def test_a_killed_trainer_is_a_pause(service: Service) -> None:
    """The next request waits inside, and is answered by the successor."""
    service.create("killed")
    service.wait("killed")
    before = service.ask("GET", service.way("killed")).json["epoch"]
    for process in service.processes("toy.py"):
        if process.environ()["HOLDFAST_JOB"] == "local/killed":
            os.kill(process.pid, signal.SIGKILL)
    lost = service.ask("POST", service.way("killed", "/api/v1/optim_step"), b"{}")
    if lost.status != 200:  # it went out on a connection that had just been cut
        assert (lost.status, lost.headers["x-should-retry"]) == (502, "true"), lost
        assert lost.json["error"]["code"] == "trainer_lost"
    answer = service.ask("GET", service.way("killed"))
    assert answer.status == 200, answer
    assert answer.json["epoch"] == before + 1


def test_what_callers_hear_of_a_job_that_starts_pauses_and_ends(service: Service) -> None:
    """A submit waits inside; a poll is held, instead of an instant answer that would make the SDK
    spin; what is paused or gone is told at once."""
    service.create("starts", {"how": "silent"})
    submit = service.ask("POST", service.way("starts", "/api/v1/optim_step"), b"{}")
    assert submit.status == 503, submit
    assert submit.json["error"]["code"] == "route_not_ready"
    assert submit.headers["retry-after-ms"] == "1000"
    assert submit.took_s > 1.5, "it waited inside"
    poll = service.ask("POST", service.way("starts", "/api/v1/retrieve_future"), b"{}")
    assert poll.status == 408, poll
    assert poll.took_s > 3.5
    assert poll.json["queue_state"] == "paused_capacity"
    assert "not ready" in poll.json["queue_state_reason"]
    service.ask("POST", service.jobs("starts", ":pause"))
    paused = service.ask("POST", service.way("starts", "/api/v1/optim_step"), b"{}")
    assert (paused.status, paused.headers["x-should-retry"]) == (423, "false")
    assert "holdfast jobs resume starts" in paused.json["error"]["message"]
    service.ask("DELETE", service.jobs("starts"))
    for path in ("/api/v1/optim_step", "/api/v1/retrieve_future"):
        gone = service.ask("POST", service.way("starts", path), b"{}")
        # Until its trainer, which was paused a moment ago, has really ended, it is DELETING.
        # A call that had waited inside would have ended with 503 or 408.
        assert (gone.status, gone.json["error"]["code"][:8]) == (410, "job_dele")


def test_a_held_poll_is_answered_when_the_job_is_resumed(service: Service) -> None:
    service.create("resumed")
    service.wait("resumed")
    service.ask("POST", service.jobs("resumed", ":pause"))
    answers = []
    way = service.way("resumed", "/api/v1/retrieve_future")
    poll = threading.Thread(target=lambda: answers.append(service.ask("POST", way, b"{}")))
    poll.start()
    service.ask("POST", service.jobs("resumed", ":resume"))
    poll.join(HANG_S)
    assert [answer.status for answer in answers] == [200]


def test_nobody_learns_what_others_have(service: Service) -> None:
    """Somebody else's job, one that never was, and a name that cannot be: one answer."""
    service.create("mine")
    other = service.add_account("other")
    answers = [
        service.ask("GET", service.way("mine"), key=other),
        service.ask("GET", service.way("never"), key=other),
        service.ask("GET", "/training/v1/rlorTrainerJobs/other/never/api/v1/x", key=other),
        service.ask("GET", "/training/v1/rlorTrainerJobs/other/UPPER/api/v1/x", key=other),
        service.ask("GET", service.way("never")),
    ]
    assert {(answer.status, answer.raw) for answer in answers} == {(404, answers[0].raw)}
    assert service.ask("GET", service.jobs("mine"), key=other).status == 404
    for wrong in ("", "tml-x", other[:-1] + "!", "tml-" + "a" * 12 + "-" + "b" * 32):
        assert service.ask("GET", service.way("mine"), key=wrong).status == 401


def test_gateways_and_hosts_may_be_killed(service: Service) -> None:
    """A gateway's death is felt by its own connections only; a host's is a pause."""
    service.create("survivor")
    service.wait("survivor")
    first = service.ask("GET", service.way("survivor")).json["epoch"]
    for _ in range(2):
        service.kill("gateway.process")
        until(lambda: len(service.processes("gateway.process")) == 2, "both gateways")
        until(service.is_ready, "a gateway is ready")
        assert service.ask("GET", service.way("survivor")).json["epoch"] == first
    host = service.processes("host_process")[0]
    children = host.children(recursive=True)
    os.kill(host.pid, signal.SIGKILL)
    assert all_end(children), "trainers die with their host"

    def answered() -> bool:
        answer = service.ask("GET", service.way("survivor"))
        assert answer.status in (200, 503), answer
        return answer.status == 200 and answer.json["epoch"] > first

    until(answered, "the survivor's successor")


def test_health_and_metrics_need_no_key_and_tell_no_secrets(service: Service) -> None:
    service.create("counted")
    service.ask("GET", service.way("counted"))
    assert service.ask("GET", "/healthz", key="").json == {"status": "ok"}
    assert service.ask("GET", "/readyz", key="").status == 200
    texts = [service.ask("GET", "/metrics", key="").raw.decode() for _ in range(20)]
    assert any("holdfast_gateway_access_total" in text for text in texts)
    assert all("counted" not in text for text in texts)


def test_serve_goes_on_where_it_was(tmp_path: Path) -> None:
    """Killed as a whole and started again: same jobs, same key; stopped, nothing is left."""
    with serve(tmp_path, "--lease", "2") as first:
        first.create("lasting")
        first.wait("lasting")
        everything = psutil.Process(first.child.pid).children(recursive=True)
        os.kill(first.child.pid, signal.SIGKILL)
        assert all_end(everything)
    with serve(tmp_path, "--lease", "2") as second:
        assert second.key == first.key
        until(lambda: second.ask("GET", second.way("lasting")).status == 200, "it is back")
        assert second.ask("GET", second.way("lasting")).json["epoch"] == 2
        everything = psutil.Process(second.child.pid).children(recursive=True)
        second.child.process.send_signal(signal.SIGTERM)
        assert second.child.wait(HANG_S) == 0
        assert all_end(everything)


def test_the_commands(service: Service, tmp_path: Path) -> None:
    """`holdfast jobs` from create to delete, as a user types it."""
    env = {**os.environ, "HOLDFAST_URL": service.url, "HOLDFAST_API_KEY": service.key}

    def holdfast(*args: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "holdfast", "jobs", *args]
        return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60)

    made = holdfast("create", "typed", "--base-model", "m")
    assert made.returncode == 0, made
    assert service.way("typed", "") in made.stdout
    assert "RUNNING" in made.stderr
    assert holdfast("create", "typed").returncode == 2
    assert "exists already" in holdfast("create", "typed").stderr
    assert json.loads(holdfast("get", "typed").stdout)["trainingConfig"] == {"baseModel": "m"}
    assert "typed" in holdfast("list").stdout
    assert "toy: serve, epoch 1" in holdfast("logs", "typed").stdout
    assert holdfast("pause", "typed").returncode == 0
    assert holdfast("resume", "typed").returncode == 0
    assert holdfast("delete", "typed").returncode == 0
    assert holdfast("get", "typed").returncode == 0
    assert holdfast("resume", "typed").returncode == 4
    assert holdfast("get", "nothing").returncode == 4
    assert holdfast("create", "BAD").returncode == 2
    env["HOLDFAST_API_KEY"] = "tml-wrong"
    assert holdfast("list").returncode == 2
    env["HOLDFAST_URL"] = "http://127.0.0.1:9"
    assert "is `holdfast serve` running?" in holdfast("list").stderr
