"""Carries a plan out on a run: `python -m holdfast.chaos.runs DIR --plan TEXT --seed N`.

A process of its own, beside the run. It follows the run's events to know which step is being
trained, does what the plan says when its moment has come, and tells of it in the same folder.
What the fault points do is armed by whoever starts the run; here it is only told. So is the
line to the gateway, which leads through this process if the plan cuts it: then it lives as
long as the run.
"""

import asyncio
import os
import random
import sys
import time
from pathlib import Path

import click
import msgspec

from holdfast import events
from holdfast.chaos import strikes
from holdfast.chaos.line import Line
from holdfast.chaos.plan import Clause, parse, storm
from holdfast.chaos.told import Log, Told
from holdfast.chaos.victims import find
from holdfast.errors import HoldfastError, Mistake
from holdfast.files import private_folder
from holdfast.text import plural
from holdfast.timeouts import DEFAULTS

__all__ = ["main"]


class Planned(events.Event, frozen=True, tag="chaos.planned"):
    """What is going to be done."""

    clauses: tuple[str, ...]
    points: tuple[str, ...]
    """The fault points among them; with a number if it is not the first hit."""


class Struck(events.Event, frozen=True, tag="chaos.struck"):
    """A fault was made."""

    labels = ("action",)

    clause: str
    target: str
    victim: int
    """Its process id; 0 where it is none."""
    action: str
    step: int
    """The step that was being trained."""
    point: str = ""
    """The fault point, or what was damaged."""


class Healed(events.Event, frozen=True, tag="chaos.healed"):
    """The next step after a fault is trained."""

    clause: str
    target: str
    seconds: float


class Missed(events.Event, frozen=True, tag="chaos.missed"):
    """A fault could not be made."""

    clause: str
    reason: str


class Tale:
    """What the orchestrator has told so far: which step is being trained."""

    def __init__(self, folder: Path) -> None:
        self._events = Log(folder / "events" / "orchestrator.jsonl")
        self._faults = Log(folder / "faults.jsonl")
        self.step = 0
        self.trained: list[tuple[int, float]] = []
        self.fired: list[Told] = []

    def read(self) -> None:
        """Read on."""
        self.fired += [one for one in self._faults.new() if one.type == "fault.fired"]
        for told in self._events.new():
            if told.type == "step.committed":
                self.step = max(self.step, told.step)
            elif told.type == "step.trained":
                self.trained.append((told.step, told.at))


class Chaos:
    """One plan, being carried out."""

    def __init__(
        self, folder: Path, clauses: tuple[Clause, ...], seed: int, line: Line | None = None
    ) -> None:
        self._folder = folder
        self._clauses = clauses
        self._line = line
        self._luck = random.Random(f"{seed}/chaos")
        self._tale = Tale(folder)
        self._began = time.monotonic()
        self._open: list[tuple[Clause, float]] = []
        self._told_points = 0

    async def run(self) -> None:
        """Until everything of the plan is done, and healed; for ever with a line."""
        strikes_to_come = [asyncio.create_task(self._strike(one)) for one in self._clauses]
        try:
            while self._line or self._open or any(not task.done() for task in strikes_to_come):
                if self._line is not None:
                    self._line.follow()
                self._follow()
                await asyncio.sleep(DEFAULTS.chaos_look_s)
        finally:
            for task in strikes_to_come:
                task.cancel()
            await asyncio.gather(*strikes_to_come, return_exceptions=True)

    def _follow(self) -> None:
        tale = self._tale
        tale.read()
        for fired in tale.fired[self._told_points :]:
            for clause in self._clauses:
                if _is_of(fired, clause):
                    self._tell(clause, fired.pid, at=fired.at)
                    break
        self._told_points = len(tale.fired)
        for clause, at in list(self._open):
            after = [when for _, when in tale.trained if when > at]
            if after:
                self._open.remove((clause, at))
                seconds = round(min(after) - at, 3)
                events.emit(Healed(clause=str(clause), target=clause.target, seconds=seconds))

    def _tell(
        self, clause: Clause, victim: int, *, at: float | None = None, point: str = ""
    ) -> None:
        events.emit(
            Struck(
                clause=str(clause),
                target=clause.target,
                victim=victim,
                action=clause.action,
                step=self._tale.step,
                point=clause.point or point,
            )
        )
        self._open.append((clause, time.time() if at is None else at))

    async def _strike(self, clause: Clause) -> None:
        if clause.point:
            while not any(_is_of(one, clause) for one in self._tale.fired):  # noqa: ASYNC110
                await asyncio.sleep(DEFAULTS.chaos_look_s)
            return
        while not self._is_due(clause):  # noqa: ASYNC110 -- another process's progress
            await asyncio.sleep(DEFAULTS.chaos_look_s)
        await asyncio.sleep(clause.delay_s)
        try:
            await self._act(clause)
        except (HoldfastError, OSError) as error:
            events.emit(Missed(clause=str(clause), reason=str(error)[:500]))

    def _is_due(self, clause: Clause) -> bool:
        if clause.step:
            return self._tale.step >= clause.step
        return time.monotonic() - self._began >= clause.at_s

    async def _act(self, clause: Clause) -> None:
        match clause.action:
            case "cut" if clause.cuts_line:
                if self._line is None:
                    raise Mistake("the orchestrator's line to the gateway does not lead past here")
                self._tell(clause, 0, point=plural(self._line.open_connections, "open connection"))
                await self._line.cut_for(clause.length_s)
            case "cut":
                self._tell(clause, 0)
                await strikes.cut(self._folder / "ledger.db", clause.length_s)
            case "full":
                self._tell(clause, 0)
                await strikes.fill(self._folder, clause.length_s)
            case "corrupt":
                what = strikes.corrupt(_store(self._folder), self._luck)
                self._tell(clause, 0, point=what)
            case _:
                await self._hurt(clause)

    async def _hurt(self, clause: Clause) -> None:
        until = time.monotonic() + DEFAULTS.chaos_find_s
        while time.monotonic() < until:
            victim = find(self._folder, clause.target)
            if victim is not None:
                self._tell(clause, victim.pid)
                if await strikes.hurt(victim, clause.target, pause_s=clause.length_s):
                    return
                self._open.pop()
            await asyncio.sleep(DEFAULTS.chaos_look_s)
        events.emit(Missed(clause=str(clause), reason=f"there was no {clause.target}"))


def _is_of(fired: Told, clause: Clause) -> bool:
    return (fired.point, fired.hit) == (clause.point, clause.hit)


class _Run(msgspec.Struct):
    run: str


def _store(folder: Path) -> Path:
    run = msgspec.json.decode((folder / "run.json").read_bytes(), type=_Run).run
    return Path("/dev/shm") / f"holdfast-{os.geteuid()}" / run  # noqa: S108 -- as the store has it


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--plan", "text", default="storm", help="Clauses, a file with them, or 'storm'.")
@click.option("--steps", default=100, help="How long the run is; for a storm.")
@click.option("--faults", "count", default=20, help="How many faults a storm has.")
@click.option("--seed", default=0)
@click.option("--line", "port", default=0, help="Where the line to the gateway comes past.")
@click.option("--needs", is_flag=True, help="Only print what the run has to be given, as JSON.")
def main(
    folder: Path, text: str, steps: int, count: int, seed: int, port: int, needs: bool
) -> None:
    """Carry a plan out on the run in FOLDER."""
    try:
        clauses = read_plan(text, steps, count, seed)
    except HoldfastError as error:
        click.echo(f"holdfast: {error}", err=True)
        sys.exit(error.exit_code)
    if needs:
        armed = ";".join(f"{one.point}:kill@{one.hit}!" for one in clauses if one.point)
        line = any(one.cuts_line for one in clauses)
        click.echo(msgspec.json.encode({"faults": armed, "line": line}).decode())
        return
    private_folder(folder / "events")
    events.configure(folder / "events" / "chaos.jsonl", process="chaos")
    points = tuple(one.armed for one in clauses if one.point)
    events.emit(Planned(clauses=tuple(map(str, clauses)), points=points))
    asyncio.run(_carry_out(folder, clauses, seed, port))


async def _carry_out(folder: Path, clauses: tuple[Clause, ...], seed: int, port: int) -> None:
    if not port:
        await Chaos(folder, clauses, seed).run()
        return
    async with Line(folder, port) as line:
        await Chaos(folder, clauses, seed, line).run()


def read_plan(text: str, steps: int, count: int, seed: int) -> tuple[Clause, ...]:
    """A plan by its text, by the name of a file, or a storm."""
    if text == "storm":
        return storm(seed, steps, faults=count)
    if "@" not in text and Path(text).is_file():
        return parse(Path(text).read_text())
    return parse(text)


if __name__ == "__main__":
    main()
