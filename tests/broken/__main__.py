"""Play broken variants: each must be caught by one of the first 1,000 seeds."""

import click

import broken
from holdfast.errors import Mistake
from holdfast.sim import protocols
from holdfast.sim.pool import Pool
from holdfast.sim.report import Player, commit_seed


@click.command()
@click.argument("name", required=False)
@click.option("--seeds", default=1000, show_default=True, help="Caught within so many schedules.")
@click.option("--fresh", is_flag=True, help="Let the current commit choose the --variants.")
@click.option("--seed", type=int, help="Replay exactly this schedule of NAME and tell its story.")
@click.option("--steps", type=int, help="Steps with faults per schedule.")
@click.option("--jobs", type=click.IntRange(1), help="Processes that play (default: the cores).")
@click.option(
    "--variants", type=click.IntRange(1), help="So many of each protocol (default: all)."
)
@click.option("--list", "listing", is_flag=True, help="List the variants.")
def main(
    name: str | None,
    seeds: int,
    fresh: bool,
    seed: int | None,
    steps: int | None,
    jobs: int | None,
    variants: int | None,
    listing: bool,
) -> None:
    """Play the variants of every protocol, or of protocol NAME; exit 1 if one is not caught.

    With the NAME of one variant: play it until it breaks, and tell the story (exit 1).
    """
    if listing:
        for protocol in protocols.names():
            for one in broken.names(protocol):
                click.echo(f"{one:30} {broken.about(one)}")
        return
    with Pool(broken.find, jobs) as pool:
        player = Player(pool, "python -m broken", steps=steps)
        if name is not None and "-broken" in name:
            broken.find(name)
            held = player.holds(name, range(seeds)) if seed is None else player.replay(name, seed)
            raise click.exceptions.Exit(0 if held else 1)
        if seed is not None:
            raise Mistake("--seed replays one variant: name it")
        # Always the same seeds: whether a mistake is found must not change from day to day.
        missed = [
            one
            for protocol in ([name] if name else protocols.names())
            for one in _turn(broken.names(protocol), commit_seed() if fresh else 0)[:variants]
            if not player.catches(one, range(seeds))
        ]
    click.echo(f"{len(missed)} problems" + (f": {', '.join(missed)}" if missed else ""))
    if missed:
        raise click.exceptions.Exit(1)


def _turn(names: list[str], number: int) -> list[str]:
    """The same names, beginning with another one for every number."""
    at = number % len(names)
    return names[at:] + names[:at]


if __name__ == "__main__":
    main()
