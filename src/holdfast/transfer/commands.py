"""`holdfast transfer ...`: looking into a store of values, and removing it."""

import itertools
import json
import sys
from typing import Any

import click
import msgspec

from holdfast.errors import BatchFailed, Gone, NotFound
from holdfast.text import clean, plural, size
from holdfast.transfer.frame import MAX_KEY_BYTES
from holdfast.transfer.store import Store, status
from holdfast.transfer.url import connect, without_password

__all__ = ["transfer"]

_SHOWN = 200


@click.group()
def transfer() -> None:
    """Look into a store of values, or remove it.

    \b
    URL is what transfer.connect(URL) takes: shm://NAME, redis://host:port,
    mooncake://master:port?metadata=http://host:port/metadata
    """


@transfer.command()
@click.argument("url")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def stat(url: str, as_json: bool) -> None:
    """How many values there are, and how much room they take."""
    with connect(url) as store:
        found = store.stat()
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(found)))
        return
    limit = f" of {size(found.budget)}" if found.budget else ""
    click.echo(
        f"{plural(found.keys, 'value')}, {size(found.nbytes)}; takes {size(found.taken)}{limit}"
    )


@transfer.command()
@click.argument("url")
@click.argument("prefix", default="")
@click.option("--limit", default=1000, show_default=True, help="Show at most so many; 0: all.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
def ls(url: str, prefix: str, limit: int, as_json: bool) -> None:
    """List the keys that begin with PREFIX, with their sizes and generations."""
    with connect(url) as store:
        found = store.scan(prefix)
        some = sorted(itertools.islice(found, limit or None), key=lambda one: one.key)
        more = limit > 0 and next(iter(found), None) is not None
        for one in some:
            if as_json:
                click.echo(json.dumps(msgspec.to_builtins(one)))
            else:
                key = clean(one.key, MAX_KEY_BYTES)
                click.echo(f"{size(one.nbytes):>10}  {one.generation:>20}  {key}")
    if more:
        click.echo(f"there are more than {limit}: give a longer PREFIX, or --limit 0", err=True)


@transfer.command()
@click.argument("url")
@click.argument("key")
@click.option("--raw", is_flag=True, help="Write the bytes themselves, for values that are bytes.")
def get(url: str, key: str, raw: bool) -> None:
    """Get one value, proven, and show what it is.

    Exit code 4 when it is not there, 6 when it is damaged.
    """
    with connect(url) as store:
        value = _get(store, key)
    if raw:
        if not isinstance(value, bytes):
            raise click.UsageError(f"{key} is a {type(value).__name__}, not bytes")
        sys.stdout.buffer.write(value)
        return
    click.echo(_describe(value))


@transfer.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
def stores(as_json: bool) -> None:
    """List this user's stores in shared memory on this machine: what they take, who uses them."""
    from holdfast.transfer import shm

    found = shm.stores()
    if not as_json:
        click.echo(f"{'TAKES':>10} {'OF':>10}  {'STORE':32} PROCESSES")
    for one in found:
        if as_json:
            click.echo(json.dumps(msgspec.to_builtins(one)))
            continue
        users = ", ".join(map(str, one.pids)) or ("?" if one.used else "-")
        click.echo(f"{size(one.taken):>10} {size(one.budget):>10}  shm://{one.name:26} {users}")


@transfer.command()
@click.argument("url")
@click.option("--queue", "name", help="Remove only this queue: its payloads and its records.")
@click.option("--ledger", help="With --queue: the ledger that has its records.")
@click.option("--run", default="default", show_default=True, help="The run the queue belongs to.")
@click.option("--force", is_flag=True, help="Also when it is in use, or cannot tell.")
def rm(url: str, name: str | None, ledger: str | None, run: str, force: bool) -> None:
    """Remove a store, or a queue, with everything in it.

    A store in shared memory goes with its segments. It is left alone while any process has it
    open, and a queue while it has members: exit code 3. Redis and Mooncake do not know their
    users, so they need --force; only keys of Holdfast go. With --force, processes that still use
    a store or a queue get errors from then on.

    \b
    holdfast transfer rm shm://run-7
    holdfast transfer rm shm://run-7 --queue rollouts --ledger sqlite:///run.db
    """
    from holdfast.transfer.removal import remove_queue, remove_store

    if (name is None) != (ledger is None):
        raise click.UsageError("--queue and --ledger belong together")
    shown = without_password(url)
    if name is None or ledger is None:
        gone = remove_store(url, force=force)
        click.echo(f"removed {shown}: {plural(gone.values, 'value')}, {size(gone.nbytes)}")
        return
    gone = remove_queue(url, ledger, run, name, force=force)
    click.echo(
        f"removed the queue {clean(name)} of run {clean(run)}: {plural(gone.values, 'value')}, "
        f"{size(gone.nbytes)}, from {shown}; {plural(gone.records, 'record')} from the ledger"
    )


def _get(store: Store, key: str) -> Any:
    try:
        return store.get([key])[key]
    except BatchFailed as error:
        reason = error.failures[key]
        if status(reason) == "missing":
            raise Gone(f"nothing is stored under {key}", key=key) from None
        raise reason from None


def _describe(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, bytes):
        more = "..." if len(value) > _SHOWN else ""
        return f"bytes, {len(value)}: {value[:_SHOWN]!r}{more}"
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if dtype is not None:
        kind = type(value).__module__.partition(".")[0]
        return f"{kind} tensor, {dtype}, shape {tuple(shape or ())}\n{value}"
    text = repr(value)
    return f"object: {text[: 10 * _SHOWN]}" + ("..." if len(text) > 10 * _SHOWN else "")


@click.group()
def queue() -> None:
    """Look into a queue of samples."""


@queue.command()
@click.argument("url")
@click.argument("name", required=False)
@click.option("--run", default="default", show_default=True, help="The run it belongs to.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def show(url: str, name: str | None, run: str, as_json: bool) -> None:
    """Show a queue: its tasks, what waits, what is claimed by whom.

    URL is the ledger's, as in sqlite:///run.db. Without NAME: list the queues of the run.
    """
    import asyncio

    from holdfast.transfer.queue.overview import names, overview

    if name is None:
        for one in asyncio.run(names(url, run)):
            click.echo(clean(one))
        return
    found = asyncio.run(overview(url, run, name))
    if found is None:
        raise NotFound(f"the run {run!r} has no queue {name!r}: see `holdfast queue show {url}`")
    if as_json:
        click.echo(msgspec.json.encode(found).decode())
        return
    click.echo(
        f"queue {name} of run {run}: {plural(found.samples, 'sample')}, {size(found.nbytes)}, in "
        f"{plural(found.blocks, 'block')} (at most {found.max_samples} samples, "
        f"{size(found.max_bytes)}); "
        f"{found.ever} ever added, newest version {found.newest}"
    )
    click.echo(
        f"\n{'TASK':16} {'NEEDS':24} {'NOT READY':>9} {'FREE':>9} {'CLAIMED':>9} {'DONE':>9}"
    )
    for task in found.tasks:
        needs = clean(", ".join(task.needs)) or "-"
        click.echo(
            f"{clean(task.name):16} {needs:24} {task.waiting:>9} {task.free:>9} {task.claimed:>9} "
            f"{task.done:>9}"
        )
    click.echo(f"\n{'MEMBER':32} {'PID':>8} {'HOST':16} CLAIMS")
    for member in found.members:
        claims = ", ".join(f"{task}: {count}" for task, count in member.claims.items()) or "-"
        who, host = clean(member.id), clean(member.host)
        click.echo(f"{who:32} {member.pid:>8} {host:16} {clean(claims)}")
