"""`holdfast run`."""

import time
from pathlib import Path

import click
import msgspec

from holdfast.errors import Mistake
from holdfast.run.config import load
from holdfast.run.driver import drive
from holdfast.run.folder import Folder
from holdfast.run.supervisor import Supervisor

__all__ = ["run"]


@click.command()
@click.argument("config", type=click.Path(path_type=Path), required=False)
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="rollout.groups=8")
@click.option("--out", type=click.Path(path_type=Path), help="The run's folder [default: runs/…].")
@click.option("--seed", type=int, help="The same as --set seed=N.")
@click.option("--resume", type=click.Path(path_type=Path), help="Go on with the run in a folder.")
@click.option("--chaos", metavar="PLAN", help="'storm', a file, or 'trainer.rank1@step 7; …'.")
@click.option("--faults", default=20, show_default=True, help="How many faults a storm has.")
@click.option("--dry-run", is_flag=True, help="Print what was understood, and do nothing.")
def run(
    config: Path | None,
    settings: tuple[str, ...],
    out: Path | None,
    seed: int | None,
    resume: Path | None,
    chaos: str | None,
    faults: int,
    dry_run: bool,
) -> None:
    """Run a whole RL job on this machine: trainer, replicas, gateway and all.

    Kill whatever you like meanwhile: it goes on, and ends with the same weights.
    """
    if resume is not None and (config or settings or out or seed is not None):
        raise Mistake("--resume goes on with what was asked for then: give nothing else")
    if resume is not None:
        folder = Folder.find(resume)
    else:
        given = [*settings, *([f"seed={seed}"] if seed is not None else [])]
        asked = load(config, given)
        if dry_run:
            click.echo(asked.model_dump_json(indent=2))
            return
        folder = Folder.make(out or Path("runs") / time.strftime("%Y%m%d-%H%M%S"), asked)
    if chaos is not None:
        click.echo(f"holdfast: run {folder.run} in {folder.path}, under {chaos}")
        raise SystemExit(drive(folder, chaos, seed=folder.config.seed, faults=faults))
    with folder.held():
        click.echo(f"holdfast: run {folder.run} in {folder.path}")
        supervisor = Supervisor(
            folder, lambda text: click.echo(f"holdfast: {text}", err=True), resumed=bool(resume)
        )
        done = supervisor.run()
    if done is None:
        click.echo(f"holdfast: stopped; go on with `holdfast run --resume {folder.path}`")
        raise SystemExit(130)
    click.echo(msgspec.json.encode(done).decode())
