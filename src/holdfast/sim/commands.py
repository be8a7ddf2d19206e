"""`holdfast sim`: play schedules, print what was tested, tell the story of a failure."""

import click

from holdfast.errors import Mistake
from holdfast.sim import protocols
from holdfast.sim.pool import Pool
from holdfast.sim.report import Player, commit_seed

__all__ = ["sim"]


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
@click.option("--all", "everything", is_flag=True, help="Every protocol.")
@click.option("--variants", type=click.IntRange(1), hidden=True)
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
      holdfast sim election --seed 7          (replay one schedule)
      holdfast sim --all --seeds 300          (all protocols)

    Protocols with one mistake each, which the simulator must catch, live with the tests of
    Holdfast's repository; `make sim` plays them, too.
    """
    if listing:
        for one, about in protocols.names().items():
            click.echo(f"{one:28} {about}")
        return
    if seeds < 1 or (steps is not None and steps < 10):
        raise Mistake("--seeds is 1 or more, --steps 10 or more")
    if fresh and first is not None:
        raise Mistake("--fresh and --first both choose the first seed: use one of them")
    if everything and (seed is not None or name is not None):
        raise Mistake("--all plays everything: leave NAME and --seed out")
    if variants is not None:
        click.echo(
            "--variants has no effect: `python -m broken` below tests/ plays variants", err=True
        )
    if name is None and not everything:
        raise Mistake(f"name a protocol: {', '.join(protocols.names())} (or use --all)")
    played = [name] if name else list(protocols.names())
    protocols.find(played[0])
    start = commit_seed() if fresh else (first or 0)
    with Pool(protocols.find, jobs) as pool:
        player = Player(pool, "holdfast sim", steps=steps)
        if seed is not None:
            bad = [one for one in played if not player.replay(one, seed)]
        else:
            bad = [one for one in played if not player.holds(one, range(start, start + seeds))]
    if everything:
        click.echo(f"{len(bad)} problems" + (f": {', '.join(bad)}" if bad else ""))
    if bad:
        raise click.exceptions.Exit(1)
