"""What a hostile caller, a busy port or a lagging account must not do to anybody."""

import asyncio
import collections
import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from gateway.service import TOY, answer_ok, ask, serve, wait_for
from holdfast import ledger, proc
from holdfast.errors import Mistake, Retriable
from holdfast.gateway.desk import Desk
from holdfast.gateway.front import Front
from holdfast.gateway.http import Server
from holdfast.gateway.process import GatewaySettings
from holdfast.gateway.routes import Routes
from holdfast.gateway.serve import Part
from holdfast.jobs.accounts import Accounts, Guests
from holdfast.jobs.api import Api
from holdfast.jobs.logs import Logs
from holdfast.jobs.store import Jobs
from holdfast.ledger import LiveRuntime
from holdfast.proc import child as child_module
from holdfast.proc.ports import reserve
from holdfast.timeouts import Timeouts


@contextlib.contextmanager
def started(folder: Path, port: int, *flags: str) -> Iterator[proc.Child]:
    """`holdfast serve`, not waited for."""
    folder.mkdir(parents=True, exist_ok=True)
    argv = [
        *(sys.executable, "-m", "holdfast", "serve", "--folder", str(folder), "--port", str(port)),
        *("--ledger", f"sqlite:///{folder}/ledger.db", "--trainer", TOY, *flags),
    ]
    env = {"XDG_STATE_HOME": str(folder / "state")}
    with proc.spawn(argv, env=env, log=folder / "serve.log") as child:
        yield child


def said(folder: Path) -> str:
    return (folder / "serve.log").read_text()


def test_two_services_do_not_share_a_port(tmp_path: Path) -> None:
    """The second one says that the port is taken; callers of the first one hear no 401."""
    with serve(tmp_path / "one") as first:
        first.create("j")
        first.wait("j")
        with started(tmp_path / "two", first.port) as second:
            wait_until_it_spoke(second, tmp_path / "two")
            asked = [first.ask("GET", first.way("j")).status for _ in range(40)]
            assert collections.Counter(asked) == {200: 40}


def wait_until_it_spoke(child: proc.Child, folder: Path) -> None:
    """It has ended, has been announced, or a part of it has ended."""
    wait_for(
        lambda: not child.alive() or bool({"serving", "ended"} & {*said(folder).split()}), "it"
    )


async def test_a_port_that_somebody_else_has_is_not_announced(tmp_path: Path) -> None:
    """The user's key would go to them."""
    async with await asyncio.start_server(answer_ok, "127.0.0.1", 0) as other:
        with started(tmp_path, other.sockets[0].getsockname()[1]) as child:
            await asyncio.to_thread(wait_until_it_spoke, child, tmp_path)
            assert "serving at" not in said(tmp_path)


@pytest.mark.parametrize(
    "flags",
    [("--tls-key", "{bad}"), ("--tls-cert", "{bad}"), ("--ledger", "memory:")],
    ids=["TLS would be left out", "a certificate that cannot be read", "not to be shared"],
)
def test_what_cannot_be_served_is_not_announced(tmp_path: Path, flags: tuple[str, str]) -> None:
    """It is said before anybody is told where to come."""
    bad = tmp_path / "bad.pem"
    bad.write_text("this is none")
    with started(tmp_path, 0, flags[0], flags[1].format(bad=bad)) as child:
        wait_until_it_spoke(child, tmp_path)
        assert "serving at" not in said(tmp_path)


def test_any_port_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The port that was given is not let go of before it is held: another program may get it."""
    asked = []

    class Watched(socket.socket):
        def bind(self, address: Any) -> None:
            asked.append(address)
            super().bind(address)

    monkeypatch.setattr("holdfast.proc.ports.socket.socket", Watched)
    with contextlib.closing(reserve("127.0.0.1", 0)) as reserved:
        assert asked == [("127.0.0.1", 0)]
        port = reserved.getsockname()[1]
        with pytest.raises(Mistake, match="another --port"):
            reserve("127.0.0.1", port)


@contextlib.contextmanager
def gateway_part(folder: Path, ledger_url: str) -> Iterator[Part]:
    """A gateway as `holdfast serve` starts it."""
    settings = GatewaySettings(run="r", ledger=ledger_url, name="g", folder=str(folder))
    part = Part("g", "holdfast.gateway.process", settings, folder / "g.log")
    part.start()
    try:
        yield part
    finally:
        part.end(0.0)


def test_a_ledgers_password_is_on_no_command_line(tmp_path: Path) -> None:
    """Command lines are everybody's to read."""
    with gateway_part(tmp_path, "etcd://u:secret-word@127.0.0.1:9") as part:
        process = psutil.Process(part.pid)
        wait_for(lambda: "holdfast" in " ".join(process.cmdline()), "exec", 5.0)
        assert "secret-word" not in " ".join(process.cmdline())


def test_the_log_of_a_part_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its supervisor looks after that while it runs."""
    monkeypatch.setattr(child_module, "LOG_BYTES", 128 << 10)
    log = tmp_path / "g.log"
    log.write_bytes(b"x" * (1 << 20))
    with gateway_part(tmp_path, "etcd://127.0.0.1:9") as part:
        wait_for(lambda: part.look() is not None or log.stat().st_blocks * 512 < 128 << 10, "it")
        assert log.stat().st_blocks * 512 < 128 << 10


def test_commands_find_a_service_on_ipv6(tmp_path: Path) -> None:
    with started(tmp_path, 0, "--host", "::1"):
        wait_for(lambda: "serving at" in said(tmp_path), "it says so")
        env = {"XDG_STATE_HOME": str(tmp_path / "state"), "PATH": ""}
        argv = [sys.executable, "-m", "holdfast", "jobs", "list"]
        listed = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60)
        assert listed.returncode == 0, listed.stderr


# ---- one gateway, with what it knows in our hands --------------------------------------


async def test_the_default_job_is_not_missing_because_a_watch_lags(tmp_path: Path) -> None:
    """On /api/v1/… too, "not found" needs a reading of the ledger."""
    async with ledger.open(f"sqlite:///{tmp_path}/ledger.db") as opened:
        runtime = LiveRuntime(opened)
        jobs, book = Jobs(runtime, "r", time.time), Accounts(runtime, "r", time.time)
        key, _ = await book.add_key("bob")
        guests, routes = Guests(runtime, "r", time.time), Routes(jobs)
        await guests._look()  # all it has heard until now
        desk = Desk(runtime, routes, Timeouts(submit_wait_s=0.5, poll_hold_s=0.5))

        async def announce(account: str, job: str) -> None:
            await book.set_default(account, job)

        front = Front(guests, routes, desk, Api(jobs, Logs(tmp_path), announce))
        server = Server(front.handle)
        await server.start("127.0.0.1", 0)
        try:
            await jobs.create("bob", "j", {})  # through another gateway
            await book.set_default("bob", "j")
            headers = {"X-Api-Key": key}
            told = await asyncio.to_thread(
                ask, server.port, "POST", "/api/v1/optim_step", b"{}", headers
            )
            assert told.status == 503, "it is PENDING"
        finally:
            await server.stop(1.0)


async def test_readings_are_bounded_while_the_ledger_hangs(tmp_path: Path) -> None:
    """Names cost a caller nothing: what is begun for them must end with their requests."""
    async with ledger.open(f"sqlite:///{tmp_path}/ledger.db") as opened:
        hang = asyncio.Event()

        class Hanging(Jobs):
            async def look(self, account: str, job: str):  # type: ignore[no-untyped-def]
                await hang.wait()
                return await super().look(account, job)

        routes = Routes(Hanging(LiveRuntime(opened), "r", time.time))

        async def ask(number: int) -> None:
            with contextlib.suppress(Retriable):
                await routes.confirm("a", f"j{number}", 0.05)

        before = len(asyncio.all_tasks())
        for first in range(0, 1000, 100):
            await asyncio.gather(*(ask(number) for number in range(first, first + 100)))
        left = len(asyncio.all_tasks()) - before
        hang.set()
        while len(asyncio.all_tasks()) > before:
            await asyncio.sleep(0.01)
        assert left <= 2 * 64, f"{left} tasks for callers that have left"
