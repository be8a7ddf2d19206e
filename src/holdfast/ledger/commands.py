"""`holdfast ledger ...`: looking into a ledger, and looking after it."""

import asyncio
import base64
import functools
import json
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import click

from holdfast.errors import Compacted, Denied, LeaseLost, Mistake, NotFound
from holdfast.ledger import backup as backups
from holdfast.ledger.audit import audited
from holdfast.ledger.base import Ledger
from holdfast.ledger.check import check as check_ledger
from holdfast.ledger.memory import MemoryLedger
from holdfast.ledger.sqlite import SqliteLedger
from holdfast.ledger.types import Batch, Delete, Entry, Put, check_key, check_txn
from holdfast.ledger.url import open, without_password

__all__ = ["ledger"]

P = ParamSpec("P")


@click.group()
def ledger() -> None:
    """Look into a ledger, and look after it.

    \b
    URL is one of
      sqlite:///relative.db   sqlite:////absolute/path.db   (?sync=full survives power loss)
      etcd://host:port,host:port   etcd://user:password@host:port?tls=1&ca=ca.pem
    """


def _on_a_ledger(
    work: Callable[Concatenate[Ledger, P], Coroutine[Any, Any, None]],
) -> Callable[..., None]:
    """Make a command of something that is done with an open ledger: it takes the URL instead."""

    @functools.wraps(work)
    def command(url: str, *args: P.args, **given: P.kwargs) -> None:
        _with(url, lambda led: work(led, *args, **given))

    return command


def _with(
    url: str, work: Callable[[Ledger], Coroutine[Any, Any, None]], *, new: bool = False
) -> None:
    """Open the ledger, do something with it, close it."""
    ledger = open(url)
    if isinstance(ledger, MemoryLedger):
        raise Mistake("memory: lives inside one process: name a sqlite or an etcd ledger")
    if isinstance(ledger, SqliteLedger) and not new and not _is_there(ledger.path):
        raise NotFound(f"there is no ledger at {ledger.path}: check the path")

    async def main() -> None:
        async with ledger:
            await work(ledger)

    asyncio.run(main())


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except PermissionError:
        raise Denied(f"no right to look into {path.parent}") from None


def _reason(context: click.Context, parameter: click.Parameter, value: str) -> str:
    if not value.strip():
        raise click.BadParameter("say why, in words", context, parameter)
    return value.encode(errors="replace").decode()


_reason_option = click.option(
    "--reason", required=True, callback=_reason, help="Why; it is written into the ledger."
)


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return f"({len(value)} bytes, not text) {value[:32].hex()}..."


def _entry(entry: Entry) -> dict[str, Any]:
    """An entry for machines; a value that is not text comes as base64."""
    try:
        value = {"value": entry.value.decode()}
    except UnicodeDecodeError:
        value = {"value_base64": base64.b64encode(entry.value).decode()}
    return {
        "key": entry.key,
        **value,
        "version": entry.version,
        "created": entry.create_revision,
        "modified": entry.mod_revision,
        "lease": entry.lease,
    }


@ledger.command("ls")
@click.argument("url")
@click.argument("prefix", default="/")
@click.option("--long", "-l", is_flag=True, help="Show size, version and lease as well.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line, with values.")
@_on_a_ledger
async def ls(led: Ledger, prefix: str, long: bool, as_json: bool) -> None:
    """List the keys below PREFIX, all as of one revision."""
    async for page in led.pages(prefix):
        for entry in page.entries:
            if as_json:
                click.echo(json.dumps(_entry(entry)))
            elif long:
                lease = f"lease {entry.lease}" if entry.lease else ""
                click.echo(
                    f"{entry.mod_revision:>10}  v{entry.version:<6} {len(entry.value):>8} B  "
                    f"{entry.key}  {lease}".rstrip()
                )
            else:
                click.echo(entry.key)


@ledger.command("get")
@click.argument("url")
@click.argument("key")
@click.option("--json", "as_json", is_flag=True, help="With version, revisions and lease.")
@_on_a_ledger
async def get(led: Ledger, key: str, as_json: bool) -> None:
    """Print the value of KEY."""
    entry = await led.get(key)
    if entry is None:
        raise NotFound(f"there is no key {key}", key=key)
    if as_json:
        click.echo(json.dumps(_entry(entry), indent=2))
    else:
        click.echo(entry.value)


@ledger.command("watch")
@click.argument("url")
@click.argument("prefix", default="/")
@click.option(
    "--from", "start", type=click.IntRange(1, 1 << 62), help="Begin at this revision, not now."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per change.")
@click.option("--count", type=click.IntRange(1), help="Stop after this many transactions.")
def watch(url: str, prefix: str, start: int | None, as_json: bool, count: int | None) -> None:
    """Follow what changes below PREFIX, live, until Ctrl-C.

    On sqlite the file is made if it is not there yet.
    """
    check_key(prefix)

    async def work(led: Ledger) -> None:
        begin = start or (await led.range(prefix)).revision + 1
        click.echo(f"watching {prefix} of {without_password(url)} from revision {begin}", err=True)
        seen = 0
        while count is None or seen < count:
            try:
                async with led.watch(prefix, start=begin) as changes:
                    async for batch in changes:
                        _show(batch, as_json=as_json)
                        begin, seen = batch.revision + 1, seen + 1
                        if seen == count:
                            return
            except Compacted as lost:
                click.echo(f"history up to revision {lost.revision} is lost; going on", err=True)
                begin = lost.revision + 1

    _with(url, work, new=True)


def _show(batch: Batch, *, as_json: bool) -> None:
    for event in batch.events:
        if as_json:
            after = _entry(event.entry) if event.entry else None
            click.echo(json.dumps({"revision": batch.revision, "key": event.key, "entry": after}))
        elif event.entry is None:
            click.echo(f"{batch.revision:>8}  delete  {event.key}")
        else:
            lease = f"  (lease {event.entry.lease})" if event.entry.lease else ""
            click.echo(
                f"{batch.revision:>8}  put     {event.key} = {_text(event.entry.value)}{lease}"
            )


@ledger.command("leases")
@click.argument("url")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per lease.")
@_on_a_ledger
async def leases(led: Ledger, as_json: bool) -> None:
    """List the living leases: how long each still lasts, and what vanishes with it."""
    for number in await led.leases():
        info = await led.lease_info(number)
        if as_json:
            left_s = round(info.remaining_s, 3)
            times = {"ttl_s": info.ttl_s, "remaining_s": left_s}
            click.echo(json.dumps({"lease": info.id, **times, "keys": info.keys}))
        else:
            keys = ", ".join(info.keys[:5]) + (" ..." if len(info.keys) > 5 else "")
            click.echo(f"{info.id:>20}  {info.remaining_s:8.1f} of {info.ttl_s:g} s  {keys}")


@ledger.command("break-lease")
@click.argument("url")
@click.argument("lease", type=int)
@_reason_option
@click.option("--yes", is_flag=True, help="Do not ask.")
@_on_a_ledger
async def break_lease(led: Ledger, lease: int, reason: str, yes: bool) -> None:
    """End somebody's lease by hand: the keys bound to it vanish at once.

    The owner is not asked; what it does afterwards is fenced off, not prevented. Who did it,
    when, why and which keys went is recorded below /holdfast/audit before it happens.
    """
    try:
        info = await led.lease_info(lease)
    except LeaseLost:
        raise NotFound(
            f"there is no living lease {lease}: see `holdfast ledger leases URL`"
        ) from None
    click.echo(f"lease {lease} has {info.remaining_s:.1f} s left and holds:", err=True)
    for key in info.keys:
        click.echo(f"  {key}", err=True)
    if not yes:
        click.confirm("End it?", abort=True, err=True)
    where = await audited(led, "break-lease", reason, str(lease), info.keys)
    await led.revoke(lease)
    click.echo(f"lease {lease} has ended; recorded at {where}")


@ledger.command("put")
@click.argument("url")
@click.argument("key")
@click.argument("value")
@_reason_option
def put(url: str, key: str, value: str, reason: str) -> None:
    """Write KEY by hand. Recorded below /holdfast/audit, like break-lease.

    On sqlite the file is made if it is not there yet.
    """
    op = Put(key, os.fsencode(value))
    check_txn([], [op], [])

    async def work(led: Ledger) -> None:
        await audited(led, "put", reason, key, (key,))
        txn = await led.txn([], [op])
        click.echo(f"{key} written at revision {txn.revision}")

    _with(url, work, new=True)


@ledger.command("delete")
@click.argument("url")
@click.argument("key")
@_reason_option
@_on_a_ledger
async def delete(led: Ledger, key: str, reason: str) -> None:
    """Delete KEY by hand. Recorded below /holdfast/audit, like break-lease."""
    if await led.get(key) is None:
        raise NotFound(f"there is no key {key}", key=key)
    await audited(led, "delete", reason, key, (key,))
    txn = await led.txn([], [Delete(key)])
    click.echo(f"{key} deleted at revision {txn.revision}")


@ledger.command("backup")
@click.argument("url")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--force", is_flag=True, help="Replace FILE if it is there.")
def backup(url: str, file: Path, force: bool) -> None:
    """Write everything, as of one revision, to FILE."""
    _check_target(url, file, force=force)
    if not file.absolute().parent.is_dir():
        raise Mistake(f"the folder {file.absolute().parent} is not there: create it first")

    async def work(led: Ledger) -> None:
        revision, count = await backups.backup(led, file)
        click.echo(f"{count} entries as of revision {revision} are in {file}")

    _with(url, work)


def _check_target(url: str, file: Path, *, force: bool) -> None:
    """Refuse to write a backup over anything but an earlier backup."""
    if file.exists() and not file.is_file():
        raise Mistake(f"{file} is not an ordinary file: choose another name")
    if file.is_symlink():
        raise Mistake(f"{file} is a link: name the file itself")
    ledger = open(url)
    if isinstance(ledger, SqliteLedger):
        own = [ledger.path.name + tail for tail in ("", "-wal", "-shm", "-bells")]
        if file.resolve().parent == ledger.path.resolve().parent and file.name in own:
            raise Mistake(f"{file} belongs to the ledger itself: choose another name")
    if file.exists() and not force:
        raise Mistake(f"{file} is there already: choose another name, or use --force")


@ledger.command("restore")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("url")
def restore(file: Path, url: str) -> None:
    """Fill the empty ledger at URL from FILE.

    Entries that were bound to a lease are left out: their owners are not there any more.
    """

    async def work(led: Ledger) -> None:
        count = await backups.restore(led, file)
        click.echo(f"{count} entries restored to {without_password(url)}")

    backups.read(file)  # a bad file must not leave a new, empty ledger behind
    _with(url, work, new=True)


@ledger.command("check")
@click.argument("url")
@_on_a_ledger
async def check(led: Ledger) -> None:
    """Check that the ledger is sound. Exit code 1 if it is not."""
    problems, count = await check_ledger(led)
    for problem in problems:
        click.echo(problem)
    click.echo(f"{count} entries checked, {len(problems)} problems")
    if problems:
        raise click.exceptions.Exit(1)


@ledger.command("compact")
@click.argument("url")
@click.option("--keep", default=1000, show_default=True, help="How many revisions to keep.")
@_on_a_ledger
async def compact(led: Ledger, keep: int) -> None:
    """Forget old history. What is in the ledger stays; watches that lag read again."""
    revision = (await led.range("/holdfast/")).revision
    if revision - keep < 1:
        click.echo(f"there are only {revision} revisions: nothing to forget")
        return
    await led.compact(revision - keep)
    click.echo(f"history up to revision {revision - keep} is forgotten")
