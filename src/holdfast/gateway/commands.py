"""`holdfast serve`, `holdfast accounts`."""

import asyncio
import contextlib
import os
import shlex
import ssl
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import click
import msgspec

from holdfast import events, ledger
from holdfast.engine.directory import read_config
from holdfast.errors import Mistake, Unavailable
from holdfast.fetch import fetch
from holdfast.files import private_folder
from holdfast.gateway.process import GatewaySettings
from holdfast.gateway.serve import Part, own_name, watch
from holdfast.jobs.accounts import TRUSTED, Accounts, split_key
from holdfast.jobs.decide import Budget
from holdfast.jobs.host_process import HostSettings
from holdfast.jobs.note import Note, leave_note, read_note
from holdfast.ledger.runtime import LiveRuntime
from holdfast.machine import state_dir
from holdfast.proc.ports import reserve
from holdfast.text import clean
from holdfast.timeouts import DEFAULTS

__all__ = ["accounts", "serve"]

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)
C = TypeVar("C", bound=Callable[..., Any] | click.Command)

ONE_ACCOUNT = "one-account"
"""What `--allow-commands` without a value says."""
OWN = "holdfast"
"""What stands for Holdfast's own trainer."""
GATEWAY = "holdfast.gateway.process"
"""The module that a gateway's process runs."""

_LEDGER = click.option(
    "--ledger",
    "url",
    envvar="HOLDFAST_LEDGER",
    default=None,
    help="Where jobs are recorded: sqlite:///file (one machine) or etcd://host:port,… "
    "[default: a file in your state folder]",
)


def _shown(
    flag: str, name: str, default: object, about: str | None = None, kind: Any = None
) -> Callable[[C], C]:
    """A flag whose default is shown."""
    return click.option(flag, name, default=default, show_default=True, help=about, type=kind)


_SOME = click.IntRange(1, 64)
_RUN = _shown("--run", "run", "default", "The run's name.")


@click.command()
@_LEDGER
@_RUN
@_shown("--host", "host", "127.0.0.1", "Where to listen.")
@_shown("--port", "port", 8700, "0: any free one.", click.IntRange(0, 65_535))
@_shown("--gateways", "gateways", 1, "Processes that share the port.", _SOME)
@click.option(
    "--trainer",
    "trainers",
    multiple=True,
    metavar="[NAME=]COMMAND",
    help="A command that jobs may be trained by; {port} stands for the port to listen on. "
    "'holdfast' stands for Holdfast's own trainer.",
)
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="NAME=DIRECTORY",
    help="For Holdfast's own trainer: a Hugging Face model directory that may be trained.",
)
@_shown("--ranks", "ranks", 1, "For Holdfast's own trainer: its processes.", _SOME)
@click.option(
    "--fsdp",
    is_flag=True,
    help="For Holdfast's own trainer: each of its ranks holds a part of the weights.",
)
@click.option(
    "--store", default="", help="For Holdfast's own trainer: where batches by reference are."
)
@click.option(
    "--allow-commands",
    default="",
    is_flag=False,
    flag_value=ONE_ACCOUNT,
    metavar=f"[={TRUSTED}]",
    help="Let jobs bring commands of their own. Such a command can read the whole ledger and make "
    "keys for every account, so there must be one account only, unless you say that all are "
    "trusted.",
)
@_shown("--health-path", "health_path", "/api/v1/healthz")
@_shown("--capacity", "capacity", 64, "Trainers at the same time.")
@_shown(
    "--max-restarts",
    "restarts",
    Budget().restarts,
    "How often in an hour a trainer may die within 10 s of serving.",
)
@click.option("--no-host", is_flag=True, help="Start no trainers: other machines do.")
@_shown("--account", "account", "local", "Made with a key, if new.")
@click.option("--tls-cert", type=click.Path(exists=True, path_type=Path))
@click.option("--tls-key", type=click.Path(exists=True, path_type=Path))
@click.option("--no-access-log", is_flag=True)
@click.option("--folder", type=click.Path(path_type=Path), help="Where logs and events go.")
@_shown("--submit-wait", "submit_wait_s", DEFAULTS.submit_wait_s, "Wait for a route: s.")
@_shown("--poll-hold", "poll_hold_s", DEFAULTS.poll_hold_s, "Hold a poll for: s.")
@_shown("--lease", "lease_s", DEFAULTS.host_lease_s, "A dead host is noticed after: s.")
def serve(url: str | None, **given: Any) -> None:
    """Start the control plane, the gateway and a host for trainers.

    \b
    holdfast serve --trainer holdfast           (or --trainer 'python mine.py --port {port}')
    holdfast jobs create my-job                 (in another shell)

    Trainers are reached at http://HOST:PORT/training/v1/rlorTrainerJobs/ACCOUNT/JOB, which is
    what the Tinker SDK takes as base_url and what the Fireworks SDK uses by itself. Everything
    is in the ledger: kill this at any time and start it again.
    """
    asked = _Given(ledger=ledger.lasting(url), **given)
    asked.check()
    named = _named(asked.trainers, _own_trainer(asked))
    private_folder(asked.place)
    _log(asked.place, asked.run)
    with contextlib.closing(reserve(asked.host, asked.port)) as reserved:
        _serve(asked, reserved.getsockname()[1], named)


def _serve(asked: "_Given", port: int, trainers: dict[str, str]) -> None:
    """Leave word for the user's own commands, and keep the parts alive."""
    key = asyncio.run(_own_key(asked, read_note(asked.place)))
    shown = f"[{asked.host}]" if ":" in asked.host else asked.host
    reached = f"{'https' if asked.tls_cert else 'http'}://{shown}:{port}"
    word = Note(url=reached, account=asked.account, key=key, pid=os.getpid())
    note = leave_note(asked.place, word)
    leave_note(state_dir(), word)
    watch(
        _parts(asked, port, trainers),
        lambda text: click.echo(f"holdfast: {text}", err=True),
        lambda: _is_ready(reached),
        lambda: click.echo(
            f"holdfast: serving at {reached}; account {asked.account}; key in {note}"
        ),
    )


class _Given(SimpleNamespace):
    """The flags of `serve`, by their names."""

    def check(self) -> None:
        """Refuse what no flag's own type refuses."""
        if self.allow_commands not in ("", ONE_ACCOUNT, TRUSTED):
            raise Mistake(f"--allow-commands is given alone, or as --allow-commands={TRUSTED}")
        if self.tls_key and not self.tls_cert:
            raise Mistake("--tls-key needs --tls-cert")
        if self.ledger.startswith("memory:"):
            raise Mistake("a ledger in memory is one process's: use sqlite:///file or etcd://…")
        DEFAULTS.changed(
            host_lease_s=self.lease_s,
            submit_wait_s=self.submit_wait_s,
            poll_hold_s=self.poll_hold_s,
        )
        if self.fsdp and self.ranks == 1:
            raise Mistake("--fsdp spreads models over ranks: give --ranks 2 or more with it")

    @property
    def place(self) -> Path:
        """Where logs and events go."""
        place: Path = self.folder or state_dir() / "serve" / self.run
        return place.absolute()

    @property
    def only_account(self) -> str:
        """The account whose jobs may bring commands; "": those of all accounts."""
        return "" if self.allow_commands == TRUSTED else str(self.account)


def _own_trainer(asked: _Given) -> str:
    """The command of Holdfast's own trainer."""
    for one in asked.models:
        name, equals, directory = one.partition("=")
        if not name or not equals or not directory:
            raise Mistake(f"--model {one!r}: say NAME=DIRECTORY, where config.json is in it")
        read_config(Path(directory))
    given = [word for one in asked.models for word in ("--model", one)]
    given += ["--ranks", str(asked.ranks)] if asked.ranks > 1 else []
    given += ["--fsdp"] if asked.fsdp else []
    given += ["--store", asked.store] if asked.store else []
    return shlex.join([sys.executable, "-m", "holdfast.trainer", *given])


def _named(trainers: tuple[str, ...], own: str) -> dict[str, str]:
    named = {}
    for text in trainers:
        name, equals, command = text.partition("=")
        if not equals or " " in name or "/" in name:
            name, command = "default", text
        named[name] = own if command == OWN else command
    return named


def _parts(asked: _Given, port: int, trainers: dict[str, str]) -> list[Part]:
    logs = asked.place / "logs"
    parts = []
    for number in range(asked.gateways):
        gateway = _settings(
            GatewaySettings,
            asked,
            name=f"gateway-{number}",
            port=port,
            certificate=str(asked.tls_cert or ""),
            private_key=str(asked.tls_key or ""),
            access_log=not asked.no_access_log,
        )
        parts.append(Part(gateway.name, GATEWAY, gateway, logs / f"{gateway.name}.log"))
    if not asked.no_host:
        allow = bool(asked.allow_commands)
        host = _settings(
            HostSettings, asked, name=own_name(), trainers=trainers, allow_commands=allow
        )
        parts.append(Part("host", "holdfast.jobs.host_process", host, logs / "host.log"))
    return parts


def _settings(kind: type[S], asked: _Given, **more: Any) -> S:
    """A part's settings: flags that are called as one of them is, and what only it is told."""
    more = {"folder": str(asked.place), "only_account": asked.only_account, **more}
    given = {**vars(asked), **more}
    return kind(**{name: given[name] for name in kind.__struct_fields__ if name in given})


def _log(folder: Path, run: str) -> None:
    """Take the event log, which has one writer: so there is one `serve` per folder."""
    private_folder(folder / "events")
    try:
        events.configure(folder / "events" / "serve.jsonl", process="serve")
    except Mistake:
        raise Mistake(
            f"another `holdfast serve` of the run {run!r} works in {folder}: stop it, or give "
            "this one another --run or --folder"
        ) from None


async def _own_key(asked: _Given, note: Note | None) -> str:
    """A key for the user's own commands: the one of the last start, or a new one."""
    account = asked.account
    async with ledger.open(asked.ledger) as opened:
        book = Accounts(LiveRuntime(opened), asked.run, time.time)
        if asked.allow_commands:
            await book.allow_commands(asked.only_account)
        else:
            await book.forbid_commands()
        parts = split_key(note.key) if note is not None else None
        mine = [there.keys for there in await book.all() if there.name == account]
        if note and parts and any(one.id == parts[0] for keys in mine for one in keys):
            return note.key
        return (await book.add_key(account))[0]


def _is_ready(url: str) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # ours, by any address
    try:
        return fetch("GET", f"{url}/readyz", timeout_s=2.0, tls=context)[0] == 200
    except Unavailable:
        return False


def _with_accounts(
    url: str | None, run: str, work: Callable[[Accounts], Coroutine[Any, Any, T]]
) -> T:
    """Do something with the accounts of a run."""

    async def opening() -> T:
        async with ledger.open(ledger.lasting(url)) as opened:
            return await work(Accounts(LiveRuntime(opened), run, time.time))

    return asyncio.run(opening())


@click.group()
def accounts() -> None:
    """Make and revoke API keys."""


@accounts.command("list")
@_LEDGER
@_RUN
def accounts_list(url: str | None, run: str) -> None:
    """Show accounts and the ids of their keys."""

    async def work(book: Accounts) -> None:
        for one in await book.unreadable():
            click.echo(f"{one.key.rpartition('/')[2]}: UNREADABLE: {clean(one.reason, 300)}")
        for account in await book.all():
            keys = ", ".join(key.id for key in account.keys) or "no keys"
            click.echo(f"{account.name}: {keys}")

    _with_accounts(url, run, work)


@accounts.command("key")
@click.argument("account")
@_LEDGER
@_RUN
@click.option("--days", default=0.0, help="How long it is valid; 0: until it is revoked.")
def accounts_key(account: str, url: str | None, run: str, days: float) -> None:
    """Make an API key for ACCOUNT (which is made with its first one), and print it, once."""

    lives_s = days * 86_400.0
    click.echo(_with_accounts(url, run, lambda book: book.add_key(account, lives_s))[0])


@accounts.command("revoke")
@click.argument("account")
@click.argument("key_id")
@_LEDGER
@_RUN
def accounts_revoke(account: str, key_id: str, url: str | None, run: str) -> None:
    """Take a key back. Gateways refuse it as soon as they hear of it."""
    _with_accounts(url, run, lambda book: book.revoke(account, key_id))
