"""What a hostile caller, a busy port or a lagging account must not do to anybody."""

import asyncio
import collections
import contextlib
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from gateway.service import Service, ask, serve, started
from holdfast import ledger
from holdfast.errors import Mistake, Retriable
from holdfast.gateway.desk import Desk
from holdfast.gateway.front import Front
from holdfast.gateway.http import Server
from holdfast.gateway.process import GatewaySettings
from holdfast.gateway.routes import Routes
from holdfast.gateway.serve import Part
from holdfast.jobs.accounts import Accounts, Guests
from holdfast.jobs.api import Api
from holdfast.jobs.store import Jobs
from holdfast.ledger import LiveRuntime
from holdfast.proc.ports import reserve
from holdfast.timeouts import Timeouts
from patience import auntil, until


def wait_until_it_spoke(service: Service) -> None:
    """It has ended, has been announced, or a part of it has ended."""

    def spoke() -> bool:
        words = {*service.said().split()}
        return not service.child.alive() or bool(words & {"serving", "ended"})

    until(spoke, "it says something")


def test_two_services_do_not_share_a_port(tmp_path: Path) -> None:
    """The second one says that the port is taken; callers of the first one hear no 401."""
    with serve(tmp_path / "one") as first:
        first.create("j")
        first.wait("j")
        with started(tmp_path / "two", "--port", str(first.port)) as second:
            wait_until_it_spoke(second)
            assert "serving at" not in second.said(), "a key would go to somebody else"
            asked = [first.ask("GET", first.way("j")).status for _ in range(40)]
            assert collections.Counter(asked) == {200: 40}


@pytest.mark.parametrize(
    "flags",
    [("--tls-key", "{bad}"), ("--tls-cert", "{bad}"), ("--ledger", "memory:")],
    ids=["TLS would be left out", "a certificate that cannot be read", "not to be shared"],
)
def test_what_cannot_be_served_is_not_announced(tmp_path: Path, flags: tuple[str, str]) -> None:
    """It is said before anybody is told where to come."""
    bad = tmp_path / "bad.pem"
    bad.write_text("this is none")
    with started(tmp_path, flags[0], flags[1].format(bad=bad)) as service:
        wait_until_it_spoke(service)
        assert "serving at" not in service.said()


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


def test_a_ledgers_password_is_on_no_command_line(tmp_path: Path) -> None:
    """Command lines are everybody's to read."""
    url = "etcd://u:secret-word@127.0.0.1:9"
    settings = GatewaySettings(run="r", ledger=url, name="g", folder=str(tmp_path))
    part = Part("g", "holdfast.gateway.process", settings, tmp_path / "g.log")
    part.start()
    try:
        process = psutil.Process(part.pid)
        until(lambda: "holdfast" in " ".join(process.cmdline()), "exec", 5.0)
        assert "secret-word" not in " ".join(process.cmdline())
    finally:
        part.end(0.0)


def test_commands_find_a_service_on_ipv6(tmp_path: Path) -> None:
    """Its note has the address in brackets."""
    with started(tmp_path, "--host", "::1") as service:
        until(lambda: "serving at" in service.said(), "it says so")
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

        front = Front(guests, routes, desk, Api(jobs, tmp_path, announce))
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
        await auntil(lambda: len(asyncio.all_tasks()) <= before)
        assert left <= 2 * 64, f"{left} tasks for callers that have left"
