"""A host as a process of its own: `HOLDFAST_SETTINGS=… python -m holdfast.jobs.host_process`.

The settings are a JSON object (`HostSettings`). SIGTERM and SIGINT stop the trainers politely and
give their jobs back; when this process is killed, they die with it and are begun again elsewhere.
"""

import asyncio
import os
import shlex
import time
from pathlib import Path

import msgspec

from holdfast import ledger, machine
from holdfast.jobs.accounts import Accounts
from holdfast.jobs.decide import Budget
from holdfast.jobs.host import Host
from holdfast.jobs.local import LocalLauncher, is_own
from holdfast.jobs.records import Host as HostRecord
from holdfast.jobs.serving import log_events, take_settings, until_signal
from holdfast.jobs.store import Jobs
from holdfast.ledger.runtime import LiveRuntime
from holdfast.proc import preload
from holdfast.proc.forkserver import ForkServer, begin
from holdfast.proc.supervisor import as_program
from holdfast.timeouts import DEFAULTS

__all__ = ["HostSettings", "main"]


class HostSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a host needs to know."""

    run: str
    ledger: str
    name: str
    folder: str
    trainers: dict[str, str]
    allow_commands: bool = False
    only_account: str = ""
    """With `allow_commands`: the one account there may be. Empty: all are trusted."""
    health_path: str = "/api/v1/healthz"
    capacity: int = 64
    lease_s: float = DEFAULTS.host_lease_s
    grace_s: float = 10.0
    start_s: float = 300.0
    restarts: int = Budget().restarts


async def serve(settings: HostSettings, forks: ForkServer | None = None) -> None:
    """Be a host until a signal comes."""
    folder = Path(settings.folder)
    launcher = LocalLauncher(
        settings.trainers,
        folder,
        settings.ledger,
        allow_commands=settings.allow_commands,
        health_path=settings.health_path,
        start_s=settings.start_s,
        forks=forks,
    )
    async with ledger.open(settings.ledger) as opened:
        runtime = LiveRuntime(opened)
        jobs = Jobs(runtime, settings.run, time.time)
        accounts = Accounts(runtime, settings.run, time.time)

        async def check() -> None:
            if settings.allow_commands:
                await accounts.allow_commands(settings.only_account)

        host = Host(
            jobs,
            launcher,
            settings.name,
            capacity=settings.capacity,
            timeouts=DEFAULTS.changed(host_lease_s=settings.lease_s),
            grace_s=settings.grace_s,
            budget=Budget(restarts=settings.restarts),
            me=_me(settings.name),
            is_dead=_is_dead,
            check=check,
        )
        await until_signal(host.run())


def _me(name: str) -> HostRecord:
    pid = os.getpid()
    return HostRecord(name=name, place=machine.place(), pid=pid, began=machine.begun_at(pid))


def _is_dead(other: HostRecord) -> bool:
    """Whether a host's process is no more, which can be seen on its own machine alone."""
    if other.place != machine.place() or not other.pid:
        return False
    return not machine.is_alive(other.pid, other.began)


def main() -> None:
    """Read the settings and serve."""
    settings = take_settings(HostSettings)
    own = any(is_own(shlex.split(command)) for command in settings.trainers.values())
    forks = begin(preload.HOST) if own else None
    log_events(settings.folder, settings.name)
    with as_program():
        asyncio.run(serve(settings, forks))


if __name__ == "__main__":
    main()
