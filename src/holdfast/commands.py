"""`holdfast run`, `why` and `clean`: the run itself, with everything that looks at it.

Not in `holdfast.run`, which knows nothing of its views: these are put together here.
"""

import asyncio
import contextlib
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

import holdfast
from holdfast.errors import Mistake, NotFound, Unavailable
from holdfast.faults import declared_in
from holdfast.run import ending
from holdfast.run.config import Config, load
from holdfast.run.driver import drive, supervise
from holdfast.run.folder import Folder
from holdfast.run.supervisor import Supervisor
from holdfast.run.why import why as why_of
from holdfast.text import table
from holdfast.transfer import shm
from holdfast.views.picture import Picture
from holdfast.views.points import of_a_run
from holdfast.views.report import summary, write_report
from holdfast.views.tail import look
from holdfast.views.terminal import Viewer
from holdfast.views.web import Web
from holdfast.views.writers import (
    need_tensorboard,
    need_wandb,
    write_tensorboard,
    write_wandb,
)

__all__ = ["clean", "run", "why"]

_PROOF = ("steps=12", "evaluate.every=6", "evaluate.prompts=16")
"""A proof need not learn anything: it is about the bits."""


@click.command()
@click.argument("config", type=click.Path(path_type=Path), required=False)
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="rollout.groups=8")
@click.option("--out", type=click.Path(path_type=Path), help="The run's folder [default: runs/…].")
@click.option("--seed", type=int, help="The same as --set seed=N.")
@click.option("--resume", type=click.Path(path_type=Path), help="Go on with the run in a folder.")
@click.option("--chaos", metavar="PLAN", help="'storm', a file, or 'trainer.rank1@step 7; …'.")
@click.option("--faults", default=20, show_default=True, help="How many faults a storm has.")
@click.option("--prove", is_flag=True, help="A short run, calm and in a storm: the same bits?")
@click.option("--web", is_flag=True, help="Serve a page about it.")
@click.option("--port", default=0, help="Of that page [default: any].")
@click.option("--plain", is_flag=True, help="Lines instead of a picture.")
@click.option("--tensorboard", is_flag=True, help="Write curves for TensorBoard, at the end.")
@click.option("--wandb", is_flag=True, help="Write them to Weights & Biases, at the end.")
@click.option("--dry-run", is_flag=True, help="Print what was understood, and do nothing.")
def run(
    config: Path | None,
    settings: tuple[str, ...],
    out: Path | None,
    seed: int | None,
    resume: Path | None,
    chaos: str | None,
    faults: int,
    prove: bool,
    web: bool,
    port: int,
    plain: bool,
    tensorboard: bool,
    wandb: bool,
    dry_run: bool,
) -> None:
    """Run a whole RL job on this machine: trainer, replicas, gateway and all.

    Kill whatever you like meanwhile: it goes on, and ends with the same weights.

    \b
    holdfast run                              learn to reverse digits, in two minutes
    holdfast run --chaos storm --web          the same, while everything dies
    holdfast run --prove                      calm against storm: are the bits the same?
    holdfast run mine.toml --set steps=500    see docs/RUN.md for what can be set
    holdfast run --resume DIR                 go on after Ctrl-C, or after kill -9
    """
    if tensorboard:
        need_tensorboard()
    if wandb:
        need_wandb()
    if resume is not None:
        if config or settings or out or seed is not None or prove:
            raise Mistake("--resume goes on with what was asked for then: give nothing else")
        folder = Folder.find(resume)
    else:
        base = _PROOF if prove else ()
        given = [*base, *settings, *([f"seed={seed}"] if seed is not None else [])]
        asked = load(config, given)
        if dry_run:
            click.echo(asked.model_dump_json(indent=2))
            return
        if prove:
            sys.exit(_prove(asked, out, faults))
        folder = Folder.make(out or Path("runs") / time.strftime("%Y%m%d-%H%M%S"), asked)
    click.echo(f"holdfast: {folder.path}")
    with _page(folder, port) if web else contextlib.nullcontext():
        if chaos is not None:
            flags = ["--plain"] * plain + ["--tensorboard"] * tensorboard + ["--wandb"] * wandb
            sys.exit(drive(folder, chaos, seed=folder.config.seed, faults=faults, flags=flags))
        picture, facts = _run(folder, resumed=resume is not None, plain=plain or None)
        if tensorboard:
            write_tensorboard(picture, folder.path / "tensorboard")
        if wandb:
            config_of = folder.config.model_dump(mode="json")
            write_wandb(folder.path, run=folder.run, config=config_of, facts=facts)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
def why(folder: Path) -> None:
    """Say what the run in FOLDER is waiting for right now: which record, whose, how long."""
    for reason in asyncio.run(why_of(Folder.find(folder))):
        click.echo(str(reason))


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
def clean(folder: Path) -> None:
    """Remove what a killed run has left in shared memory. Its folder stays as it is.

    `holdfast run --resume` makes the samples again that it misses.
    """
    found = Folder.find(folder)
    with found.held():
        try:
            removed = shm.remove(found.run)
        except NotFound:
            click.echo("holdfast: nothing is left")
            return
    if not removed:
        raise Unavailable(f"{found.run} is still in use: stop the run first")
    click.echo(f"holdfast: removed the store {found.run}")


@contextlib.contextmanager
def _page(folder: Folder, port: int) -> Iterator[None]:
    page = Web(folder.path, port=port)
    page.start()
    click.echo(f"holdfast: {page.url}")
    try:
        yield
    finally:
        page.stop()


def _run(folder: Folder, *, resumed: bool, plain: bool | None) -> tuple[Picture, dict[str, Any]]:
    """One life of the run's supervisor, with a view of it; returns what came of it."""
    with folder.held():
        since = time.time() if resumed else 0.0
        viewer = Viewer(folder.path, plain=plain, since=since)
        viewer.start()
        try:
            done = Supervisor(folder, _complain, resumed=resumed).run()
        finally:
            viewer.stop()
        if done is None:
            click.echo(f"holdfast: stopped; go on with `holdfast run --resume {folder.path}`")
            sys.exit(130)
        picture = look(folder.path)
        facts = ending.final_of(folder, done)
        ending.write_final(folder, facts)
        points = _points(folder) if picture.counts["chaos.planned"] else []
        report = write_report(folder.path, picture, points=points)  # tells the rest by itself
        told = {**summary(picture), "points": picture.points.facts(points)}
        ending.write_final(folder, {**told, **facts})
    exact, target = facts["eval_exact"] or 0.0, facts["target"]
    reached = "reached" if exact >= target else "not reached"
    click.echo(f"weights {done.content}")
    click.echo(f"held-out exact match {exact:.3f} (target {target:g}: {reached})")
    click.echo(f"report {report}")
    return picture, facts


def _points(folder: Folder) -> list[str]:
    """The fault points of the parts of a run."""
    return of_a_run(set(declared_in(holdfast)), ledger=folder.ledger, store=folder.store)


def _complain(text: str) -> None:
    click.echo(f"holdfast: {text}", err=True)


def _prove(config: Config, out: Path | None, faults: int) -> int:
    """Run the same twice, calm and in a storm, and compare."""
    place = out or Path(tempfile.mkdtemp(prefix="holdfast-proof-"))
    calm, storm = Folder.make(place / "calm", config), Folder.make(place / "storm", config)
    click.echo(f"calm:  {calm.path}")
    code = supervise(calm, flags=["--plain"])
    if code:
        return code
    click.echo(f"storm: {storm.path}, {faults} faults, seed {config.seed}")
    code = drive(storm, "storm", seed=config.seed, faults=faults, flags=["--plain"])
    if code:
        return code
    return _judge(calm, storm)


def _judge(calm: Folder, storm: Folder) -> int:
    picture = look(storm.path)
    faults = picture.faults
    rows = [
        [one.clause or one.kind, str(one.step), one.point, f"{faults.lost_s(one) or 0.0:.1f}"]
        for one in faults.kept
    ]
    click.echo("\n".join(table(["FAULT", "STEP", "POINT", "SECONDS LOST"], rows, "lrlr")))
    for name, points in picture.points.facts(_points(storm)).items():
        title = f"points {name.replace('_', ' ')} ({len(points)}): "
        click.echo(
            textwrap.fill(title + (", ".join(points) or "none"), 99, subsequent_indent="  ")
        )
    hashes = [done.content if done else "-" for _, done in map(ending.state_of, (calm, storm))]
    click.echo(f"calm   {hashes[0]}\nstorm  {hashes[1]}")
    found = ending.differences(calm.path, storm.path)
    for line in found:
        click.echo(f"differs: {line}")
    same = hashes[0] == hashes[1] and not found
    click.echo("the same weights, bit for bit" if same else "NOT the same")
    return 0 if same else 1
