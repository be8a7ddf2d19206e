"""Playing schedules for people: what was tested, and the story of a failure."""

import hashlib
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import click

from holdfast import text
from holdfast.sim.faults import describe
from holdfast.sim.pool import Pool
from holdfast.sim.runner import Failure, Summary, play, shortest

__all__ = ["Player", "commit_seed"]

_SEEDS_PER_PAIR = 3
"""With so many schedules for each pair of fault and step, every pair must have met."""
_STORY_LINES = 60


@dataclass
class Player:
    """Plays protocols by their names and prints what came of it; `command` replays a schedule."""

    pool: Pool
    command: str
    steps: int | None

    def holds(self, name: str, seeds: range) -> bool:
        """Whether a protocol keeps its promises, and met every fault at every kind of step."""
        summary = self._play(name, seeds)
        heads, *rows = summary.table.rows()
        for line in text.table(heads, rows, " " + "r" * len(heads)):
            click.echo(line)
        if summary.failure is not None:
            self._tell(name, summary.failure)
            return False
        if missing := _missing(summary):
            pairs = ", ".join(f"{fault} at {step}" for fault, step in missing)
            click.echo(f"{name}: FAILED: never fired: {pairs}")
        return not missing

    def catches(self, name: str, seeds: range) -> bool:
        """Whether one of the schedules breaks a protocol."""
        for summary in self.pool.search(name, seeds, steps=self.steps):
            if (found := summary.failure) is not None:
                click.echo(f"  {name}: caught by seed {found.seed}: {found.violation}")
                return True
        click.echo(f"  {name}: NOT CAUGHT")
        return False

    def replay(self, name: str, seed: int) -> bool:
        """Play exactly one schedule, and tell its story if it breaks a promise."""
        failure, table = play(self.pool.find(name), seed, steps=self.steps)
        if failure is None:
            steps, faults = table.steps.total(), table.fired.total()
            click.echo(f"{name}: ok: seed {seed}, {steps} steps, {faults} faults")
            return True
        self._tell(name, failure)
        return False

    def _play(self, name: str, seeds: range) -> Summary:
        began = shown = time.monotonic()
        summary: Summary | None = None
        terminal = sys.stderr.isatty()
        for summary in self.pool.search(name, seeds, steps=self.steps):
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

    def _tell(self, name: str, failure: Failure) -> None:
        click.echo(f"\nseed {failure.seed} breaks {name}: {failure.violation}")
        short = shortest(self.pool.find(name), failure, steps=self.steps)
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
        extra = "" if self.steps is None else f" --steps {self.steps}"
        click.echo(f"Replay it: {self.command} {name} --seed {failure.seed}{extra}")


def commit_seed() -> int:
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


def _missing(summary: Summary) -> list[tuple[str, str]]:
    """Pairs of fault and step that should have met by now."""
    enough = summary.schedules >= _SEEDS_PER_PAIR * len(summary.table.possible)
    return summary.table.never_fired() if enough else []
