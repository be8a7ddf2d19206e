"""`holdfast sim`: play schedules, print what was tested, tell the story of a failure."""

import hashlib
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click

from holdfast.errors import Mistake
from holdfast.sim import protocols
from holdfast.sim.faults import Table, describe
from holdfast.sim.pool import Pool
from holdfast.sim.protocol import Protocol
from holdfast.sim.runner import Failure, Summary, play, shortest

__all__ = ["sim"]

_SEEDS_PER_PAIR = 3
"""With so many schedules for each pair of fault and step, every pair must have met."""
_STORY_LINES = 60


@click.command()
@click.argument("name", required=False)
@click.option("--seeds", default=1000, show_default=True, help="How many schedules to play.")
@click.option("--first", type=int, help="The first seed (default: 0; 'commit' with --fresh).")
@click.option("--fresh", is_flag=True, help="Derive the first seed from the current commit.")
@click.option("--seed", type=int, help="Replay exactly this schedule and tell its story.")
@click.option(
    "--steps", type=int, help="Steps with faults per schedule (default: the protocol's)."
)
@click.option("--jobs", type=click.IntRange(1), help="Processes that play (default: the cores).")
@click.option("--all", "everything", is_flag=True, help="Every protocol, and every broken one.")
@click.option(
    "--variants",
    type=click.IntRange(1),
    help="With --all: so many broken variants per protocol, others with every commit (--fresh).",
)
@click.option("--list", "listing", is_flag=True, help="List the protocols.")
def sim(
    name: str | None,
    seeds: int,
    first: int | None,
    fresh: bool,
    seed: int | None,
    steps: int | None,
    jobs: int | None,
    everything: bool,
    variants: int | None,
    listing: bool,
) -> None:
    """Play NAME's protocol on a virtual clock under seeded faults.

    Its processes run the production code. After every step its promises are checked. The
    first schedule that breaks one is made as short as possible and told as a story; its
    seed replays it exactly. Exit code 1 when a promise was broken, or when some kind of
    fault never fired in a run of three schedules or more per pair of fault and step.

    \b
      holdfast sim election --seeds 1000
      holdfast sim election-broken            (must fail: the promise is broken on purpose)
      holdfast sim election-broken --seed 7   (replay one schedule)
      holdfast sim --all --seeds 300          (all of them, and all broken variants caught)
    """
    if listing:
        _list()
        return
    if seeds < 1 or (steps is not None and steps < 10):
        raise Mistake("--seeds is 1 or more, --steps 10 or more")
    if fresh and first is not None:
        raise Mistake("--fresh and --first both choose the first seed: use one of them")
    if everything and (seed is not None or name is not None):
        raise Mistake("--all plays everything: leave NAME and --seed out")
    start = _commit_seed() if fresh else (first or 0)
    if everything:
        with Pool(jobs) as pool:
            _play_all(pool, seeds, start, steps, variants)
        return
    if name is None:
        raise Mistake(f"name a protocol: {', '.join(protocols.names())} (or use --all)")
    make = protocols.find(name)
    if seed is not None:
        _replay(name, make, seed, steps)
        return
    with Pool(jobs) as pool:
        summary = _play(pool, name, range(start, start + seeds), steps)
    _print_table(summary.table)
    if summary.failure is not None:
        _tell(name, make, summary.failure, steps)
        raise click.exceptions.Exit(1)
    if missing := _missing(summary):
        pairs = ", ".join(f"{fault} at {step}" for fault, step in missing)
        click.echo(f"{name}: FAILED: never fired: {pairs}")
        raise click.exceptions.Exit(1)


def _missing(summary: Summary) -> list[tuple[str, str]]:
    """Pairs of fault and step that should have met by now."""
    enough = summary.schedules >= _SEEDS_PER_PAIR * len(summary.table.possible)
    return summary.table.never_fired() if enough else []


def _list() -> None:
    for name, about in protocols.names().items():
        click.echo(f"{name:28} {about}")
        for broken in protocols.broken_names(name):
            click.echo(f"  {broken:26} {(protocols.about(broken))}")


def _commit_seed() -> int:
    """A number that changes with every commit, so that time adds coverage."""
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            check=True,
            text=True,
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        from holdfast import __version__ as commit
    return int(hashlib.sha256(commit.encode()).hexdigest()[:8], 16)


def _play(pool: Pool, name: str, seeds: range, steps: int | None) -> Summary:
    began = shown = time.monotonic()
    summary: Summary | None = None
    terminal = sys.stderr.isatty()
    for summary in pool.search(name, seeds, steps=steps):
        if terminal and time.monotonic() - shown > 0.5:
            shown = time.monotonic()
            click.echo(f"\r{name}: {summary.schedules} of {len(seeds)} ", nl=False, err=True)
    assert summary is not None
    if terminal:
        click.echo("\r\033[K", nl=False, err=True)
    took_s = time.monotonic() - began
    faults = summary.table.fired.total()
    verdict = "BROKEN" if summary.failure else "ok"
    click.echo(
        f"{name}: {verdict}: {summary.schedules} schedules from seed {seeds.start}, "
        f"{summary.steps} steps, {faults} faults, {took_s:.1f} s "
        f"({summary.schedules / took_s * 60:.0f} schedules/min)"
    )
    return summary


def _play_all(pool: Pool, seeds: int, start: int, steps: int | None, variants: int | None) -> None:
    """Every sound protocol must hold, every broken one (or some of them) must be caught."""
    bad: list[str] = []
    for name in protocols.names():
        make = protocols.find(name)
        summary = _play(pool, name, range(start, start + seeds), steps)
        if summary.failure is not None:
            _tell(name, make, summary.failure, steps)
            bad.append(name)
        elif missing := _missing(summary):
            click.echo(f"{name}: never fired: {missing}")
            bad.append(name)
        _print_table(summary.table)
        broken = protocols.broken_names(name)
        turn = start % len(broken)
        for variant in (broken[turn:] + broken[:turn])[:variants]:
            # Always the same seeds: whether a mistake is found must not change from day to day.
            found = _catch(pool, variant, range(1000), steps)
            if found is None:
                click.echo(f"  {variant}: NOT CAUGHT")
                bad.append(variant)
            else:
                click.echo(f"  {variant}: caught by seed {found.seed}: {found.violation}")
    click.echo(f"{len(bad)} problems" + (f": {', '.join(bad)}" if bad else ""))
    if bad:
        raise click.exceptions.Exit(1)


def _catch(pool: Pool, name: str, seeds: range, steps: int | None) -> Failure | None:
    for summary in pool.search(name, seeds, steps=steps):
        if summary.failure is not None:
            return summary.failure
    return None


def _replay(name: str, make: Callable[[], Protocol], seed: int, steps: int | None) -> None:
    failure, table = play(make, seed, steps=steps)
    if failure is None:
        click.echo(
            f"{name}: ok: seed {seed}, {table.steps.total()} steps, {table.fired.total()} faults"
        )
        return
    _tell(name, make, failure, steps)
    raise click.exceptions.Exit(1)


def _tell(name: str, make: Callable[[], Protocol], failure: Failure, steps: int | None) -> None:
    click.echo(f"\nseed {failure.seed} breaks {name}: {failure.violation}")
    short = shortest(make, failure, steps=steps)
    if short.violation != failure.violation:
        click.echo(f"With fewer faults it is: {short.violation}")
    click.echo(
        f"Of its {len(failure.faults)} faults it takes {len(short.faults)} "
        "(leave out any one of them and the failure vanishes):"
    )
    for fault in short.faults:
        click.echo(f"  - {describe(fault)}, at its step {fault.step}")
    lines = short.story
    if len(lines) > _STORY_LINES:
        click.echo(f"The story, its last {_STORY_LINES} of {len(lines)} lines:")
    else:
        click.echo("The story:")
    for at, who, what in lines[-_STORY_LINES:]:
        click.echo(f"  {at:10.3f}  {who:7} {what}")
    extra = "" if steps is None else f" --steps {steps}"
    click.echo(f"Replay it: holdfast sim {name} --seed {failure.seed}{extra}")


def _print_table(table: Table) -> None:
    """How often each fault fired at each kind of step."""
    rows = list(table.rows())
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        click.echo("  ".join([row[0].ljust(len(first)), *rest]))
