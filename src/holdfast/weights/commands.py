"""`holdfast weights ...`: looking into a channel of weights, and looking after it."""

import asyncio
import contextlib
import functools
import json
import sys
import time
from collections.abc import Callable, Coroutine
from datetime import datetime
from typing import Any

import click
import msgspec

from holdfast.errors import Mistake, NotFound
from holdfast.text import parse_bytes, plural, size
from holdfast.timeouts import DEFAULTS
from holdfast.weights import display
from holdfast.weights.book import DELETING
from holdfast.weights.find import Found, find
from holdfast.weights.layout import check_version
from holdfast.weights.overview import Overview, collect, details
from holdfast.weights.policy import Retention
from holdfast.weights.records import Swept
from holdfast.weights.sweep import Sweeper
from holdfast.weights.verify import Finding
from holdfast.weights.verify import verify as verify_channel
from holdfast.weights.watching import OF_THE_LEDGER
from holdfast.weights.watching import watch as watch_channel

__all__ = ["weights"]

CORRUPT = 6


@click.group()
def weights() -> None:
    """Look into a channel of weights, and look after it.

    \b
    PATH is a channel's folder, ROOT/CHANNEL of Publisher(ROOT, ledger, CHANNEL). It says
    itself which ledger it belongs to; --ledger and --run count for more.
    """


def _common(work: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A command with what all have: it finds the channel, does its work, closes the ledger."""

    @functools.wraps(work)
    def command(path: str, ledger: str | None, run: str | None, **given: Any) -> None:
        async def main() -> None:
            async with find(path, ledger, run) as found:
                await work(found, **given)

        asyncio.run(main())

    for add in (
        click.option("--json", "as_json", is_flag=True, help="One JSON object per line."),
        click.option("--run", help="The run, if the folder does not say it."),
        click.option(
            "--ledger",
            metavar="URL",
            help="The ledger, if the folder does not say it; 'none': marker files. What is "
            "given here can be seen in `ps`: put a URL with a password into HOLDFAST_LEDGER.",
        ),
        click.argument("path"),
    ):
        command = add(command)
    return command


def _echo(**fields: object) -> None:
    click.echo(json.dumps(fields))


@weights.command("ls")
@_common
async def ls(found: Found, as_json: bool) -> None:
    """List versions, who reads and serves them, who holds how much, and what crashes left.

    OWN is what a version does not share with the one before it. A consumer that died is
    shown until its lease ends; then it holds nothing any more.

    \b
    published   it can be loaded
    damaged     it is marked: nobody loads it any more
    missing     it is in the book, and its folder is gone
    unfinished  being written, or left by a publisher that died; the next one clears it away
    leftover    given up, or of a publisher that was replaced: a sweep removes it
    foreign     not written by Holdfast
    """
    overview = await collect(found.channel, found.book, found.about)
    if as_json:
        for line in display.overview_json(overview):
            _echo(**line)
        return
    _warn_if_empty(found, overview)
    click.echo("\n".join(display.overview(overview, found.path, found.ledger_name())))


def _warn_if_empty(found: Found, overview: Overview) -> None:
    if overview.epoch == 0 and overview.head is None and not overview.consumers:
        click.echo(
            f"{found.ledger_name()} knows nothing of the channel {overview.channel} in the run "
            f"{overview.run}: nothing was published yet, or check --ledger and --run",
            err=True,
        )


@weights.command("show")
@_common
@click.argument("number", metavar="N", type=int)
@click.option("--tensors", is_flag=True, help="List the tensors too.")
async def show(found: Found, number: int, tensors: bool, as_json: bool) -> None:
    """Show what version N consists of, what it shares, and who pins and serves it."""
    check_version(number)
    overview = await collect(found.channel, found.book, found.about)
    known = await found.book.lookup(number)
    if known is None:
        newest = "nothing was" if overview.head is None else f"the newest is {overview.head}"
        raise NotFound(f"version {number} was not published: {newest}", version=number)
    if isinstance(known, Swept):
        lines = display.swept_version(known)
        fields = {"type": "swept", **msgspec.to_builtins(known)}
    else:
        found_out = await details(found.channel, known)
        lines = display.version(found_out, overview, known, with_tensors=tensors)
        fields = display.version_json(found_out, overview, known, with_tensors=tensors)
    if as_json:
        _echo(**fields)
    else:
        click.echo("\n".join(lines))


@weights.command("verify")
@_common
@click.argument("numbers", metavar="[N]...", nargs=-1, type=int)
@click.option("--mark", is_flag=True, help="Mark damaged versions: nobody loads them any more.")
async def verify(found: Found, numbers: tuple[int, ...], mark: bool, as_json: bool) -> None:
    """Prove all versions, or versions N, byte by byte. Exit code 6 if one is damaged.

    A file that several versions share is read once and told of for each of them. A mark
    cannot be taken back; it goes when the version is swept.
    """
    for number in numbers:
        check_version(number)
    await (found.check_ours() if mark else found.check_known())
    meter = _Meter()
    try:
        findings = await verify_channel(
            found.channel, found.book, numbers or None, mark=mark, progress=meter.show
        )
    finally:
        meter.clear()
    view = await found.book.view()
    count = len(set(numbers)) or len([n for n in view.versions if view.marks.get(n) != DELETING])
    _report(findings, count, meter.done, mark=mark, as_json=as_json)


class _Meter:
    """Progress on a terminal; silent elsewhere."""

    def __init__(self) -> None:
        self.done = 0
        self._shown_s = 0.0
        self._on = sys.stderr.isatty()

    def show(self, done: int, total: int) -> None:
        """May be called from any thread."""
        self.done = done
        if self._on and time.monotonic() > self._shown_s + DEFAULTS.show_s:
            self._shown_s = time.monotonic()
            click.echo(f"\r\x1b[Kverified {size(done)} of {size(total)}", err=True, nl=False)

    def clear(self) -> None:
        """Leave no half line behind."""
        if self._on and self._shown_s:
            click.echo("\r\x1b[K", err=True, nl=False)


def _report(findings: list[Finding], count: int, done: int, *, mark: bool, as_json: bool) -> None:
    """Tell what was found; ends with the code for damage if there is any."""
    damaged = sorted({one.version for one in findings if one.damaged})
    marked = sorted({one.version for one in findings if one.unfit}) if mark else []
    if as_json:
        for one in findings:
            _echo(type="finding", damaged=one.damaged, **msgspec.to_builtins(one))
        _echo(type="verified", versions=count, bytes=done, damaged=damaged, marked=marked)
    else:
        for one in findings:
            click.echo(f"{'DAMAGED' if one.damaged else 'note':8} {one.detail}")
        what = f"{len(damaged)} damaged" if damaged else "nothing damaged"
        click.echo(f"{plural(count, 'version')} verified, {size(done)} read: {what}")
        if marked:
            click.echo(f"marked: {', '.join(map(str, marked))}; nobody loads them any more")
    if damaged:
        raise click.exceptions.Exit(CORRUPT)


def _bytes(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    try:
        return None if value is None else parse_bytes(value)
    except Mistake as error:
        raise click.BadParameter(str(error), context, parameter) from None


@weights.command("sweep")
@_common
@click.option("--keep-last", type=click.IntRange(1), help="How many of the newest to keep.")
@click.option("--keep-every", type=click.IntRange(0), help="Keep multiples of this; 0: none.")
@click.option("--max-bytes", callback=_bytes, metavar="SIZE", help="Budget, as in 10G; 0: none.")
@click.option("--dry-run", is_flag=True, help="Only tell what would go.")
@click.option("--foreign", is_flag=True, help="Versions of a trainer that is not ours go too.")
async def sweep(
    found: Found, dry_run: bool, foreign: bool, as_json: bool, **given: int | None
) -> None:
    """Delete the versions that nobody needs, and whatever crashes have left.

    What the options leave open is as the publisher keeps it. Whatever a live consumer pins,
    serves or still needs stays, as does the newest version.

    With --foreign (marker files only) this holds for the versions of another trainer too, which
    stay otherwise. Use it where that trainer deletes nothing and never writes a number twice:
    consumers of ours load a number that was swept no more.
    """
    await found.check_ours()
    retention = _retention(found, {k: v for k, v in given.items() if v is not None})
    book = await found.sweeping(foreign=foreign, dry_run=dry_run)
    before = await collect(found.channel, found.book, found.about)
    sweeper = Sweeper(found.channel, book, retention)
    report = await sweeper.sweep(dry_run=True)
    if not dry_run:
        found.check_deletable(report.deleted)
        report = await sweeper.sweep()
    if as_json:
        fields = msgspec.to_builtins(report)
        _echo(type="sweep", dry_run=dry_run, retention=retention.model_dump(), **fields)
        return
    base = f"{found.channel.layout.base}/"
    click.echo("\n".join(display.swept(report, before, retention, base, dry_run=dry_run)))


def _retention(found: Found, given: dict[str, int]) -> Retention:
    """What to keep: as the publisher does, where nothing else was said."""
    stored = found.about.policy() if found.about is not None else None
    if stored is None and "keep_last" not in given:
        raise Mistake(
            f"{found.path} does not say what its publisher keeps: give --keep-last K (and "
            "--keep-every N and --max-bytes SIZE if they are meant)"
        )
    return Retention.model_validate({**(stored.model_dump() if stored else {}), **given})


@weights.command("watch")
@_common
@click.option("--count", type=click.IntRange(1), help="Stop after this many changes.")
async def watch(found: Found, as_json: bool, count: int | None) -> None:
    """Follow what happens to the channel, live, until Ctrl-C: one line per change."""
    seen = 0
    stream = watch_channel(found.channel, found.book)
    async with contextlib.aclosing(stream) as happenings:
        async for one in happenings:
            if one.what == "watching":
                click.echo(f"watching {found.path} ({found.ledger_name()})", err=True)
                continue
            now = datetime.now().astimezone()
            if as_json:
                _echo(at=now.isoformat(timespec="milliseconds"), **msgspec.to_builtins(one))
            else:
                click.echo(f"{now:%H:%M:%S}  {display.happening(one)}")
            sys.stdout.flush()
            seen += one.what not in OF_THE_LEDGER
            if seen == count:
                return
