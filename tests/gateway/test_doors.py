"""What a stranger, or another account, can do at the ports of a real `holdfast serve`."""

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from gateway.service import Answer, Service, ask, serve
from holdfast import events
from holdfast.errors import Mistake
from holdfast.gateway import commands
from holdfast.gateway.http import Limits
from holdfast.jobs.fence import SECRET
from patience import until

TRAINER = f"{sys.executable} -u {Path(__file__).parents[1] / 'jobs' / 'fenced_toy.py'}"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    flags = ("--lease", "2", "--poll-hold", "30")
    with serve(tmp_path_factory.mktemp("doors"), *flags, trainer=TRAINER) as it:
        it.create("one")
        it.wait("one")
        yield it


def trainer(service: Service) -> psutil.Process:
    """The process of the job's trainer."""
    return service.processes("fenced_toy.py")[0]


def knock(port: int, headers: dict[str, str]) -> Answer:
    """Ask a trainer's port itself, without the gateway."""
    return ask(port, "GET", "/api/v1/optim_step", None, headers)


def named(epoch: int) -> dict[str, str]:
    return {"x-holdfast-job": "local/one", "x-holdfast-epoch": str(epoch)}


def test_a_trainers_port_obeys_its_gateway_and_nobody_else(service: Service) -> None:
    """Who knows port, job and epoch still needs the secret; a refusal tells none of them."""
    env = trainer(service).environ()
    port, epoch, secret = int(env["PORT"]), int(env["HOLDFAST_EPOCH"]), env[SECRET]
    assert len(secret) >= 32
    for headers in ({}, named(epoch), {**named(epoch), "x-holdfast-secret": "x" * len(secret)}):
        answer = knock(port, headers)
        assert answer.status == 421, answer
        assert b"local" not in answer.raw, "it does not say whose trainer it is"
        assert b"epoch" not in answer.raw
    assert knock(port, {**named(epoch), "x-holdfast-secret": secret}).status == 200
    through = service.ask("GET", service.way("one"))
    assert through.status == 200, through
    assert "x-holdfast-secret" not in through.json["headers"], "a trainer's code does not see it"


def test_secrets_are_told_nowhere(service: Service) -> None:
    """A trainer's secret and a caller's key: not in command lines, not in logs, events or any file
    but the user's note, not by the control plane."""
    process = trainer(service)
    secret, key = process.environ()[SECRET], service.key.rpartition("-")[2]
    assert all(secret not in word for word in process.cmdline())
    for path in (service.jobs(), service.jobs("one"), service.jobs("one", "/logs"), "/metrics"):
        answer = service.ask("GET", path)
        assert answer.status == 200, answer
        assert secret.encode() not in answer.raw
    files = [one for one in service.folder.rglob("*") if one.is_file()]
    written = [one for one in files if one.suffix in (".log", ".jsonl")]
    assert len(written) >= 5
    assert not [one for one in written if secret.encode() in one.read_bytes()]
    assert {one.name for one in files if key.encode() in one.read_bytes()} == {"serve.json"}
    assert (service.folder / "serve.json").stat().st_mode & 0o077 == 0


def test_a_new_incarnation_has_a_new_secret(service: Service) -> None:
    """What opened the old port does not open the new one; the gateway follows by itself."""
    before = trainer(service)
    old = before.environ()[SECRET]
    os.kill(before.pid, signal.SIGKILL)
    until(
        lambda: any(one.pid != before.pid for one in service.processes("fenced_toy.py")),
        "its successor is started",
    )
    until(lambda: service.ask("GET", service.way("one")).status == 200, "it is reached")
    env = trainer(service).environ()
    assert env[SECRET] != old
    claimed = {**named(int(env["HOLDFAST_EPOCH"])), "x-holdfast-secret": old}
    assert knock(int(env["PORT"]), claimed).status == 421


def connect(service: Service, stack: contextlib.ExitStack) -> socket.socket:
    return stack.enter_context(socket.create_connection(("127.0.0.1", service.port), 30))


@pytest.mark.long
@pytest.mark.timeout(300)
def test_one_account_does_not_lock_out_another(service: Service) -> None:
    """1,100 polls of one account are held, or told to wait; another's requests are answered."""
    key = service.add_account("greedy")
    jobs = "/v1/accounts/greedy/rlorTrainerJobs"
    assert service.ask("POST", f"{jobs}?rlorTrainerJobId=idle", {}, key).status == 200
    assert service.ask("POST", f"{jobs}/idle:pause", None, key).status == 200
    path = "/training/v1/rlorTrainerJobs/greedy/idle/api/v1/retrieve_future"
    poll = f"POST {path} HTTP/1.1\r\nHost: x\r\nX-Api-Key: {key}\r\nContent-Length: 2\r\n\r\n{{}}"
    with contextlib.ExitStack() as stack:
        polls = selectors.PollSelector()
        for _ in range(1100):
            one = connect(service, stack)
            one.sendall(poll.encode())
            polls.register(one, selectors.EVENT_READ)
        assert polls.select(30), "what is above its share is told so at once"
        statuses = [service.ask("GET", service.way("one")).status for _ in range(205)]
        assert statuses == [200] * 205
        told = polls.select(0)
        for ready, _ in told:
            said = ready.fileobj.recv(4096)  # type: ignore[union-attr]  # a socket
            assert said.startswith(b"HTTP/1.1 429 "), said
            assert b"too_many_polls" in said
            assert b"retry-after-ms: 1000" in said.lower()
        assert len(told) == 1100 - Limits().polls // 2


@pytest.mark.long
@pytest.mark.timeout(300)
def test_connections_without_a_key_keep_nobody_out(service: Service) -> None:
    """2,300 of them are open, say nothing, and callers with a key are answered."""
    with contextlib.ExitStack() as stack:
        for _ in range(2300):
            connect(service, stack)
        statuses = [service.ask("GET", service.way("one")).status for _ in range(100)]
        assert statuses == [200] * 100


def test_commands_of_jobs_and_a_second_account_exclude_each_other(tmp_path: Path) -> None:
    """A job's own command can read the ledger: serve and `accounts key` refuse what would let it
    read another account's, whichever comes second, unless the operator says so in words."""
    url = f"sqlite:///{tmp_path}/ledger.db"
    key = [sys.executable, "-m", "holdfast", "accounts", "key", "other", "--ledger", url]
    with serve(tmp_path, "--allow-commands", ledger=url):
        refused = subprocess.run(key, capture_output=True, text=True, check=False)
        assert refused.returncode == 2, refused
        assert "all-accounts-are-trusted" in refused.stderr
    asked = ["--folder", str(tmp_path), "--ledger", url, "--port", "0", "--allow-commands=yes"]
    with pytest.raises(Mistake, match="all-accounts-are-trusted"):
        commands.serve.main(asked, standalone_mode=False)
    with serve(tmp_path, "--allow-commands=all-accounts-are-trusted", ledger=url):
        subprocess.run(key, capture_output=True, text=True, check=True)
    with pytest.raises(Mistake, match="beside local: other"):
        commands.serve.main([*asked[:-1], "--allow-commands"], standalone_mode=False)
    events.unconfigure()
