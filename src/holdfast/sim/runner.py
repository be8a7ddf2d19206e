"""Playing many schedules, and telling the shortest story of one that broke.

A failing schedule is replayed with fewer and fewer faults until removing any one of
those that are left makes the failure vanish. The story is the trace of that schedule.
"""

import gc
import re
import sys
from collections.abc import Callable, Iterable, Iterator

import msgspec

from holdfast.sim.faults import Fault, Table
from holdfast.sim.protocol import Protocol
from holdfast.sim.world import Dead, World

_NUMBERS = re.compile(r"\d+")

__all__ = ["Failure", "Make", "Summary", "play", "search", "shortest"]

Make = Callable[[], Protocol]

_GC_EVERY = 50


class Failure(msgspec.Struct):
    """A broken promise: the seed that leads to it and the faults that it takes."""

    seed: int
    violation: str
    faults: list[Fault]
    story: list[tuple[float, str, str]] = []


class Summary(msgspec.Struct):
    """What a run over many seeds has shown."""

    schedules: int
    table: Table
    failure: Failure | None

    @property
    def steps(self) -> int:
        """How many steps were taken, in all schedules."""
        return self.table.steps.total()


def play(
    make: Make,
    seed: int,
    *,
    steps: int | None = None,
    faults: list[Fault] | None = None,
    trace: bool = False,
) -> tuple[Failure | None, Table]:
    """Play one schedule: with the seed's faults, or with these."""
    world = World(make(), seed, steps=steps, faults=faults, trace=trace)
    violation = world.play()
    if violation is None:
        return None, world.table
    return Failure(seed, str(violation), world.fired, world.story), world.table


def search(make: Make, seeds: Iterable[int], *, steps: int | None = None) -> Iterator[Summary]:
    """Play one schedule after the other until one breaks; yields the state after each."""
    table: Table | None = None
    gc.disable()  # the garbage of a schedule is cyclic; collecting it now and then is faster
    complain, sys.unraisablehook = sys.unraisablehook, _without_the_dead
    try:
        for count, seed in enumerate(seeds, 1):
            failure, counts = play(make, seed, steps=steps)
            if table is None:
                table = counts
            else:
                table.add(counts)
            if count % _GC_EVERY == 0:
                gc.collect()
            yield Summary(count, table, failure)
            if failure is not None:
                return
    finally:
        gc.collect()
        gc.enable()
        sys.unraisablehook = complain


def _without_the_dead(unraisable: "sys.UnraisableHookArgs") -> None:
    """What is left of dead processes finds out, when it is collected, that it is dead."""
    error = unraisable.exc_value
    if isinstance(error, Dead) or "ignored GeneratorExit" in str(error):
        return
    sys.__unraisablehook__(unraisable)


def shortest(make: Make, failure: Failure, *, steps: int | None = None) -> Failure:
    """The same failure with no fault in it that could be left out, and its story."""

    def replay(faults: list[Fault], *, trace: bool = False) -> Failure | None:
        return play(make, failure.seed, steps=steps, faults=faults, trace=trace)[0]

    def fewer(current: Failure) -> Failure | None:
        """A failure without some of these faults: the same kind of failure, if there is one."""
        other_kind = None
        for part in _parts(current.faults):
            found = replay([other for other in current.faults if other not in part])
            if found is None:
                continue
            if _kind(found.violation) == _kind(current.violation):
                return found
            other_kind = other_kind or found
        return other_kind

    current = replay(failure.faults)
    assert current is not None, "a schedule must replay exactly"
    while (found := fewer(current)) is not None:
        current = found
    told = replay(current.faults, trace=True)
    assert told is not None, "a schedule must replay exactly"
    return told


def _parts(faults: list[Fault]) -> Iterator[list[Fault]]:
    """What to leave out: halves, quarters and so on, then each fault by itself."""
    length = len(faults) // 2
    while length > 1:
        for begin in range(0, len(faults), length):
            yield faults[begin : begin + length]
        length //= 2
    for fault in faults:
        yield [fault]


def _kind(violation: str) -> str:
    """The violation without its numbers."""
    return _NUMBERS.sub("#", violation)
