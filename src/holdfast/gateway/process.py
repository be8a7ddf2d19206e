"""A gateway as a process of its own: `HOLDFAST_SETTINGS=… python -m holdfast.gateway.process`.

The settings are a JSON object (`GatewaySettings`). Any number of these share a port and a ledger.
SIGTERM and SIGINT stop it gently: requests in work are finished first.
"""

import contextlib
import resource
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from holdfast import events, ledger
from holdfast.gateway.desk import Desk
from holdfast.gateway.front import Front
from holdfast.gateway.http import Limits, Server, run
from holdfast.gateway.routes import Routes
from holdfast.jobs.accounts import Accounts, Guests
from holdfast.jobs.api import Api
from holdfast.jobs.records import TOMBSTONES
from holdfast.jobs.serving import log_events, take_settings, until_signal
from holdfast.jobs.steward import Steward
from holdfast.jobs.store import Jobs
from holdfast.ledger.runtime import LiveRuntime, Runtime
from holdfast.proc.supervisor import as_program
from holdfast.timeouts import DEFAULTS, Timeouts

__all__ = ["GatewaySettings", "main"]


_ACCESS_LOG = {"file_bytes": 16 << 20, "files": 15}
"""How long the log may be when it has a line for every request: 256 MiB, some million lines."""


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a gateway needs to know."""

    run: str
    ledger: str
    name: str
    folder: str
    host: str = "127.0.0.1"
    port: int = 8700
    certificate: str = ""
    private_key: str = ""
    access_log: bool = True
    submit_wait_s: float = DEFAULTS.submit_wait_s
    poll_hold_s: float = DEFAULTS.poll_hold_s
    body_bytes: int = 1 << 30
    drain_s: float = 10.0


async def serve(
    settings: GatewaySettings,
    counters: events.Counters,
    make_routes: Callable[[Jobs], Routes],
    make_desk: Callable[[Runtime, Routes, Timeouts], Desk],
) -> None:
    """Be a gateway until a signal comes."""
    async with ledger.open(settings.ledger) as opened:
        runtime = LiveRuntime(opened)
        jobs = Jobs(runtime, settings.run, time.time)
        accounts = Accounts(runtime, settings.run, time.time)
        guests = Guests(runtime, settings.run, time.time)
        routes = make_routes(jobs)
        timeouts = DEFAULTS.changed(
            submit_wait_s=settings.submit_wait_s, poll_hold_s=settings.poll_hold_s
        )
        desk = make_desk(runtime, routes, timeouts)

        async def announce(account: str, job: str) -> None:
            """The first job of an account is its default, until it is deleted."""
            now = await guests.default_job(account)
            there = await jobs.find(account, now) if now else None
            if there is None or there.job.state in TOMBSTONES:
                await accounts.set_default(account, job, instead_of=now)

        api = Api(jobs, Path(settings.folder), announce)
        front = Front(guests, routes, desk, api, counters.expose, access_log=settings.access_log)
        server = Server(front.handle, limits=Limits(body_bytes=settings.body_bytes))
        await server.start(settings.host, settings.port, reuse_port=True, ssl=_tls(settings))
        try:
            await until_signal(routes.run(), guests.run(), Steward(jobs).run())
        finally:
            await server.stop(settings.drain_s)
            front.tell_unlogged()


def _tls(settings: GatewaySettings) -> ssl.SSLContext | None:
    if not settings.certificate:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(settings.certificate, settings.private_key or None)
    return context


def _raise_open_files() -> None:
    """A gateway's own bounds decide, not a shell's: two descriptors per connection, and more."""
    wanted = 4 * Limits().connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def main(
    make_routes: Callable[[Jobs], Routes] = Routes,
    make_desk: Callable[[Runtime, Routes, Timeouts], Desk] = Desk,
) -> None:
    """Read the settings and serve."""
    settings = take_settings(GatewaySettings)
    _raise_open_files()
    counters = events.Counters()
    bounds = _ACCESS_LOG if settings.access_log else {}
    log_events(settings.folder, settings.name, sinks=[counters], **bounds)
    with as_program():
        run(serve(settings, counters, make_routes, make_desk))


if __name__ == "__main__":
    main()
