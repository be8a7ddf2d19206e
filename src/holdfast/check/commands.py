"""The command `holdfast check`."""

from pathlib import Path

import click
import msgspec

from holdfast.check.report import check_run, lines

__all__ = ["check"]


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_context
def check(ctx: click.Context, folder: Path, as_json: bool) -> None:
    """Say whether the promises held in a run, from its event logs alone.

    DIR is the folder of a run, over or still going on. Exit code 1 means that something was
    found, 4 that there is no run in DIR. A rule that found no records says "not checked".
    """
    report = check_run(folder)
    if as_json:
        click.echo(msgspec.json.encode(report).decode())
    else:
        for line in lines(report):
            click.echo(line)
    if report.findings:
        ctx.exit(1)
